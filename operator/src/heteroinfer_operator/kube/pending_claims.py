"""Claims that keep pods from a node: why they are not bound, in the words of whoever provisions them.

The scheduler says of such a pod that a claim is unbound, or nothing at all while the claim waits for the pod.
The provisioner says why in an event of the claim.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from heteroinfer_contract.background import start_task
from heteroinfer_contract.printable import printable
from heteroinfer_operator.cluster import PodView, ResourceKey, ResourceView
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.paths import CLAIM, EVENT
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord, label_key
from heteroinfer_operator.stored_fields import as_object, as_objects, as_text, as_texts

logger = logging.getLogger(__name__)

SILENT_S: Final = 5.0
"""A pod that has no node, and of which the scheduler has said nothing for so long, may wait for a claim."""
AGAIN_S: Final = 20.0
"""From one question about a claim to the next, while a pod waits for it."""
_MOST_EVENTS: Final = 50
_MOST_NOTE: Final = 400
_OF_CLAIMS: Final = re.compile("persistentvolumeclaim", re.IGNORECASE)
_BOUND: Final = "Bound"


@dataclass(slots=True)
class _AskedClaim:
    """A claim that was asked for.

    Attributes:
        words: why it is not bound, or "".
        at_s: when it was last asked for.
    """

    at_s: float
    task: asyncio.Task[None]
    words: str = ""


@dataclass(slots=True)
class _PendingPods:
    """What is known of the claims of one resource.

    Attributes:
        uid: of the resource: another may come under its name.
        since_s: by uid: since when this process has seen a pod without a node.
        claims: by name.
        next_s: when to look again though nothing says that something changed, or None.
    """

    uid: str
    since_s: dict[str, float] = field(default_factory=dict)
    claims: dict[str, _AskedClaim] = field(default_factory=dict)
    next_s: float | None = None


class PendingClaims:
    """Why claims are not bound that pods without a node mount. Use from one event loop.

    Args:
        wake: called with a resource once another answer about one of its claims has come.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        wake: Callable[[ResourceKey], None] = lambda key: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._wake = wake
        self._clock = clock
        self._waiting: dict[ResourceKey, _PendingPods] = {}

    def explain(self, resource: ResourceView, pods: Sequence[PodRecord]) -> tuple[PodView, ...]:
        """Returns the pods as decisions see them, with what is known now of the claims that they wait for."""
        now_s = self._clock()
        pending = [pod for pod in pods if pod.claims and not pod.view.node and not pod.view.ended]
        if not pending:
            self.forget(resource.key)
            return tuple(pod.view for pod in pods)
        waiting = self._waiting.get(resource.key)
        if waiting is None or waiting.uid != resource.uid:
            self.forget(resource.key)
            waiting = self._waiting[resource.key] = _PendingPods(resource.uid)
        waiting.since_s = {pod.view.uid: waiting.since_s.get(pod.view.uid, now_s) for pod in pending}
        suspects = [pod for pod in pending if _may_wait(pod, now_s - waiting.since_s[pod.view.uid])]
        silent = any(not pod.view.unschedulable for pod in pending)
        waiting.next_s = AGAIN_S if suspects else SILENT_S if silent else None
        self._ask(resource, waiting, {name for pod in suspects for name in pod.claims}, now_s)
        asked = {name: each.words for name, each in waiting.claims.items() if each.words}
        waits = {pod.view.uid for pod in suspects}
        return tuple(_explained(pod, asked) if pod.view.uid in waits else pod.view for pod in pods)

    def look_again_s(self, key: ResourceKey) -> float | None:
        """Returns when a resource is to be looked at though no watch shows a change, in seconds, or None."""
        waiting = self._waiting.get(key)
        return waiting.next_s if waiting is not None else None

    def forget(self, key: ResourceKey) -> None:
        """Takes in that no pod of a resource waits for a claim, or that it is gone."""
        if (waiting := self._waiting.pop(key, None)) is not None:
            for each in waiting.claims.values():
                each.task.cancel()

    def _ask(self, resource: ResourceView, waiting: _PendingPods, claims: set[str], now_s: float) -> None:
        for name in waiting.claims.keys() - claims:
            waiting.claims.pop(name).task.cancel()
        for name in sorted(claims):
            asked = waiting.claims.get(name)
            if asked is not None and (not asked.task.done() or now_s - asked.at_s < AGAIN_S):
                continue
            words = asked.words if asked is not None else ""
            work = self._find(resource.key, waiting, name)
            task = start_task(work, name=f"claim {name}", failed=_report)
            waiting.claims[name] = _AskedClaim(now_s, task, words)

    async def _find(self, key: ResourceKey, waiting: _PendingPods, name: str) -> None:
        words = await self._words(key.namespace, name)
        asked = waiting.claims.get(name)
        if asked is not None and asked.words != words:
            asked.words = words
            self._wake(key)

    async def _words(self, namespace: str, name: str) -> str:
        """Returns why a claim is not bound, or "" if it is, or if the scheduler says it all."""
        try:
            claim = await self._server.ask(CLAIM.path(namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return ""
            raise
        if as_text(as_object(claim.get("status"), "status").get("phase"), "phase") == _BOUND:
            return ""
        selector = f"regarding.kind={CLAIM.name},regarding.name={name}"
        query = {"fieldSelector": selector, "limit": str(_MOST_EVENTS)}
        try:
            listed = await self._server.get(EVENT.path(namespace), query)
            said = _newest(as_objects(listed.get("items"), "items"))
        except ApiError as error:
            said = f"its events cannot be read ({error.said[:100]})"
        return _describe(claim, name, said)


def _may_wait(pod: PodRecord, seen_s: float) -> bool:
    """Returns whether a pod without a node may wait for a claim, seen so for so many seconds."""
    unschedulable = pod.view.unschedulable
    return bool(_OF_CLAIMS.search(unschedulable)) if unschedulable else seen_s >= SILENT_S


def _explained(pod: PodRecord, words: Mapping[str, str]) -> PodView:
    known = [words[name] for name in pod.claims if name in words]
    if not known:
        return pod.view
    return replace(pod.view, unschedulable="; ".join(filter(None, (*known, pod.view.unschedulable))))


def _newest(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the newest warning in the words of whoever reports it, or the newest event; "" for none."""
    found = sorted(events, key=lambda event: (event.get("type") == "Warning", _time(event)))
    if not found:
        return ""
    event = found[-1]
    source = as_object(event.get("deprecatedSource"), "deprecatedSource")
    who = as_text(event.get("reportingController"), "reportingController") or as_text(
        source.get("component"), "component"
    )
    reason, note = (as_text(event.get(part), part) for part in ("reason", "note"))
    return (
        f'{printable(who)[:100]} reports {printable(reason)[:64]}: "{printable(note)[:_MOST_NOTE].strip()}"'
    )


def _time(event: Mapping[str, Any]) -> str:
    series = as_object(event.get("series"), "series")
    times = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
        as_object(event.get("metadata"), "metadata").get("creationTimestamp"),
    )
    return max(as_text(each, "time") for each in times)


def _describe(claim: Mapping[str, Any], name: str, said: str) -> str:
    spec = as_object(claim.get("spec"), "spec")
    storage_class = as_text(spec.get("storageClassName"), "storageClassName")
    requests = as_object(as_object(spec.get("resources"), "resources").get("requests"), "requests")
    parts = [
        f"storage class {storage_class}" if storage_class else "no storage class",
        *as_texts(spec.get("accessModes"), "accessModes"),
        as_text(requests.get("storage"), "storage"),
    ]
    what = f"claim {name} ({', '.join(filter(None, parts))}) is not bound"
    is_ours = label_key(claim) is not None
    fix = (
        "Set spec.model.cache.storageClassName and accessMode to what the cluster provides"
        if is_ours
        else f"Mend the claim (kubectl describe pvc {name})"
    )
    return f"{what}: {said or 'nobody reports why'}. {fix}"


def _report(error: BaseException) -> None:
    if not isinstance(error, HeteroInferError):
        logger.error("a question for a claim: a defect of the operator, please report it", exc_info=error)
