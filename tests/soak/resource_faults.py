"""Applies the soak's faults of whole resources: refused changes, names in use, quotas, damage."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD, SERVICE
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer
from tests.corners import faults
from tests.corners.lane import Finding, Lane
from tests.corners.truth import Seen, is_worker
from tests.soak.chaos import Chaos

MIN_FAULT_S, MAX_FAULT_S = 2.0, 25.0
"""Seconds for which a reversible fault stays."""
MAX_QUOTA_S = 10.0
"""Seconds for which a quota stays. It affects the whole namespace."""
AWAY_S = 60.0
"""Time limit for reverting a fault. An API server that was killed is back after this time."""


@dataclass(slots=True, kw_only=True)
class ResourceFaults:
    """Applies faults to resources, at most one at a time to each.

    Attributes:
        chaos: has the source of random choices, and counts the faults.
        played: names of the resources that may get faults.
        struck: names of the resources with a fault now.
    """

    chaos: Chaos
    played: list[str]
    struck: set[str] = field(default_factory=set)
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def strike_one(self) -> None:
        """Starts a fault of a resource that has none now."""
        free = sorted(set(self.played) - self.struck)
        if not free:
            return
        name = self.chaos.chance.choice(free)
        self.struck.add(name)
        task = asyncio.create_task(self._strike(name))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def wait_reverted(self) -> None:
        """Waits until all reversible faults are reverted."""
        while self._running:
            await asyncio.gather(*self._running)

    async def _strike(self, name: str) -> None:
        chance = self.chaos.chance
        ways: dict[str, Callable[[str], Awaitable[None]]] = {
            "spec refused for a while": lambda name: self._stay(self._refused_spec(name)),
            "name of a child taken for a while": lambda name: self._stay(self._taken_name(name)),
            "quota for a while": lambda name: self._stay(self._quota(), MAX_QUOTA_S),
            "suspended for a while": lambda name: self._stay(self._edited(name, suspend=True)),
            "scaled up for a while": lambda name: self._stay(self._scaled(name)),
            "label of a pod lost for a while": lambda name: self._stay(self._lost_label(name)),
            "child deleted": self._act(faults.delete_child),
            "labels of a child taken": self._act(faults.damage_labels_of_a_child),
            "ConfigMaps lost, pod deleted": self._act(faults.lose_config_maps),
            "unknown field in ConfigMaps, pod deleted": self._act(faults.unknown_field_in_config_maps),
            "status wiped": self._act(faults.wipe_status),
        }
        what = chance.choice(sorted(ways))
        try:
            await ways[what](name)
            self.chaos.done[what] += 1
        except (ApiError, Finding):
            self.chaos.done["faults that met an absent API server or a changing status"] += 1
        finally:
            self.struck.discard(name)

    async def _stay(self, way: AbstractAsyncContextManager[None], max_s: float = MAX_FAULT_S) -> None:
        async with way:
            await asyncio.sleep(self.chaos.chance.uniform(MIN_FAULT_S, max_s))

    def _act(self, act: Callable[[Lane, Seen], Awaitable[None]]) -> Callable[[str], Awaitable[None]]:
        async def strike(name: str) -> None:
            await act(*await self._look(name))

        return strike

    async def _look(self, name: str) -> tuple[Lane, Seen]:
        """Returns the present state of a resource, in its own lane."""
        server, namespace = self.chaos.server, self.chaos.namespace
        lane = Lane(server=server, namespace=namespace, chance=self.chaos.chance)
        resource = await server.get(HETERO_INFERENCE.path(namespace, name))
        pods = (await server.get(POD.path(namespace)))["items"]
        workers = {pod["metadata"]["name"]: pod for pod in pods if is_worker(pod, name)}
        return lane, Seen(resource=resource, pods=workers)

    @asynccontextmanager
    async def _lost_label(self, name: str) -> AsyncIterator[None]:
        """Removes a label of a pod until the context ends, or until the pod ends."""
        lane, seen = await self._look(name)
        if not seen.pods:
            yield
            return
        pod, label, value = faults.draw_lost_label(lane, seen)
        path, made = POD.path(lane.namespace, pod), seen.pods[pod]["metadata"]["labels"].get(label)
        await lane.server.merge(path, {"metadata": {"labels": {label: value}}})
        try:
            yield
        finally:
            back = insist(lane.server, path, {"metadata": {"labels": {label: made}}})
            await faults.suppressing(NOT_FOUND, back)

    @asynccontextmanager
    async def _edited(self, name: str, **fields: Any) -> AsyncIterator[None]:
        """Changes fields of a spec, and restores them at the end of the context."""
        server, path = self.chaos.server, HETERO_INFERENCE.path(self.chaos.namespace, name)
        before = (await server.get(path))["spec"]
        try:
            await server.merge(path, {"spec": fields})
            yield
        finally:
            await insist(server, path, {"spec": {key: before.get(key) for key in fields}})

    def _refused_spec(self, name: str) -> AbstractAsyncContextManager[None]:
        # more layers than the model has
        role = {"name": "cpu", "device": "CPU", "pods": 3, "layers": [1, 1, 1]}
        refused: list[dict[str, Any]] = [{"model": {"uri": "hf://org/model"}}, {"roles": [role]}]
        return self._edited(name, **self.chaos.chance.choice(refused))

    @asynccontextmanager
    async def _scaled(self, name: str) -> AsyncIterator[None]:
        stored = await self.chaos.server.get(HETERO_INFERENCE.path(self.chaos.namespace, name))
        async with self._edited(name, replicas=stored["spec"].get("replicas", 1) + 1):
            yield

    @asynccontextmanager
    async def _taken_name(self, name: str) -> AsyncIterator[None]:
        stored = await self.chaos.server.get(HETERO_INFERENCE.path(self.chaos.namespace, name))
        replicas = stored["spec"].get("replicas", 1)
        services, taken = SERVICE.path(self.chaos.namespace), f"{name}-{replicas}-ranks"
        spec = {"ports": [{"port": 80}]}
        async with (
            self._made(services, taken, SERVICE.name, spec),
            self._edited(name, replicas=replicas + 1),
        ):
            yield

    def _quota(self) -> AbstractAsyncContextManager[None]:
        path = faults.QUOTA.path(self.chaos.namespace)
        return self._made(path, "none", faults.QUOTA.name, {"hard": {"pods": "0"}})

    @asynccontextmanager
    async def _made(self, path: str, name: str, kind: str, spec: Mapping[str, Any]) -> AsyncIterator[None]:
        """Creates a foreign object, and deletes it at the end of the context."""
        server = self.chaos.server
        body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}
        await server.create(path, body)
        try:
            yield
        finally:
            await insist_gone(server, f"{path}/{name}")


async def insist(server: ApiServer, path: str, body: Mapping[str, Any]) -> None:
    """Writes to an object. Tries again while the API server is away."""
    async with asyncio.timeout(AWAY_S):
        while True:
            try:
                await server.merge(path, body)
            except ApiError as error:
                if error.is_refusal and error.status != CONFLICT:
                    raise
                await asyncio.sleep(0.5)
            else:
                return


async def insist_gone(server: ApiServer, path: str) -> None:
    """Deletes an object. Tries again while the API server is away."""
    async with asyncio.timeout(AWAY_S):
        while True:
            try:
                await server.delete(path, {})
            except ApiError as error:
                if error.status == NOT_FOUND:
                    return
                await asyncio.sleep(0.5)
            else:
                return
