"""Plan and addressing to Kubernetes objects, a file a kind.

Pure: must not import kopf, a client, os, time, random or logging.
"""
