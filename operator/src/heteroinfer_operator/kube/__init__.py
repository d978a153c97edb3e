"""The port of cluster.py on Kubernetes; the only package that speaks to the API server.

Apart from it only kopf does, which watches HeteroInference (handlers.py).
"""
