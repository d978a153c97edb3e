"""The port of cluster.py on this machine's processes: `heteroinfer up`.

Same planner, manifests and reconcile as on Kubernetes; a Pod is a process tree, the one
node is this machine, and what only a network of pods needs (Services, NetworkPolicies) is
kept and compared as any child, but nothing acts on it: all listens on loopback.
"""
