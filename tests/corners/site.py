"""Starts a control plane with played nodes of any size, and lanes."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.kube.paths import CLAIM
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster import kwok, tools
from tests.cluster.crds import apply_crds
from tests.cluster.running_cluster import Cluster, ensure_tools, start_control_plane_only
from tests.corners.lane import Lane
from tests.integration.operator.running_operator import OperatorProcess, operator, until

NODES = 4
KEY = "heteroinfer-key"
"""The Secret with the operator's key."""
SHAPE = kwok.NodeShape(
    allocatable={
        "cpu": "100000000",
        "memory": "1Ei",
        "pods": "10000",
        "nvidia.com/gpu": "10000",
        "example.com/x": "1000000000000000",
    },
    labels={"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"},
)
CLAIMS = ("claim", "c")
"""Names of models and caches in random resources."""


@contextlib.contextmanager
def site() -> Iterator[Cluster]:
    """Yields a cluster with played nodes and the CRD. `make_lanes` creates its namespaces."""
    ensure_tools([*tools.CONTROL_PLANE, tools.KWOK])
    with start_control_plane_only() as cluster:
        kwok.start_kwok(cluster, nodes=NODES, profile=None, shape=SHAPE)
        apply_crds(cluster, build_crd())
        yield cluster


@contextlib.asynccontextmanager
async def running_operator(cluster: Cluster, log: Path) -> AsyncIterator[OperatorProcess]:
    """Runs an operator with a key, which allows paths of nodes as volumes."""
    cluster.kubectl("create", "secret", "generic", "-n", "default", KEY)  # as the chart does
    settings = {"key_secret": KEY, "namespace": "default", "allow_host_paths": "true"}
    async with operator(cluster.kubeconfig, log, **settings) as process:
        await process.working()
        yield process


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[ApiServer]:
    """Yields the API server with all permissions."""
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    try:
        yield server
    finally:
        await server.close()


async def make_lanes(cluster: Cluster, server: ApiServer, count: int, *, number: int) -> list[Lane]:
    """Returns lanes, each with its own namespace and the claims that resources name."""
    lanes = []
    for index in range(count):
        namespace = f"lane-{index:02d}"
        cluster.kubectl("create", "namespace", namespace)
        lane = Lane(server=server, namespace=namespace, chance=random.Random(f"{number} {index}"))
        for name in CLAIMS:
            await lane.add_volume(await server.create(CLAIM.path(namespace), _claim(name)))
        lanes.append(lane)
    await asyncio.gather(*(until(f"{lane.namespace}'s account", _has_account(lane)) for lane in lanes))
    return lanes


def _has_account(lane: Lane) -> Any:
    async def check() -> bool:
        listed = await lane.server.get(f"/api/v1/namespaces/{lane.namespace}/serviceaccounts")
        return bool(listed["items"])

    return check


def _claim(name: str) -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    text = {"apiVersion": "v1", "kind": CLAIM.name, "metadata": {"name": name}, "spec": spec}
    return dict(json.loads(json.dumps(text)))
