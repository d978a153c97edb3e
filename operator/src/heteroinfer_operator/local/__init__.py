"""Runs a resource on this machine, for `heteroinfer up`: implements cluster.py with processes.

The planner, the manifests and the reconcile are the same as on Kubernetes. A Pod is a process tree, and the
only node is this machine. Services and NetworkPolicies are stored and compared like other children, but have
no effect: all processes listen on loopback.
"""
