"""Implements the interface of cluster.py on Kubernetes.

Only this package sends requests to the API server, apart from kopf, which watches HeteroInference
(handlers.py).
"""
