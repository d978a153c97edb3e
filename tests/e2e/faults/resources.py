"""Builds the resources of the fault tests."""

from datetime import timedelta
from typing import Any

from heteroinfer_contract import names
from tests.cluster.joined_node import TAINT

PAIR, NO_IMAGE, NO_MODEL = "pair", "no-image", "no-model"
UNKNOWN_IMAGE = "localhost/heteroinfer/nowhere:test"
MODEL = "pvc://models/small"
REFUSED_MODEL = "hf://org/model"
"""The CRD accepts this name, and the operator refuses it, because it has no cache for it."""
WINDOW = timedelta(minutes=1)
"""Window of the pair's restarts: the shortest allowed."""
RESOURCES = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}


def build_resource(name: str, **spec: Any) -> dict[str, Any]:
    """Builds a HeteroInference of two CPU ranks in two pods, with these fields in its spec."""
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
    """Builds the group that most faults end. Its follower prefers the second node, but does not require it.

    Restarts count together only within WINDOW, so that two faults need no back-off in between.
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
