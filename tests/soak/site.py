"""Starts the cluster of a soak: played nodes, and optionally a real node with real ranks."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.api.crd import build_crd
from tests.cluster import kwok
from tests.cluster.crds import apply_crds
from tests.cluster.folders import REPOSITORY
from tests.cluster.images import ensure_images
from tests.cluster.node import NodeCluster, start_node_cluster
from tests.cluster.running_cluster import Cluster, start_control_plane_only
from tests.cluster.volumes import volume_manifests
from tests.integration.operator.running_operator import PROFILE

NAMESPACE = "soak"
REAL = "real"
NODES = 8


@contextmanager
def site(folder: Path, *, real: bool) -> Iterator[Cluster]:
    """Yields a cluster with played nodes, the CRD, and a namespace with a volume of models.

    Args:
        folder: folder for the files of this cluster.
        real: whether there is also a real node, and a real model in the volume.
    """
    start = (lambda: start_node_cluster(ensure_images())) if real else start_control_plane_only
    models = folder / "models"
    models.mkdir(mode=0o755)
    folder.chmod(0o755)  # workers are not root
    if real:
        make = [str(REPOSITORY / ".venv-worker/bin/python"), "-m", "tests.models", str(models / "tiny")]
        subprocess.run(make, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=300)
    with start() as cluster:
        kwok.start_kwok(cluster, nodes=NODES, profile=json.dumps(PROFILE))
        apply_crds(cluster, build_crd())
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, models))
        yield cluster


def build_resources(cluster: Cluster, count: int) -> list[dict[str, Any]]:
    """Builds this number of played resources of several shapes, and a real one if there is a real node."""
    played = [_build_played(number) for number in range(count)]
    if not isinstance(cluster, NodeCluster):
        return played
    resources = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    here = {"nodeSelector": {"kubernetes.io/hostname": cluster.node_name}}
    role = {"name": "cpu", "device": "CPU", "pods": 2, "resources": resources, "template": here}
    return [*played, _build(REAL, role, replicas=1)]


def _build_played(number: int) -> dict[str, Any]:
    """Builds a resource of two groups of two pods, of one group of three, or of one of two."""
    pods, replicas = ((2, 2), (3, 1), (2, 1))[number % 3]
    template = {"nodeSelector": {kwok.LABEL: "true"}}
    role = {"name": "cpu", "device": "CPU", "pods": pods, "template": template}
    return _build(f"soak-{number}", role, replicas=replicas)


def _build(name: str, role: dict[str, Any], *, replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "pvc://models/tiny"},
            "engine": {"dtype": "float32", "maxModelLen": 512},
            "replicas": replicas,
            "parallelism": {"mode": "Pipeline"},
            "roles": [role],
            # Pods end so often that the default would soon be used up. The back-off still applies.
            "restart": {"maxRestarts": 20, "window": "1m", "backoffMax": "20s"},
            "drainTimeout": "2s",
        },
    }
