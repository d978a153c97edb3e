"""What is to be done with one group. Pure.

An epoch lives as long as all its pods do. Whatever ends it, the failure and the next
epoch are written to the status first, then the old pods are deleted, and the new ones
are created once the old are gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.group_status import GroupStatus as GroupReport
from heteroinfer_contract.group_status import RankPhase
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import FailureStatus, GroupPhase, GroupStatus
from heteroinfer_operator.cluster import CreateObject, DeleteObject, PodView, RecordEvent
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests.identity import GroupRef
from heteroinfer_operator.manifests.pod import WorkerPods
from heteroinfer_operator.reconcile import restarts
from heteroinfer_operator.reconcile.context import Context
from heteroinfer_operator.reconcile.failure import Fall, find_fall

_FALLEN_GRACE_S = 2
"""For the members of a fallen group: there is no request left that they could answer."""
_MESSAGE_CHARACTERS = 400
"""Of a kept failure: 64 groups with 21 of them stay below etcd's 1.5 MiB an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What one group needs.

    Attributes:
        status: its next status.
        deletes: of its pods.
        creates: its pods.
        events: for people.
        look_again_s: seconds until the next look, or None.
        plan: of its epoch, or None if it has none.
        notes: on a plan made now, for people; None for an older plan.
        refusal: why there is no plan, or None.
        unplaced: which pod has no node, and why, or "".
    """

    status: GroupStatus
    deletes: tuple[DeleteObject, ...] = ()
    creates: tuple[CreateObject, ...] = ()
    events: tuple[RecordEvent, ...] = ()
    look_again_s: float | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] | None = None
    refusal: PlanError | None = None
    unplaced: str = ""


def epoch_of(pod: PodView) -> int:
    """Returns the epoch in a pod's labels."""
    return int(pod.labels[names.LABEL_EPOCH])


def decide_group(
    context: Context,
    status: GroupStatus,
    pods: Sequence[PodView],
    *,
    replace: bool,
    report: GroupReport | None = None,
) -> GroupDecision:
    """Returns what a group needs.

    Args:
        context: of this pass.
        status: of the group as last written; `epoch` 0 before its first epoch.
        pods: all pods of the group, of every epoch.
        replace: whether the group may be replaced now, if its revision is an old one.
        report: what its leader says of it now, or None.
    """
    epoch = max([status.epoch, *(epoch_of(pod) for pod in pods)])
    current = [pod for pod in pods if epoch_of(pod) == epoch]
    status = status.model_copy(update={"epoch": epoch})
    if context.spec.suspend:
        return _empty(status, pods, "suspended: set spec.suspend to false to start")
    if not current:
        return _between_epochs(context, status, pods)
    plan = context.plans.get(current[0].labels.get(names.LABEL_PLAN, ""))
    if replace and current[0].labels.get(names.LABEL_REVISION) != context.revision:
        return _replace(context, status, pods)
    fall = find_fall(current) or _lost_pod(status, current, plan)
    if fall is not None:
        return _fall(context, status, pods, fall)
    assert plan is not None  # _lost_pod names a missing plan
    asleep = _is_asleep(status, report)
    return _living(context, status, current, plan, asleep=asleep)


def _is_asleep(status: GroupStatus, report: GroupReport | None) -> bool:
    if report is None:
        # A leader that does not answer in time once: what was last said holds as long as no pod ends.
        return status.phase is GroupPhase.SLEEPING
    return report.epoch == status.epoch and any(rank.phase is RankPhase.SLEEPING for rank in report.ranks)


def stop_group(status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    """Returns how a group that is no longer wanted ends."""
    return _empty(status, pods, "stopping: no longer wanted")


def _empty(status: GroupStatus, pods: Sequence[PodView], message: str) -> GroupDecision:
    phase = GroupPhase.STOPPING if pods else GroupPhase.PENDING
    update: dict[str, Any] = {
        "phase": phase,
        "message": message,
        "members": (),
        "measured_time": None,
        "kv": None,
    }
    if not pods and status.epoch_start_time is not None:
        update |= {"epoch": status.epoch + 1, "epoch_start_time": None}
    return GroupDecision(status=status.model_copy(update=update), deletes=_deletes(pods, grace_s=None))


def _deletes(pods: Sequence[PodView], *, grace_s: int | None) -> tuple[DeleteObject, ...]:
    return tuple(
        DeleteObject(kind="Pod", name=pod.name, uid=pod.uid, grace_s=grace_s)
        for pod in pods
        if not pod.deleting
    )


def _lost_pod(status: GroupStatus, current: Sequence[PodView], plan: Plan | None) -> Fall | None:
    if plan is None:
        return Fall(
            reason="PlanLost",
            message=f"the ConfigMap of the plan of epoch {status.epoch} is gone; a new epoch gets a new plan",
        )
    present = {pod.name for pod in current}
    gone = [member.pod for member in status.members if member.pod not in present]
    return Fall(reason="PodDeleted", message=f"pod {gone[0]} is gone") if gone else None


def _replace(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    update = {
        "epoch": status.epoch + 1,
        "revision": context.revision,
        "phase": GroupPhase.STOPPING,
        "message": "replaced by the new revision",
        "epoch_start_time": None,
        "next_epoch_time": None,
        "restarts": 0,
        "failures": (),
        "members": (),
        "measured_time": None,
        "kv": None,
    }
    return GroupDecision(status=status.model_copy(update=update), deletes=_deletes(pods, grace_s=None))


def _fall(context: Context, status: GroupStatus, pods: Sequence[PodView], fall: Fall) -> GroupDecision:
    failure = FailureStatus(
        epoch=status.epoch,
        time=context.now,
        reason=fall.reason,
        message=fall.message[:_MESSAGE_CHARACTERS],
        rank=fall.rank,
        exit_code=fall.exit_code,
        counted=fall.counted,
    )
    failures = restarts.remember(status.failures, failure)
    failed = restarts.used_up(failures, context.spec.restart)
    update = {
        "epoch": status.epoch + 1,
        "phase": GroupPhase.FAILED if failed else GroupPhase.STOPPING,
        "message": _culprit(failure),
        "epoch_start_time": None,
        "next_epoch_time": restarts.next_epoch_time(failures, context.spec.restart),
        "restarts": status.restarts + (fall.counted and not failed),
        "failures": failures,
        "members": (),
        "measured_time": None,
        "kv": None,
    }
    who = "" if fall.rank is None else f"rank {fall.rank}: "
    event = RecordEvent(
        reason=fall.reason,
        message=f"group {status.index} epoch {status.epoch} ended: {who}{fall.message}"[:1000],
        warning=True,
    )
    return GroupDecision(
        status=status.model_copy(update=update),
        deletes=_deletes([pod for pod in pods if not (failed and _has_logs(pod))], grace_s=_FALLEN_GRACE_S),
        events=(event,),
    )


def _has_logs(pod: PodView) -> bool:
    return pod.termination is not None and not pod.deleting


def _culprit(failure: FailureStatus) -> str:
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    return f"{failure.reason}: {who}{failure.message}"[:1024]


def _between_epochs(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    if status.revision != context.revision:
        update: dict[str, Any] = {"failures": (), "restarts": 0, "next_epoch_time": None}
        status = status.model_copy(update=update)
    if restarts.used_up(status.failures, context.spec.restart):
        update = {"phase": GroupPhase.FAILED, "message": _culprit(status.failures[-1])}
        kept = [pod for pod in pods if not _has_logs(pod)]
        return GroupDecision(
            status=status.model_copy(update=update), deletes=_deletes(kept, grace_s=_FALLEN_GRACE_S)
        )
    if pods:
        update = {"phase": GroupPhase.STOPPING}
        return GroupDecision(
            status=status.model_copy(update=update), deletes=_deletes(pods, grace_s=_FALLEN_GRACE_S)
        )
    if status.next_epoch_time is not None and status.next_epoch_time > context.now:
        wait_s = (status.next_epoch_time - context.now).total_seconds()
        update = {"phase": GroupPhase.WAITING}
        return GroupDecision(status=status.model_copy(update=update), look_again_s=wait_s)
    return _start(context, status)


def _start(context: Context, status: GroupStatus) -> GroupDecision:
    try:
        planned = context.make_plan()
    except PlanError as refusal:
        update: dict[str, Any] = {"phase": GroupPhase.PENDING, "message": refusal.message[:1024]}
        return GroupDecision(status=status.model_copy(update=update), refusal=refusal)
    plan = planned.plan
    update = {
        "epoch": max(status.epoch, 1),
        "revision": context.revision,
        "plan_hash": plan.hash,
        "phase": GroupPhase.STARTING,
        "message": f"creating {len(plan.pods)} pods",
        "epoch_start_time": None,
        "next_epoch_time": None,
        "members": (),
        "kv": None,
    }
    status = status.model_copy(update=update)
    return GroupDecision(
        status=status,
        creates=_creates(context, status, plan, {pod.index for pod in plan.pods}),
        events=(
            RecordEvent(
                reason="EpochStarted",
                message=f"group {status.index} epoch {status.epoch}: creating {len(plan.pods)} pods for "
                f"{plan.world_size} ranks",
            ),
        ),
        plan=plan,
        notes=planned.notes,
    )


def _living(
    context: Context, status: GroupStatus, current: Sequence[PodView], plan: Plan, *, asleep: bool
) -> GroupDecision:
    present = {int(pod.labels[names.LABEL_POD_INDEX]) for pod in current}
    missing = {pod.index for pod in plan.pods} - present
    ready = not missing and all(pod.ready for pod in current)
    phase = GroupPhase.READY if ready else GroupPhase.STARTING
    message = None if ready else _waits_for(current, len(plan.pods))
    if asleep and not ready and not missing:
        phase, message = GroupPhase.SLEEPING, _how_to_wake(current)
    update = {
        "phase": phase,
        "message": message,
        "plan_hash": plan.hash,
        "revision": current[0].labels.get(names.LABEL_REVISION),
        "epoch_start_time": status.epoch_start_time or (None if missing else context.now),
    }
    events = (
        (RecordEvent(reason="GroupReady", message=f"group {status.index} epoch {status.epoch} serves"),)
        if ready and status.phase is not GroupPhase.READY
        else ()
    )
    status = status.model_copy(update=update)
    return GroupDecision(
        status=status,
        creates=_creates(context, status, plan, missing),
        events=events,
        plan=plan,
        unplaced=_unplaced(current),
    )


def _how_to_wake(pods: Sequence[PodView]) -> str:
    leader = next(pod for pod in pods if pod.labels.get(names.LABEL_LEADER) == "true")
    return f"asleep; POST /wake_up to the API of pod {leader.name} wakes it (kubectl port-forward reaches it)"


def _unplaced(pods: Sequence[PodView]) -> str:
    return next(
        (f"pod {pod.name} is not placed: {pod.unschedulable}"[:1024] for pod in pods if pod.unschedulable), ""
    )


def _waits_for(pods: Sequence[PodView], expected: int) -> str:
    if unplaced := _unplaced(pods):
        return unplaced
    for pod in pods:
        if pod.waiting:
            return f"pod {pod.name} waits: {pod.waiting}"[:1024]
    ready = sum(pod.ready for pod in pods)
    return f"{ready} of {expected} pods are ready"


def _group_ref(context: Context, status: GroupStatus) -> GroupRef:
    return GroupRef(owner=context.owner, index=status.index, epoch=status.epoch)


def _creates(
    context: Context, status: GroupStatus, plan: Plan, indices: set[int]
) -> tuple[CreateObject, ...]:
    if not indices:
        return ()
    group = _group_ref(context, status)
    pods = WorkerPods(
        spec=context.spec,
        group=group,
        plan=plan,
        revision=context.revision,
        addresses=context.options.addressing.pods(context.spec, group, plan),
        source=context.source,
        images=context.options.images,
    )
    return tuple(CreateObject(manifest=pods.build(pod)) for pod in plan.pods if pod.index in indices)
