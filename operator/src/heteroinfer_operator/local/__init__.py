"""The port of cluster.py on this machine's processes: `heteroinfer up`.

Same planner, manifests and reconcile as on Kubernetes; a Pod is a process tree, the one
node is this machine, and what only a network of pods needs (Services, NetworkPolicies) is
kept and compared as any child, but nothing acts on it: all listens on loopback.
"""

from heteroinfer_operator.local.adapter import LocalCluster, LocalOptions
from heteroinfer_operator.local.loopback_addressing import LocalAddressing, PortsTakenError
from heteroinfer_operator.local.pod_process import UnsupportedPodFieldError
from heteroinfer_operator.local.this_node import observe_gpus, observe_node
from heteroinfer_operator.local.worker_python import WorkerPythonError, find_worker_python

__all__ = [
    "LocalAddressing",
    "LocalCluster",
    "LocalOptions",
    "PortsTakenError",
    "UnsupportedPodFieldError",
    "WorkerPythonError",
    "find_worker_python",
    "observe_gpus",
    "observe_node",
]
