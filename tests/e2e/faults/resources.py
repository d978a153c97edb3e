"""The resources that faults happen to."""

from datetime import timedelta
from typing import Any

from heteroinfer_contract import names
from tests.cluster.joined_node import TAINT

PAIR, NO_IMAGE, NO_MODEL = "pair", "no-image", "no-model"
UNKNOWN_IMAGE = "localhost/heteroinfer/nowhere:test"
MODEL = "pvc://models/small"
REFUSED_MODEL = "hf://org/model"
"""Accepted at apply, refused by the operator: there is no cache for it."""
WINDOW = timedelta(minutes=1)
"""Of the pair's restarts: as short as it may be."""
RESOURCES = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}


def build_resource(name: str, **spec: Any) -> dict[str, Any]:
    """Returns a HeteroInference of two CPU ranks in two pods, with these fields in its spec."""
    role = {"name": "cpu", "device": "CPU", "pods": 2, "resources": RESOURCES}
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": MODEL},
            "engine": {"maxModelLen": 1024},
            "parallelism": {"mode": "Pipeline"},
            "roles": [role],
            **spec,
        },
    }


def build_pair(second_node: str) -> dict[str, Any]:
    """Returns the group that most faults end: its follower prefers the second node, and may do without.

    Its restarts count together within WINDOW only, so that no back-off need come between two faults.
    """
    match = {"key": "kubernetes.io/hostname", "operator": "In", "values": [second_node]}
    there = {"weight": 100, "preference": {"matchExpressions": [match]}}
    template = {
        "tolerations": [{"key": TAINT, "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [there]}},
    }
    front = {"name": "front", "device": "CPU", "resources": RESOURCES}
    back = {"name": "back", "device": "CPU", "resources": RESOURCES, "template": template}
    return build_resource(
        PAIR,
        roles=[front, back],
        restart={"maxRestarts": 20, "window": f"{WINDOW.total_seconds():.0f}s", "nodeLostAfter": "5s"},
        drainTimeout="5s",
    )
