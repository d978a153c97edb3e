"""Runs resources in one namespace, one after another. Plays the kubelets and provisioners."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import CHILDREN, CLAIM, HETERO_INFERENCE, POD, SECRET, Kind
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer
from tests.corners.truth import Seen, Verdict, find_two_epochs, has_run, is_worker, judge
from tests.integration.operator.running_operator import end_pod
from tests.integration.specs.lives import model_answer

LOOK_S = 0.2
TRIES = 5
QUIET_S = 1.5
"""A resource is stable if nothing of it has changed for this time."""
SETTLE_S = 120.0
"""Twice a back-off of 10 s, on a machine that runs a dozen resources at the same time."""
VOLUME = Kind(name="PersistentVolume", api_version="v1", plural="persistentvolumes", namespaced=False)
_LOOKS_AT_MODELS = (names.COMPONENT_INSPECT, names.COMPONENT_FETCH)


class Finding(Exception):  # noqa: N818 - of a test
    """A violated invariant."""


@dataclass(slots=True, kw_only=True)
class Lane:
    """One namespace.

    Attributes:
        server: API server with all permissions.
        namespace: namespace that only this lane uses.
        chance: seeded source of random choices.
        ran: uids of the pods that ran with a name, for all resources of this namespace.
    """

    server: ApiServer
    namespace: str
    chance: random.Random
    ran: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    async def look(self, name: str) -> Seen | None:
        """Returns a resource and its pods now, or None if it is gone. Checks the invariants that always hold.

        Raises:
            Finding: a group has two epochs at the same time, or two pods that ran have the same name.
        """
        pods = (await self._get(POD.path(self.namespace)))["items"]
        try:
            resource = await self._get(HETERO_INFERENCE.path(self.namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        await self._speak_for_kubelets(pods, resource)
        workers = {pod["metadata"]["name"]: pod for pod in pods if is_worker(pod, name)}
        for pod_name, pod in workers.items():
            if has_run(pod):
                self.ran[pod_name].add(pod["metadata"]["uid"])
        seen = Seen(resource=resource, pods=workers)
        if mixed := find_two_epochs(seen):
            raise Finding(f"two epochs at the same time: {mixed}")
        if twice := {pod: uids for pod, uids in self.ran.items() if len(uids) > 1}:
            raise Finding(f"names of pods that ran twice: {twice}")
        return seen

    async def _get(self, path: str) -> dict[str, Any]:
        """Returns an object. Repeats the request if the API server lacks CPU time."""
        for _ in range(TRIES - 1):
            try:
                return await self.server.get(path)
            except ApiError as error:
                if error.status:
                    raise
        return await self.server.get(path)

    async def wait(
        self, what: str, name: str, accept: Callable[[Seen], bool], timeout_s: float = SETTLE_S
    ) -> Seen:
        """Waits until `accept` accepts the observation of a resource, and returns it.

        Raises:
            Finding: no observation was accepted in time.
        """
        until = time.monotonic() + timeout_s
        while True:
            seen = await self.look(name)
            if seen is None:
                raise Finding(f"{name} is gone, expected {what}")
            if accept(seen):
                return seen
            if time.monotonic() > until:
                conditions = [
                    (c["type"], c["status"], c["reason"], c["message"][:200]) for c in _conditions(seen)
                ]
                groups = [
                    {key: group.get(key) for key in ("index", "epoch", "phase", "message", "nextEpochTime")}
                    for group in seen.groups
                ]
                raise Finding(
                    f"not within {timeout_s:g} s: {what}; {conditions}; {groups}; {sorted(seen.pods)}"
                )
            await asyncio.sleep(LOOK_S)

    async def settle(self, name: str, what: str = "something final") -> Seen:
        """Waits until a resource serves, rests or reports why not, and nothing changes. Returns it."""
        quiet_since, before = time.monotonic(), object()

        def settled(seen: Seen) -> bool:
            nonlocal quiet_since, before
            now = time.monotonic()
            if seen.fingerprint != before:
                quiet_since, before = now, seen.fingerprint
            return now - quiet_since >= QUIET_S and judge(seen)[0] is not Verdict.MOVES

        return await self.wait(what, name, settled)

    async def _speak_for_kubelets(self, pods: list[dict[str, Any]], resource: Mapping[str, Any]) -> None:
        """Ends placed pods that inspect or fetch the model, and provisions claims of caches."""
        for pod in pods:
            labels, status = pod["metadata"].get("labels", {}), pod.get("status", {})
            ended = status.get("phase") in {"Succeeded", "Failed"}
            placed = "nodeName" in pod["spec"] and "deletionTimestamp" not in pod["metadata"]
            if placed and not ended and labels.get(names.LABEL_COMPONENT) in _LOOKS_AT_MODELS:
                answer = model_answer(resource["spec"])
                try:
                    await end_pod(
                        self.server, self.namespace, pod["metadata"]["name"], exit_code=0, message=answer
                    )
                except ApiError as error:
                    if error.status not in {NOT_FOUND, CONFLICT}:
                        raise
        if resource["spec"]["model"].get("cache", {}).get("size"):
            await self._provision()

    async def _provision(self) -> None:
        for claim in (await self.server.get(CLAIM.path(self.namespace)))["items"]:
            if "volumeName" not in claim["spec"] and "deletionTimestamp" not in claim["metadata"]:
                await self.add_volume(claim)

    async def add_volume(self, claim: Mapping[str, Any]) -> None:
        """Adds the volume that a claim requests."""
        metadata, spec = claim["metadata"], claim["spec"]
        volume = {
            "apiVersion": "v1",
            "kind": VOLUME.name,
            "metadata": {"name": f"{self.namespace}-{metadata['name']}-{metadata.get('uid', '0')[:8]}"},
            "spec": {
                "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                "accessModes": spec["accessModes"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": spec.get("storageClassName", ""),
                "claimRef": {"namespace": self.namespace, "name": metadata["name"]},
                "hostPath": {"path": "/nowhere"},
            },
        }
        try:
            await self.server.create(VOLUME.path(), volume)
        except ApiError as error:
            if error.status != CONFLICT:
                raise

    async def children(self, name: str) -> list[tuple[Kind, dict[str, Any]]]:
        """Returns everything that a resource owns except pods, also objects with damaged labels."""
        found = []
        for kind in (*CHILDREN, SECRET):
            for item in (await self.server.get(kind.path(self.namespace)))["items"]:
                owners = item["metadata"].get("ownerReferences", ())
                if any(owner["name"] == name for owner in owners):
                    found.append((kind, item))
        return found

    async def gone(self, name: str, timeout_s: float = SETTLE_S) -> None:
        """Waits until a deleted resource and everything that it owned are gone.

        Raises:
            Finding: objects are left at the time limit.
        """
        until = time.monotonic() + timeout_s
        while True:
            left = [f"{kind.name} {item['metadata']['name']}" for kind, item in await self.children(name)]
            pods = (await self.server.get(POD.path(self.namespace)))["items"]
            left += [pod["metadata"]["name"] for pod in pods if is_worker(pod, name)]
            if not left and await self.look(name) is None:
                return
            if time.monotonic() > until:
                raise Finding(f"{name} was deleted {timeout_s:g} s ago, but these objects exist: {left}")
            await asyncio.sleep(LOOK_S)


def _conditions(seen: Seen) -> list[dict[str, Any]]:
    return list(seen.status.get("conditions", ()))
