"""Runs a webhook that adds a sidecar to pods like Istio's injector, unless their label opts out."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.cluster.node import NodeCluster
from tests.e2e.admission import changed_pods

LABEL = "sidecar.istio.io/inject"
SIDECAR = "istio-proxy"


def mesh_injector(
    cluster: NodeCluster, namespace: str, folder: Path, image: str
) -> AbstractContextManager[None]:
    """Adds a sidecar to the pods of a namespace until the context ends.

    Args:
        folder: folder for the key.
        image: image of the sidecar, with a shell.
    """
    sidecar = {
        "name": SIDECAR,
        "image": image,
        "command": ["sh", "-c", "trap '' TERM; while true; do sleep 1; done"],  # it outlives SIGTERM
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"limits": {"cpu": "100m", "memory": "64Mi", "ephemeral-storage": "16Mi"}},
    }

    def inject(pod: dict[str, Any]) -> list[dict[str, Any]]:
        if (pod["metadata"].get("labels") or {}).get(LABEL) == "false":
            return []
        return [{"op": "add", "path": "/spec/containers/-", "value": sidecar}]

    return changed_pods(cluster, "mesh-injector", [namespace], folder, inject)
