"""Runs the actions of one decision against the API server.

The status is written first. A reconcile waits only a moment for each of its other requests. A slower request
continues in the background: the next reconciles do not write its object, and its answer *wakes* the resource,
which means that the resource is reconciled again soon. So a slow webhook does not delay the status.
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
from heteroinfer_operator.kube.kept import STATUS_RETRY_S, PendingRequest, ResourceMemory
from heteroinfer_operator.kube.object_writes import ObjectWrites
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD, NamespacedName
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer, RequestLane
from heteroinfer_operator.reconcile.refusals import (
    NOT_ANSWERED,
    OBJECT_REFUSED,
    ActionPermits,
    KindAndName,
    kind_and_name,
    scopes_of,
)

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.25
"""How long a reconcile waits for its status write, and then again for all other requests.

The API server answers most requests within this time.
"""
_STATUS_RETRY_PAUSE_S: Final = 0.5
"""Pause after a failed attempt to write a status."""
_SENT: Final = "the request was sent; waiting for the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Functions that the cluster adapter calls.

    Attributes:
        observed: called with the status of each observed resource; with None once the resource is gone.
        status_written: called with False after a failed or unanswered write of a resource's status, and with
            True once the stored status is up to date.
        held_back: called with the kind of each action that must wait for the resource's budget of writes.
        wake: called with a resource if one of its requests is answered after its reconcile stopped waiting.
            Starts another reconcile of the resource.
    """

    observed: Callable[[ResourceKey, HeteroInferenceStatus | None], None] = lambda key, status: None
    status_written: Callable[[ResourceKey, bool], None] = lambda key, written: None
    held_back: Callable[[str], None] = lambda kind: None
    wake: Callable[[ResourceKey], None] = lambda key: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionContext:
    """The parts of the adapter that run actions, and how long a reconcile waits for its requests."""

    server: ApiServer
    cluster_state: ClusterState
    objects: ObjectWrites
    dry_runs: DryRuns
    recorder: EventRecorder
    callbacks: Callbacks
    patience_s: float


class ActionRun:
    """Runs the actions of one decision.

    Each of its writes of the resource changes the resourceVersion, so this class remembers the newest version
    for its next write.

    Args:
        memory: state of the resource. `begin_decision` must have been called for this decision.
    """

    def __init__(
        self, context: ActionContext, observation: ResourceObservation, memory: ResourceMemory
    ) -> None:
        self._context = context
        # A request may outlive its decision. It must not keep the spec and the status in memory.
        self._resource = observation.resource.without_fields()
        self._memory = memory
        self._permits = memory.permits
        self._generation = memory.generation
        self._version = self._resource.resource_version
        self._finalizers = self._resource.finalizers
        self._epochs_with_pods = {_group_and_epoch(pod.labels) for pod in observation.pods}
        self._started_requests: dict[KindAndName, PendingRequest] = {}
        self._status_retry_s: float | None = None
        self._conflict: ConflictError | None = None
        self._deadline_s = 0.0
        self._is_finished = False

    async def run_all(self, actions: Sequence[Action]) -> float | None:
        """Runs the actions that can run now: the status first, then children in stages, dry runs last.

        *Children* are the objects that the operator creates for the resource. Records events only after the
        status was sent: without the new status, the next decision would have the same events again.

        Returns:
            Seconds until an action may be tried again, or None.

        Raises:
            ConflictError: an object is in another state than the decision assumed.
        """
        try:
            self._reserve_capacity(actions)
            may_record_events = await self._write_resource(actions)
            if may_record_events:
                for event in (action for action in actions if isinstance(action, RecordEvent)):
                    self._context.recorder.record(self._resource, event)
            self._deadline_s = asyncio.get_running_loop().time() + self._context.patience_s
            for stage in _split_stages(actions):
                await self._run_stage(stage)
            for action in actions:
                if isinstance(action, TryObjects) and self._permits.may_run(action):
                    await self._run_and_record(action, self._try_objects(action))
        finally:
            self._is_finished = True  # from here on, each answer wakes the resource
            self._permits.release_inputs()
        if self._conflict is not None:
            raise self._conflict
        waits_s = (self._permits.look_again_s(), self._status_retry_s)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _reserve_capacity(self, actions: Sequence[Action]) -> None:
        """Reserves capacity for the pods of this decision until the next decision of this resource.

        So the decisions of other resources do not plan the same capacity in the meantime.
        """
        creates = [action.manifest for action in actions if isinstance(action, CreateObject)]
        pods = [manifest for manifest in creates if manifest["kind"] == POD.name]
        self._memory.reservations.close()
        self._memory.reservations.enter_context(self._context.cluster_state.reserving(pods))
        self._memory.reserved_pods = frozenset(NamespacedName.from_object(pod) for pod in pods)

    async def _try_objects(self, action: TryObjects) -> None:
        """Waits for the dry run of a revision's objects for the rest of this reconcile's time.

        After this time, the dry run continues in the background.
        """
        await self._context.dry_runs.await_admission(self._resource, action, patience_s=self._seconds_left())

    def _seconds_left(self) -> float:
        """Returns the seconds that this reconcile may still wait for requests."""
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    # Writes to the resource itself. The status is the first write of a reconcile, because it depends on no
    # other write.

    async def _write_resource(self, actions: Sequence[Action]) -> bool:
        """Writes the status, and removes the finalizer that earlier versions set.

        Returns:
            False if the decision has a new status that was not sent. Then the events of this decision must
            wait, too.
        """
        statuses = [action for action in actions if isinstance(action, PatchStatus)]  # at most one
        finalizers = [action for action in actions if isinstance(action, RemoveFinalizer)]
        has_new_status = bool(statuses)
        if not has_new_status:
            self._finish_earlier_status_writes()
        writes: list[PatchStatus | RemoveFinalizer] = [*statuses, *finalizers]
        wait_s = self._memory.status_attempts.wait_s() if writes else 0.0
        if wait_s > 0:  # an earlier attempt was sent a moment ago: send nothing, and use no budget
            self._record_conflicts(writes)  # blocks all actions that depend on these writes
            self._status_retry_s = wait_s
            return not has_new_status
        permitted = [action for action in writes if self._permits.may_run(action)]
        if permitted:
            await self._attempt_writes(permitted)
        was_status_sent = has_new_status and statuses[0] in permitted
        return was_status_sent or not has_new_status

    def _finish_earlier_status_writes(self) -> None:
        """Cancels unanswered writes of earlier statuses, because this decision has no new status.

        Without unanswered writes, reports that the stored status is up to date.
        """
        if not self._memory.status_attempts.has_pending:
            self._context.callbacks.status_written(self._resource.key, True)
            return
        self._memory.status_attempts.cancel()
        # The API server may still store an earlier status. So all actions that depend on the status wait, as
        # if this decision had a status that cannot be written. Only the type of this action matters.
        self._record_conflicts([PatchStatus(status={}, resource_version="")])
        self._status_retry_s = STATUS_RETRY_S

    async def _attempt_writes(self, actions: Sequence[PatchStatus | RemoveFinalizer]) -> None:
        """Sends writes of the resource, and waits for the answers for `patience_s`.

        Without an answer in this time, the writes continue in the background, and all actions that depend on
        these writes wait.
        """
        task = self._start_task(self._write_one_by_one(actions), f"status of {self._resource.key}")
        self._memory.status_attempts.add(task)
        await asyncio.wait({task}, timeout=self._context.patience_s)
        if not task.done():
            self._record_conflicts(actions)
            self._report_unwritten_status(self._memory.status_attempts.wait_s())
        elif not task.cancelled():
            task.result()  # raises the task's error if the operator has a defect

    def _report_unwritten_status(self, again_s: float) -> None:
        """Reports that the status is not written, and plans the next attempt after `again_s` seconds."""
        self._context.callbacks.status_written(self._resource.key, False)
        self._status_retry_s = again_s

    def _record_conflicts(self, actions: Iterable[Write]) -> None:
        """Records a conflict for each of these actions, which blocks all actions that depend on them."""
        for action in actions:
            self._permits.record_conflict(action)

    async def _write_one_by_one(self, actions: Sequence[PatchStatus | RemoveFinalizer]) -> None:
        """Writes the status and removes the finalizer. Stops at a conflict or a missing answer."""
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
                    logger.warning(
                        "%s: status not written: %s. Trying again", self._resource.key, error.message
                    )
                    self._record_conflicts(actions)
                    self._report_unwritten_status(_STATUS_RETRY_PAUSE_S)
                    return  # `wake` is not needed, because `run_all` returns the time of the next attempt
                self._context.callbacks.status_written(self._resource.key, False)
                self._record_refusal(action, OBJECT_REFUSED, refusal_message(action, error.answer_message))
            else:
                self._current_permits().record_success(action)
                # This success changes the resource's version. The other attempts name the old version, so
                # they could only conflict.
                self._memory.status_attempts.cancel(kept_task=asyncio.current_task())
                self._context.callbacks.status_written(self._resource.key, True)
        if self._is_finished:
            self._context.callbacks.wake(self._resource.key)

    async def _patch_status(self, action: PatchStatus) -> None:
        """Writes the status. The API server refuses the write if the resource has changed since."""
        path = HETERO_INFERENCE.path(self._resource.key.namespace, self._resource.key.name, "status")
        # An earlier write of this run may have changed the observed version to `_version`.
        is_observed_version = action.resource_version == self._resource.resource_version
        version = self._version if is_observed_version else action.resource_version
        body = self._build_body({"status": action.status}, version)
        await self._send_resource_write(self._context.server.update(path, body, lane=RequestLane.STATUS))

    async def _remove_finalizer(self) -> None:
        """Removes the finalizer that earlier versions set."""
        remaining = tuple(f for f in self._finalizers if f != names.FINALIZER)
        if remaining == self._finalizers:
            return
        path = HETERO_INFERENCE.path(self._resource.key.namespace, self._resource.key.name)
        body = self._build_body({"metadata": {"finalizers": list(remaining)}}, self._version)
        await self._send_resource_write(self._context.server.merge(path, body, lane=RequestLane.STATUS))
        self._finalizers = remaining
        # `manifest=None`: the removal counts as a deletion.
        is_set_each_time = self._memory.repeated_writes.count_write(
            names.KIND, names.FINALIZER, manifest=None, now=self._current_permits().now
        )
        if is_set_each_time:
            raise finalizer_set_each_time(self._resource)

    def _build_body(self, fields: Manifest, version: str) -> Manifest:
        """Builds the body of a write, which the API server refuses if the resource has another version."""
        metadata = {
            **fields.get("metadata", {}),
            "name": self._resource.key.name,
            "namespace": self._resource.key.namespace,
            "uid": self._resource.uid,
            "resourceVersion": version,
        }
        kind = {"apiVersion": HETERO_INFERENCE.api_version, "kind": HETERO_INFERENCE.name}
        return {**kind, **fields, "metadata": metadata}

    async def _send_resource_write(self, write: Coroutine[Any, Any, Manifest]) -> None:
        """Sends a write of the resource, and stores the new version for the next write.

        Raises:
            ConflictError: the resource has another version, or is gone.
        """
        try:
            stored = await write
        except ApiError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            self._context.cluster_state.resources.mark_outdated(self._resource.key)
            raise ConflictError(error.message) from error
        self._version = stored["metadata"]["resourceVersion"]
        self._context.cluster_state.resources.store_written(stored)

    # Writes to children.

    async def _run_stage(self, stage: Sequence[Write]) -> None:
        """Starts the writes of a stage, and waits for them until the reconcile's time is over.

        The pods of one epoch are one batch, because `_create_pods` may create one pod before the others. No
        object depends on a pod, so a batch of pods without an answer blocks nothing.
        """
        # By task: the actions on which other objects depend. While a task has no answer, those objects wait.
        started: dict[asyncio.Task[object], Sequence[Write]] = {}
        pod_batches: dict[tuple[frozenset[str], str], list[CreateObject]] = {}
        for action in stage:
            if isinstance(action, CreateObject) and action.manifest["kind"] == POD.name:
                if (prepared := self._prepare_pod_create(action)) is not None:
                    batch_key = prepared.scopes, _epoch_of_create(prepared)
                    pod_batches.setdefault(batch_key, []).append(prepared)
            elif self._may_start(action):
                started[self._start_writes([action], self._run_child_write(action))] = [action]
        for batch in pod_batches.values():
            started[self._start_writes(batch, self._create_pods(batch))] = []
        if not started:
            return
        await asyncio.wait(started, timeout=self._seconds_left())
        for task, actions in started.items():
            if not task.done():
                self._block_dependents(actions)
            elif not task.cancelled():
                task.result()  # raises the task's error if the operator has a defect

    def _prepare_pod_create(self, action: CreateObject) -> CreateObject | None:
        """Returns the action that creates a pod, or None if the pod may not be created now.

        If an earlier decision wanted the same pod and the pod does not exist yet, the action gets the
        manifest of that decision. So repeated requests create the same pod. While create requests of another
        epoch of the group have no answer, the pod is not created, because these requests may still succeed.
        """
        name, epoch = action.manifest["metadata"]["name"], _epoch_of_create(action)
        if (POD.name, name) in self._memory.pending_requests:
            return None
        if epoch:  # a worker pod; pods that read or fetch the model have no epoch
            action = replace(action, manifest=self._memory.never_created.add(action.manifest))
        requests_of_other_epochs = (
            request for request in self._memory.pending_requests.values() if request.epoch not in ("", epoch)
        )
        if any(action.scopes & request.scopes for request in requests_of_other_epochs):
            self._permits.record_conflict(action)
            return None
        return action if self._permits.may_run(action) else None

    def _may_start(self, action: Write) -> bool:
        """Reports whether a write may start now; False while an earlier write of its object has no answer."""
        if not self._permits.may_run(action):
            return False
        if kind_and_name(action, self._resource.key.name) in self._memory.pending_requests:
            self._block_dependents([action])
            return False
        return True

    def _block_dependents(self, actions: Iterable[Write]) -> None:
        """Records creates and applies as not answered, which blocks the objects that depend on them."""
        for action in actions:
            if isinstance(action, CreateObject | ApplyObject):
                self._record_refusal(action, NOT_ANSWERED, unanswered_message(action, _SENT))

    def _start_writes(
        self, actions: Sequence[Write], work: Coroutine[Any, Any, object]
    ) -> asyncio.Task[object]:
        """Starts `work` as a task. Records the writes as pending requests until the task ends."""
        task = self._start_task(work, f"writes of {self._resource.key}")
        for action in actions:
            epoch = _epoch_of_create(action) if isinstance(action, CreateObject) else ""
            target = kind_and_name(action, self._resource.key.name)
            self._started_requests[target] = self._memory.pending_requests[target] = PendingRequest(
                task, scopes_of(action), epoch
            )
        task.add_done_callback(lambda _: self._remove_requests(actions))
        return task

    def _remove_requests(self, actions: Iterable[Write]) -> None:
        """Removes answered requests from the memory. Wakes the resource if its reconcile has ended.

        Keeps a request that a later reconcile has sent for the same object.
        """
        for action in actions:
            target = kind_and_name(action, self._resource.key.name)
            pending = self._memory.pending_requests.get(target)
            is_own_request = pending is self._started_requests.get(target)
            if is_own_request:
                self._memory.pending_requests.pop(target, None)
        if self._is_finished:
            self._context.callbacks.wake(self._resource.key)

    async def _create_pods(self, creates: Sequence[CreateObject]) -> None:
        """Creates pods of one epoch. If the epoch has no pod yet, creates one pod before the others.

        If the first pod is not created, the requests for the others are not sent: a policy or a webhook that
        refuses or changes the first pod would do the same with all pods.
        """
        epoch = _group_and_epoch(creates[0].manifest["metadata"].get("labels") or {})
        if epoch not in self._epochs_with_pods:
            first_create, *creates = creates
            is_created = await self._run_child_write(first_create)
            if not is_created:
                for unsent in creates:
                    self._current_permits().record_unsent(unsent)
                return
        async with asyncio.TaskGroup() as group:
            for create in creates:
                group.create_task(self._run_child_write(create))

    async def _run_child_write(self, action: Write) -> bool:
        """Runs an action on a child (an object that the operator creates for the resource).

        Only creates and applies need a slot, because webhooks may delay these for long.

        Returns:
            Whether the action succeeded.
        """
        match action:
            case CreateObject():
                work = self._run_in_slot(self._context.objects.create(self._resource, self._memory, action))
            case ApplyObject():
                work = self._run_in_slot(
                    self._context.objects.apply(self._resource, self._memory, action.manifest)
                )
            case DeleteObject():
                work = self._context.objects.delete(self._resource, self._memory, action)
            case _:
                raise AssertionError(f"unknown action: {action}")
        try:
            return await self._run_and_record(action, work)
        finally:
            self._remove_requests([action])

    async def _run_in_slot(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a create or an apply as soon as one of the resource's WRITES_AT_ONCE slots is free."""
        async with self._memory.slots:
            await work

    async def _run_and_record(self, action: Write, work: Coroutine[Any, Any, None]) -> bool:
        """Awaits an action, and records its success or failure. Returns whether it succeeded."""
        try:
            await work
        except ConflictError as error:
            self._record_conflict(action, error)
        except ChildError as error:
            self._record_refusal(action, error.reason, error.message)
        except ApiError as error:
            if error.is_refusal:
                self._record_refusal(action, OBJECT_REFUSED, refusal_message(action, error.answer_message))
            else:
                self._record_no_answer(action, error)
        except HeteroInferError as error:  # for example a lost Lease, which stops the write
            self._record_no_answer(action, error)
        else:
            self._current_permits().record_success(action)
            return True
        return False

    def _current_permits(self) -> ActionPermits:
        """Returns the permits of the resource. Sets their time to now if this reconcile has ended.

        During the reconcile the time of the decision applies. A late answer needs the present time, because
        the time of the next attempt counts from it.
        """
        if self._is_finished:
            self._memory.permits.now = datetime.now(UTC)
        return self._memory.permits

    def _record_conflict(self, action: Write, error: ConflictError) -> None:
        """Blocks the actions that depend on an action. Keeps the first conflict, which `run_all` raises."""
        self._current_permits().record_conflict(action)
        self._conflict = self._conflict or error

    def _record_no_answer(self, action: Write, error: HeteroInferError) -> None:
        """Logs a write without an answer, and records it as a refusal with a short message for the status."""
        logger.warning("%s: %s", self._resource.key, unanswered_message(action, error.message))
        self._record_refusal(action, NOT_ANSWERED, unanswered_message(action, error.message[:300]))

    def _record_refusal(self, action: Write, reason: str, message: str) -> None:
        """Records a refusal, and an event if users must learn of the refusal now.

        Does nothing if the spec has changed since the decision, because the new spec may be accepted.
        """
        if self._generation != self._memory.generation:
            return
        refusal_to_report = self._current_permits().record_refused(action, reason, message)
        if refusal_to_report is not None:
            event = RecordEvent(reason=reason, message=message[:1000], warning=True)
            self._context.recorder.record(self._resource, event)

    def _start_task(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        return start_task(work, name=name, failed=self._report_task_error)

    def _report_task_error(self, error: BaseException) -> None:
        """Logs the error of a background task that no reconcile awaits."""
        if isinstance(error, HeteroInferError):  # this process has lost the Lease, so it may not write
            logger.warning("%s: %s", self._resource.key, error.message)
        elif self._is_finished:  # while the reconcile runs, it raises the error itself
            logger.error(
                "%s: a write failed because of a defect of the operator. Report it, with this log",
                self._resource.key,
                exc_info=error,
            )


def _split_stages(actions: Sequence[Action]) -> Iterator[list[Write]]:
    """Splits the actions on children into stages, in the order of the decision.

    A stage has consecutive actions of one kind (`_stage_kind`). They may run at the same time.
    """
    stage: list[Write] = []
    for action in actions:
        if not isinstance(action, CreateObject | ApplyObject | DeleteObject):
            continue
        if stage and _stage_kind(stage[-1]) != _stage_kind(action):
            yield stage
            stage = []
        stage.append(action)
    if stage:
        yield stage


def _stage_kind(action: Write) -> str:
    """Returns the kind of the stage that runs an action: deletes, other children, or pods."""
    if isinstance(action, DeleteObject):
        return "delete"
    is_pod_create = isinstance(action, CreateObject) and action.manifest["kind"] == POD.name
    return "pod" if is_pod_create else "child"


def _group_and_epoch(labels: Any) -> tuple[str, str]:
    """Returns the group and the epoch in a pod's labels; "" for a missing label."""
    return labels.get(names.LABEL_GROUP, ""), labels.get(names.LABEL_EPOCH, "")


def _epoch_of_create(action: CreateObject) -> str:
    """Returns the epoch in the labels of the object to create, or ""."""
    return str((action.manifest["metadata"].get("labels") or {}).get(names.LABEL_EPOCH, ""))
