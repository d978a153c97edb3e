"""Runs dry runs in the background, so that no reconcile waits for a slow webhook.

A webhook may take 30 s for each pod. If a reconcile waited for that, the resource's status would stay old. So
a dry run continues in the background, and a later reconcile finds its result.
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
RESULT_VALID_S: Final = 600.0
"""How long a result is valid. Policies change, and a rollout may take hours."""

TryCreate = Callable[[Manifest], Awaitable[None]]
"""Sends the dry run of one object; raises ApiError if the object would be refused."""


@dataclass(slots=True)
class _DryRun:
    """A dry run of one revision's objects.

    Attributes:
        uid: uid of the resource.
        since_s: time from which RESULT_VALID_S counts: the start of the dry run, or the last time at which a
            reconcile used its result.
        is_admitted: whether a reconcile has seen that the API server accepts the objects.
    """

    uid: str
    revision: str
    since_s: float
    task: asyncio.Task[None]
    is_admitted: bool = False


class DryRuns:
    """The newest dry run of each resource and its result. Use from one event loop."""

    def __init__(self, try_create: TryCreate, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._try_create = try_create
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._by_resource: dict[ResourceKey, _DryRun] = {}

    def admitted_revisions(self, resource: ResourceView) -> frozenset[str]:
        """Returns a set with the resource's revision that passed its dry run, or an empty set.

        A result that no reconcile has used for RESULT_VALID_S does not count.
        """
        dry_run = self._by_resource.get(resource.key)
        if dry_run is None or not dry_run.is_admitted or dry_run.uid != resource.uid:
            return frozenset()
        is_valid = self._clock() - dry_run.since_s <= RESULT_VALID_S
        return frozenset({dry_run.revision}) if is_valid else frozenset()

    async def await_admission(self, resource: ResourceView, action: TryObjects, *, patience_s: float) -> None:
        """Waits until the API server has accepted all objects in a dry run, and remembers this result.

        Args:
            patience_s: longest wait.

        Raises:
            ChildError: ObjectRefused if the API server refuses an object; NotAnswered if the dry run has no
                result yet. Then the next call continues to wait, or starts the dry run again after an error.
        """
        dry_run = self._by_resource.get(resource.key)
        if dry_run is None or not self._is_usable(dry_run, resource, action):
            dry_run = self._start(resource, action)
        await asyncio.wait({dry_run.task}, timeout=patience_s)
        if not dry_run.task.done():
            raise not_answered("no answer yet")
        has_failed = dry_run.task.exception() is not None
        if has_failed:  # forget this dry run, so that the next call starts a new one
            del self._by_resource[resource.key]
        try:
            dry_run.task.result()
        except ApiError as error:
            raise not_answered(error.message[:500]) from error
        dry_run.is_admitted, dry_run.since_s = True, self._clock()

    def forget(self, key: ResourceKey) -> None:
        """Drops the dry run of a resource that is gone."""
        dry_run = self._by_resource.pop(key, None)
        if dry_run is not None:
            dry_run.task.cancel()

    def _is_usable(self, dry_run: _DryRun, resource: ResourceView, action: TryObjects) -> bool:
        """Reports whether a dry run is of this revision, and still runs or has a valid result."""
        is_of_revision = (dry_run.uid, dry_run.revision) == (resource.uid, action.revision)
        is_expired = dry_run.task.done() and self._clock() - dry_run.since_s > RESULT_VALID_S
        return is_of_revision and not is_expired

    def _start(self, resource: ResourceView, action: TryObjects) -> _DryRun:
        """Starts a dry run in the background, and cancels the resource's earlier dry run."""
        if (earlier := self._by_resource.pop(resource.key, None)) is not None:
            earlier.task.cancel()
        task = start_task(self._try_all(action), name=f"dry run of {resource.key}", failed=_report_error)
        started = self._by_resource[resource.key] = _DryRun(
            resource.uid, action.revision, self._clock(), task
        )
        return started

    async def _try_all(self, action: TryObjects) -> None:
        """Sends the dry run of each object of a revision, one after the other."""
        for manifest in action.manifests:
            async with self._slots:
                await self._try_one(manifest)

    async def _try_one(self, manifest: Manifest) -> None:
        """Sends the dry run of one object. Ignores refusals that do not blame the object.

        Raises:
            ChildError: the API server refuses the object because of its content.
            ApiError: there is no answer.
        """
        try:
            await self._try_create(manifest)
        except ApiError as error:
            if error.blames_object:
                message = refusal_message(CreateObject(manifest=manifest), error.answer_message)
                raise ChildError(message, reason=OBJECT_REFUSED) from error
            # Other refusals, such as a full quota, may pass, so they do not stop the rollout. With CONFLICT,
            # the object exists already: another revision may have the same plan, and thus the same ConfigMap.
            is_answered = error.is_refusal or error.status == CONFLICT
            if not is_answered:
                raise


def _report_error(error: BaseException) -> None:
    """Logs an error that is a defect of the operator."""
    if not isinstance(error, HeteroInferError):  # the next `await_admission` raises a HeteroInferError
        logger.error(
            "dry run failed because of a defect of the operator. Report it, with this log", exc_info=error
        )
