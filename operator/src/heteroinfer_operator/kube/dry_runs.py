"""Runs dry runs in the background, so that no reconcile waits for a slow webhook.

A webhook may take 30 s for each pod. A resource has one reconcile at a time, and its status would stay old
for that long. So a dry run continues in the background, and a later reconcile finds its result.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract.background import start_task
from heteroinfer_operator.cluster import CreateObject, Manifest, ResourceKey, ResourceView, TryObjects
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.child_errors import ChildError, not_answered, refusal_message
from heteroinfer_operator.kube.server import CONFLICT, ApiError
from heteroinfer_operator.reconcile.refusals import OBJECT_REFUSED

logger = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""At most this many dry-run requests run at the same time, over all resources."""
HOLDS_S: Final = 600.0
"""How long a result is valid. Policies change, and a rollout may take hours."""

TryCreate = Callable[[Manifest], Awaitable[None]]
"""Sends the dry run of one object; raises ApiError if the object would be refused."""


@dataclass(slots=True)
class _Tried:
    uid: str
    revision: str
    since_s: float
    task: asyncio.Task[None]
    is_admitted: bool = False
    """Whether a reconcile has seen that the API server accepts the objects."""


class DryRuns:
    """The newest dry run of each resource and its result. Use from one event loop."""

    def __init__(self, try_create: TryCreate, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._try_create = try_create
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tried: dict[ResourceKey, _Tried] = {}

    def admitted(self, resource: ResourceView) -> frozenset[str]:
        """Returns the resource's revision that passed its dry run within HOLDS_S, or an empty set."""
        found = self._tried.get(resource.key)
        if found is None or not found.is_admitted or found.uid != resource.uid:
            return frozenset()
        holds = self._clock() - found.since_s <= HOLDS_S
        return frozenset({found.revision}) if holds else frozenset()

    async def find(self, resource: ResourceView, action: TryObjects, *, patience_s: float) -> None:
        """Waits until the API server has accepted all objects in a dry run, and remembers that.

        Args:
            patience_s: longest wait.

        Raises:
            ChildError: ObjectRefused if the API server refuses an object; NotAnswered if the dry run is not
                done yet, in which case the caller must call again.
        """
        tried = self._tried.get(resource.key)
        if tried is None or not self._is_same_request(tried, resource, action):
            tried = self._start(resource, action)
        await asyncio.wait({tried.task}, timeout=patience_s)
        if not tried.task.done():
            raise not_answered("it has not answered yet")
        if tried.task.exception() is not None:
            del self._tried[resource.key]
        try:
            tried.task.result()
        except ApiError as error:
            raise not_answered(error.message[:500]) from error
        tried.is_admitted, tried.since_s = True, self._clock()

    def forget(self, key: ResourceKey) -> None:
        """Drops the dry run of a resource that is gone."""
        tried = self._tried.pop(key, None)
        if tried is not None:
            tried.task.cancel()

    def _is_same_request(self, tried: _Tried, resource: ResourceView, action: TryObjects) -> bool:
        same = (tried.uid, tried.revision) == (resource.uid, action.revision)
        return same and not (tried.task.done() and self._clock() - tried.since_s > HOLDS_S)

    def _start(self, resource: ResourceView, action: TryObjects) -> _Tried:
        if (before := self._tried.pop(resource.key, None)) is not None:
            before.task.cancel()
        task = start_task(self._dry_run_all(action), name=f"dry run of {resource.key}", failed=_report)
        started = self._tried[resource.key] = _Tried(resource.uid, action.revision, self._clock(), task)
        return started

    async def _dry_run_all(self, action: TryObjects) -> None:
        for manifest in action.manifests:
            async with self._slots:
                await self._dry_run(manifest)

    async def _dry_run(self, manifest: Manifest) -> None:
        try:
            await self._try_create(manifest)
        except ApiError as error:
            if error.blames_object:
                words = refusal_message(CreateObject(manifest=manifest), error.said)
                raise ChildError(words, reason=OBJECT_REFUSED) from error
            # The plan's ConfigMap may exist already, because another revision has the same plan.
            if not error.is_refusal and error.status != CONFLICT:
                raise


def _report(error: BaseException) -> None:
    if not isinstance(error, HeteroInferError):  # a later `find` raises HeteroInferErrors
        logger.error("dry run failed: a defect of the operator. Report it", exc_info=error)
