"""Plays the kubelets of nodes: pods run, end and are removed, and a lost node reports nothing any more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_operator.kube.paths import NODE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer

LOOK_S = 0.05


class Kubelets:
    """Sets the status of a namespace's worker pods, each pod by itself.

    Attributes:
        lost: nodes that report nothing.
        held: whether new pods stay not Ready.
        running: running pods by name, with their last stored state.
    """

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.lost: set[str] = set()
        self.held = False
        self.running: dict[str, dict[str, Any]] = {}
        self._server, self._namespace = server, namespace
        self._addresses = 0

    async def lose(self, name: str) -> None:
        """Makes a node silent, and marks it as the node controller does."""
        self.lost.add(name)
        self.running = {pod: seen for pod, seen in self.running.items() if seen["spec"]["nodeName"] != name}
        await self._set_ready(name, "Unknown")

    async def find(self, name: str) -> None:
        """Makes a lost node report again."""
        self.lost.discard(name)
        await self._set_ready(name, "True")

    async def _set_ready(self, name: str, status: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": status,
            "reason": "Test",
            "message": "",
            "lastTransitionTime": now,
        }
        await self._server.merge(NODE.path(None, name, "status"), {"status": {"conditions": [ready]}})

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            listed = await self._server.get(POD.path(self._namespace))
            for pod in listed["items"]:
                # the pod has changed or gone, and the next turn sees this
                with contextlib.suppress(ApiError):
                    await self._treat(pod)
            present = {pod["metadata"]["name"] for pod in listed["items"]}
            self.running = {name: seen for name, seen in self.running.items() if name in present}
            await asyncio.sleep(LOOK_S)

    async def _treat(self, pod: dict[str, Any]) -> None:
        """Removes a pod in deletion, or makes a new worker pod run. Pods on lost nodes stay unchanged."""
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
        if not node or node in self.lost:
            return
        if "deletionTimestamp" in pod["metadata"]:
            self.running.pop(name, None)
            with contextlib.suppress(ApiError):
                await self._server.delete(POD.path(self._namespace, name), {"gracePeriodSeconds": 0})
            return
        worker = pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER
        if not worker or name in self.running or self.held:
            return
        self._addresses += 1
        address = f"10.1.{self._addresses // 250}.{self._addresses % 250 + 1}"
        await self._server.merge(POD.path(self._namespace, name, "status"), {"status": _running(address)})
        self.running[name] = pod


def _running(address: str) -> dict[str, Any]:
    """Returns the status of a running and ready worker pod with this address."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {
        "name": names.CONTAINER_WORKER,
        "image": "worker:none",
        "imageID": "",
        "restartCount": 0,
        "ready": True,
        "state": {"running": {"startedAt": now}},
    }
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now}
        for kind in ("PodScheduled", "Ready", "ContainersReady")
    ]
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": conditions,
        "containerStatuses": [state],
    }


@contextlib.asynccontextmanager
async def kubelets(server: ApiServer, namespace: str) -> AsyncIterator[Kubelets]:
    """Plays the kubelets for the pods of a namespace until the context ends."""
    found = Kubelets(server, namespace)
    problems: list[BaseException] = []
    task = start_task(found.run(), name="kubelets", failed=problems.append)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert not problems, problems
