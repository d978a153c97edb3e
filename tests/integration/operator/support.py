"""What the operator's tests on a real API server share."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.adapter import KubeCluster
from heteroinfer_operator.kube.caches import Caches
from heteroinfer_operator.kube.events import EventRecorder
from heteroinfer_operator.kube.groups import GroupClient
from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.manifests.identity import Owner

CrdName = f"{names.PLURAL}.{names.API_GROUP}"
DEADLINE_S = 20.0

SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/tiny", "servedName": "tiny"},
    "engine": {"dtype": "float32", "maxModelLen": 512},
    "roles": [
        {"name": "front", "device": "CPU", "pods": 1, "ranksPerPod": 1},
        {"name": "back", "device": "CPU", "pods": 1, "ranksPerPod": 1},
    ],
}


async def until(what: str, check: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
    """Returns what `check` gives as soon as that is true; a coroutine is awaited."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)


async def create_resource(server: ApiServer, namespace: str, name: str = "tiny") -> Owner:
    """Returns a stored HeteroInference as an owner of children."""
    body = {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": SPEC,
    }
    stored = await server.create(HETERO_INFERENCE.path(namespace), body)
    return Owner(key=ResourceKey(namespace=namespace, name=name), uid=stored["metadata"]["uid"])


def child(owner: Owner, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    """Returns the manifest of a child."""
    version = {"NetworkPolicy": "networking.k8s.io/v1"}.get(kind, "v1")
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.key.namespace,
            "labels": {names.LABEL_RESOURCE: owner.key.name},
            "ownerReferences": [owner.reference],
        },
        **fields,
    }


def pod(owner: Owner, name: str, **labels: str) -> dict[str, Any]:
    """Returns the manifest of a pod that no node here will ever run."""
    container = {
        "name": names.CONTAINER_WORKER,
        "image": "worker:none",
        "ports": [{"name": names.PORT_HEALTH, "containerPort": names.DEFAULT_HEALTH_PORT}],
    }
    manifest = child(owner, "Pod", name, spec={"restartPolicy": "Never", "containers": [container]})
    manifest["metadata"]["labels"] |= {f"{names.API_GROUP}/{key}": value for key, value in labels.items()}
    return manifest


class Watched:
    """Running caches, and the port on top of them."""

    def __init__(self, server: ApiServer, namespaces: Sequence[str]) -> None:
        self.touched: list[ResourceKey] = []
        self.node_changes = 0
        self.caches = Caches(
            server, namespaces=namespaces, touched=self.touched.append, nodes_changed=self._node_changed
        )
        self.groups = GroupClient()
        recorder = EventRecorder(server, reporter="test")
        self.cluster = KubeCluster(server, self.caches, recorder=recorder, groups=self.groups)

    def _node_changed(self) -> None:
        self.node_changes += 1


@contextlib.asynccontextmanager
async def watching(server: ApiServer, *namespaces: str) -> AsyncIterator[Watched]:
    """Runs caches for as long as the context lasts; they are synced when it begins."""
    watched = Watched(server, namespaces)
    running = asyncio.ensure_future(watched.caches.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await watched.caches.wait_synced()
        yield watched
    finally:
        running.cancel()
        await asyncio.wait({running})
        await watched.groups.close()
