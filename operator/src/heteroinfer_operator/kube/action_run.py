"""Runs the actions of one decision against the API server.

The status is written first. A reconcile waits only a moment for other requests. A slower request continues in
the background: the next reconciles do not touch its object, and its answer wakes the resource. So a slow
webhook does not delay the status.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_operator.api import HeteroInferenceStatus
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    ConflictError,
    CreateObject,
    DeleteObject,
    Manifest,
    PatchStatus,
    RecordEvent,
    RemoveFinalizer,
    ResourceKey,
    ResourceObservation,
    TryObjects,
    Write,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.child_errors import (
    ChildError,
    finalizer_set_each_time,
    refusal_message,
    unanswered_message,
)
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.dry_runs import DryRuns
from heteroinfer_operator.kube.events import EventRecorder
from heteroinfer_operator.kube.kept import STATUS_AGAIN_S, Kept, UnderWay
from heteroinfer_operator.kube.object_writes import ObjectWrites
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer, RequestLane
from heteroinfer_operator.reconcile.refusals import (
    NOT_ANSWERED,
    OBJECT_REFUSED,
    Acting,
    Subject,
    scopes_of,
    subject,
)

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.25
"""How long a reconcile waits for its status write, and then again for all other requests.

Most requests are done within this time.
"""
_RETRY_STATUS_S: Final = 0.5
"""Pause after a failed attempt to write a status."""
_UNDER_WAY: Final = "the request was sent; waiting for the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Functions that the cluster adapter calls.

    Attributes:
        observed: gets the status of each observed resource; None once the resource is gone.
        status_written: gets whether the status of a resource was written.
        held_back: gets the kind of each action that must wait for the resource's budget.
        wake: gets a resource once a request is answered after its reconcile stopped waiting.
    """

    observed: Callable[[ResourceKey, HeteroInferenceStatus | None], None] = lambda key, status: None
    status_written: Callable[[ResourceKey, bool], None] = lambda key, written: None
    held_back: Callable[[str], None] = lambda kind: None
    wake: Callable[[ResourceKey], None] = lambda key: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionContext:
    """Collaborators that run actions."""

    server: ApiServer
    cluster_state: ClusterState
    objects: ObjectWrites
    dry_runs: DryRuns
    recorder: EventRecorder
    callbacks: Callbacks
    patience_s: float


class ActionRun:
    """Runs the actions of one decision. Tracks the resourceVersion through its own writes.

    Args:
        kept: state of the resource, after `begin`.
    """

    def __init__(self, context: ActionContext, observation: ResourceObservation, kept: Kept) -> None:
        self._context = context
        # A request may outlive its decision. It must not keep the spec and the status in memory until then.
        self._resource = observation.resource.without_fields()
        self._kept = kept
        self._acting = kept.acting
        self._generation = kept.generation
        self._version = self._resource.resource_version
        self._finalizers = self._resource.finalizers
        self._epochs = {_group_and_epoch(pod.labels) for pod in observation.pods}
        self._launched: dict[Subject, UnderWay] = {}
        self._status_s: float | None = None
        self._conflict: ConflictError | None = None
        self._deadline_s = 0.0
        self._is_finished = False

    async def run_all(self, actions: Sequence[Action]) -> float | None:
        """Runs the actions that can run now.

        Returns:
            Seconds until an action may be tried again, or None.

        Raises:
            ConflictError: an object is in another state than the decision assumed.
        """
        try:
            self._promise(actions)
            if await self._write_resource(actions):
                for event in (action for action in actions if isinstance(action, RecordEvent)):
                    self._context.recorder.record(self._resource, event)
            self._deadline_s = asyncio.get_running_loop().time() + self._context.patience_s
            for stage in _stages(actions):
                await self._run_stage(stage)
            for action in actions:
                if isinstance(action, TryObjects) and self._acting.may(action):
                    await self._try_action(action, self._try_objects(action))
        finally:
            self._is_finished = True
            self._acting.end()
        if self._conflict is not None:
            raise self._conflict
        waits = [self._acting.look_again_s(), self._status_s]
        return min((wait for wait in waits if wait is not None), default=None)

    def _promise(self, actions: Sequence[Action]) -> None:
        """Reserves capacity for the pods of this decision until the next, before other resources decide."""
        creates = [action.manifest for action in actions if isinstance(action, CreateObject)]
        pods = [manifest for manifest in creates if manifest["kind"] == POD.name]
        self._kept.promises.close()
        self._kept.promises.enter_context(self._context.cluster_state.promising(pods))

    async def _try_objects(self, action: TryObjects) -> None:
        await self._context.dry_runs.find(self._resource, action, patience_s=self._remaining_s())

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    # Writes to the resource itself. The status comes first, because it depends on no other write.

    async def _write_resource(self, actions: Sequence[Action]) -> bool:
        """Writes the status and the finalizers.

        Returns:
            False if the new status was not sent. Then the events of this decision must wait too.
        """
        statuses = [action for action in actions if isinstance(action, PatchStatus)]
        finalizers = [action for action in actions if isinstance(action, RemoveFinalizer)]
        if not statuses and self._kept.status_tries.are_under_way:  # an attempt may still be stored
            self._kept.status_tries.cancel()
            self._block_until_written([PatchStatus(status={}, resource_version="")])
            self._status_s = STATUS_AGAIN_S
        elif not statuses:  # the stored status is up to date
            self._context.callbacks.status_written(self._resource.key, True)
        writes: list[PatchStatus | RemoveFinalizer] = [*statuses, *finalizers]
        if writes and (wait_s := self._kept.status_tries.wait_s()) > 0:  # send nothing and count nothing
            self._block_until_written(writes)
            self._status_s = wait_s
            return not statuses
        due = [action for action in writes if self._acting.may(action)]
        if not due:
            return not statuses
        task = self._start(self._write_in_turn(due), f"status of {self._resource.key}")
        self._kept.status_tries.add(task)
        await asyncio.wait({task}, timeout=self._context.patience_s)
        if not task.done():
            self._block_until_written(due)
            self._not_written(self._kept.status_tries.wait_s())
        elif not task.cancelled():
            task.result()
        return not statuses or statuses[0] in due

    def _not_written(self, again_s: float) -> None:
        self._context.callbacks.status_written(self._resource.key, False)
        self._status_s = again_s

    def _block_until_written(self, actions: Iterable[Write]) -> None:
        for action in actions:
            self._acting.conflicted(action)

    async def _write_in_turn(self, actions: Sequence[PatchStatus | RemoveFinalizer]) -> None:
        for action in actions:
            try:
                if isinstance(action, PatchStatus):
                    await self._patch_status(action)
                else:
                    await self._remove_finalizer()
            except ConflictError as error:
                self._record_conflict(action, error)
                break
            except ChildError as error:
                self._record_refusal(action, error.reason, error.message)
            except ApiError as error:
                if not error.is_refusal:
                    logger.warning("%s: status not written: %s", self._resource.key, error.message)
                    self._block_until_written(actions)
                    self._not_written(_RETRY_STATUS_S)
                    return
                self._context.callbacks.status_written(self._resource.key, False)
                self._record_refusal(action, OBJECT_REFUSED, refusal_message(action, error.said))
            else:
                self._current().done(action)
                self._kept.status_tries.cancel(but=asyncio.current_task())
                self._context.callbacks.status_written(self._resource.key, True)
        if self._is_finished:
            self._context.callbacks.wake(self._resource.key)

    async def _patch_status(self, action: PatchStatus) -> None:
        observed = action.resource_version == self._resource.resource_version
        path = HETERO_INFERENCE.path(self._resource.key.namespace, self._resource.key.name, "status")
        body = self._body({"status": action.status}, self._version if observed else action.resource_version)
        await self._write(self._context.server.update(path, body, lane=RequestLane.STATUS))

    async def _remove_finalizer(self) -> None:
        wanted = tuple(f for f in self._finalizers if f != names.FINALIZER)
        if wanted == self._finalizers:
            return
        path = HETERO_INFERENCE.path(self._resource.key.namespace, self._resource.key.name)
        body = self._body({"metadata": {"finalizers": list(wanted)}}, self._version)
        await self._write(self._context.server.merge(path, body, lane=RequestLane.STATUS))
        self._finalizers = wanted
        if self._kept.written.note(names.KIND, names.FINALIZER, None, self._current().now):
            raise finalizer_set_each_time(self._resource)

    def _body(self, fields: Manifest, version: str) -> Manifest:
        """Builds the request body. The API server refuses it if the resource has another version."""
        metadata = {
            **fields.get("metadata", {}),
            "name": self._resource.key.name,
            "namespace": self._resource.key.namespace,
            "uid": self._resource.uid,
            "resourceVersion": version,
        }
        kind = {"apiVersion": HETERO_INFERENCE.api_version, "kind": HETERO_INFERENCE.name}
        return {**kind, **fields, "metadata": metadata}

    async def _write(self, write: Coroutine[Any, Any, Manifest]) -> None:
        """Sends a write of the resource and keeps its new version as the expected one."""
        try:
            stored = await write
        except ApiError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            self._context.cluster_state.resources.doubt(self._resource.key)
            raise ConflictError(error.message) from error
        self._version = stored["metadata"]["resourceVersion"]
        self._context.cluster_state.resources.note_written(stored)

    # Writes to children.

    async def _run_stage(self, stage: Sequence[Write]) -> None:
        started: dict[asyncio.Task[object], Sequence[Write]] = {}
        pods: dict[tuple[frozenset[str], str], list[CreateObject]] = {}
        for action in stage:
            if isinstance(action, CreateObject) and action.manifest["kind"] == POD.name:
                if (found := self._start_pod_create(action)) is not None:
                    pods.setdefault((found.scopes, _epoch_of(found)), []).append(found)
            elif self._may_start(action):
                started[self._launch([action], self._run_one(action))] = [action]
        for batch in pods.values():
            started[self._launch(batch, self._create_pods(batch))] = []
        if not started:
            return
        await asyncio.wait(started, timeout=self._remaining_s())
        for task, actions in started.items():
            if not task.done():
                self._block_dependents(actions)
            elif not task.cancelled():
                task.result()

    def _start_pod_create(self, action: CreateObject) -> CreateObject | None:
        """Returns the create action of a pod if it may start now. Remembers the pod's manifest."""
        name, epoch = action.manifest["metadata"]["name"], _epoch_of(action)
        if (POD.name, name) in self._kept.under_way:
            return None
        if epoch:
            action = replace(action, manifest=self._kept.unmade.want(action.manifest))
        others = (each for each in self._kept.under_way.values() if each.epoch not in ("", epoch))
        if any(action.scopes & each.scopes for each in others):  # pods of an earlier epoch
            self._acting.conflicted(action)
            return None
        return action if self._acting.may(action) else None

    def _may_start(self, action: Write) -> bool:
        if not self._acting.may(action):
            return False
        if subject(action, self._resource.key.name) in self._kept.under_way:
            self._block_dependents([action])
            return False
        return True

    def _block_dependents(self, actions: Iterable[Write]) -> None:
        """Blocks objects that depend on an object whose write has no answer yet."""
        for action in actions:
            if isinstance(action, CreateObject | ApplyObject):
                self._record_refusal(action, NOT_ANSWERED, unanswered_message(action, _UNDER_WAY))

    def _launch(self, actions: Sequence[Write], work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = self._start(work, f"writes of {self._resource.key}")
        for action in actions:
            epoch = _epoch_of(action) if isinstance(action, CreateObject) else ""
            found = subject(action, self._resource.key.name)
            self._launched[found] = self._kept.under_way[found] = UnderWay(task, scopes_of(action), epoch)
        task.add_done_callback(lambda _: self._unblock(actions))
        return task

    def _unblock(self, actions: Iterable[Write]) -> None:
        for action in actions:
            found = subject(action, self._resource.key.name)
            if self._kept.under_way.get(found) is self._launched.get(found):  # not a later attempt
                self._kept.under_way.pop(found, None)
        if self._is_finished:
            self._context.callbacks.wake(self._resource.key)

    async def _create_pods(self, creates: Sequence[CreateObject]) -> None:
        """Creates pods of one epoch. If the epoch has no pod yet, creates one pod before the others.

        If a policy or a webhook refuses or changes the first pod, it would do the same with all others.
        """
        first = self._epochs.isdisjoint(
            {_group_and_epoch(creates[0].manifest["metadata"].get("labels") or {})}
        )
        alone, together = (creates[:1], creates[1:]) if first else ((), creates)
        for create in alone:
            if not await self._run_one(create):
                for unsent in together:
                    self._current().unsent(unsent)
                return
        async with asyncio.TaskGroup() as group:
            for create in together:
                group.create_task(self._run_one(create))

    async def _run_one(self, action: Write) -> bool:
        """Runs an action on a child; returns whether it succeeded."""
        match action:
            case CreateObject():
                work = self._run_in_slot(self._context.objects.create(self._resource, self._kept, action))
            case ApplyObject():
                work = self._run_in_slot(
                    self._context.objects.apply(self._resource, self._kept, action.manifest)
                )
            case DeleteObject():
                work = self._context.objects.delete(self._resource, self._kept, action)
            case _:
                raise AssertionError(f"{action} does not write a child")
        try:
            return await self._try_action(action, work)
        finally:
            self._unblock([action])

    async def _run_in_slot(self, work: Coroutine[Any, Any, None]) -> None:
        async with self._kept.slots:
            await work

    async def _try_action(self, action: Write, work: Coroutine[Any, Any, None]) -> bool:
        """Awaits an action; returns whether it succeeded. Records why it failed."""
        try:
            await work
        except ConflictError as error:
            self._record_conflict(action, error)
        except ChildError as error:
            self._record_refusal(action, error.reason, error.message)
        except ApiError as error:
            if error.is_refusal:
                self._record_refusal(action, OBJECT_REFUSED, refusal_message(action, error.said))
            else:
                self._record_unanswered(action, error)
        except HeteroInferError as error:
            self._record_unanswered(action, error)
        else:
            self._current().done(action)
            return True
        return False

    def _current(self) -> Acting:
        if self._is_finished:
            self._kept.acting.now = datetime.now(UTC)
        return self._kept.acting

    def _record_conflict(self, action: Write, error: ConflictError) -> None:
        self._current().conflicted(action)
        self._conflict = self._conflict or error

    def _record_unanswered(self, action: Write, error: HeteroInferError) -> None:
        logger.warning("%s: %s", self._resource.key, unanswered_message(action, error.message))
        self._record_refusal(action, NOT_ANSWERED, unanswered_message(action, error.message[:300]))

    def _record_refusal(self, action: Write, reason: str, message: str) -> None:
        if (
            self._generation != self._kept.generation
        ):  # the spec changed since: earlier refusals no longer count
            return
        news = self._current().refused(action, reason, message)
        if news is not None:
            event = RecordEvent(reason=reason, message=message[:1000], warning=True)
            self._context.recorder.record(self._resource, event)

    def _start(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        return start_task(work, name=name, failed=self._report)

    def _report(self, error: BaseException) -> None:
        if isinstance(error, HeteroInferError):  # this process may not write any more
            logger.warning("%s: %s", self._resource.key, error.message)
        elif self._is_finished:  # before that, the reconcile raises the error
            logger.error("%s: a defect of the operator. Report it", self._resource.key, exc_info=error)


def _stages(actions: Sequence[Action]) -> Iterator[list[Write]]:
    """Groups the actions on children into stages. Actions of one stage may run at the same time."""
    stage: list[Write] = []
    for action in actions:
        if not isinstance(action, CreateObject | ApplyObject | DeleteObject):
            continue
        if stage and _kind(stage[-1]) != _kind(action):
            yield stage
            stage = []
        stage.append(action)
    if stage:
        yield stage


def _kind(action: Write) -> str:
    if isinstance(action, DeleteObject):
        return "delete"
    creates_pod = isinstance(action, CreateObject) and action.manifest["kind"] == POD.name
    return "pod" if creates_pod else "child"


def _group_and_epoch(labels: Any) -> tuple[str, str]:
    return labels.get(names.LABEL_GROUP, ""), labels.get(names.LABEL_EPOCH, "")


def _epoch_of(action: CreateObject) -> str:
    return str((action.manifest["metadata"].get("labels") or {}).get(names.LABEL_EPOCH, ""))
