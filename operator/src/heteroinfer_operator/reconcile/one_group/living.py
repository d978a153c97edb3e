"""Decides for a group with an active epoch: phase, pods to replace, messages and events. Pure."""

from collections.abc import Collection, Sequence

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankPhase
from heteroinfer_operator.api import GroupPhase, GroupStatus, StartupStatus
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.cluster import CreateObject, Manifest, PodView, RecordEvent
from heteroinfer_operator.reconcile import startup, transitions
from heteroinfer_operator.reconcile.epoch_pods import (
    build_epoch_gang_object,
    build_key_create,
    build_pod_creates,
    describe_epoch,
)
from heteroinfer_operator.reconcile.group_planner import read_gang
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.made import BegunEpoch
from heteroinfer_operator.reconcile.reading import index_of


def decide_living(epoch: BegunEpoch, report: GroupReport | None) -> GroupDecision:
    """Decides the changes that a group with an active epoch needs.

    Three sets of pods differ: missing pods are created; replaceable pods never ran and are deleted now, so
    that new pods can take their names; stuck pods have containers that the kubelet cannot create.
    """
    context, before, current, origin = epoch.context, epoch.status, epoch.pods, epoch.origin
    missing, replaceable = epoch.missing, epoch.replaceable_pods
    phase = _find_phase(epoch, report)
    startup_status = None
    if phase is GroupPhase.STARTING:
        startup_status = startup.observe_startup(
            before.startup, current, report, all_pods_exist=not missing, now=context.now
        )
    stuck = startup.find_uncreated_containers(current, before.stuck_pods)
    message = _build_message(epoch, phase, startup_status, report)
    status = _build_status(epoch, phase, startup_status, message, stuck)
    creates, gang = _create_missing_pods(epoch, status)
    waits = [
        context.node_loss.next_check_s(current),
        startup.next_check_s(startup_status, current, context.now, replace_after_s=epoch.replace_after_s),
    ]
    lacks_configuration = any(map(startup.lacks_configuration, current))
    newly_stuck = [pod for index, pod in stuck.items() if index not in before.stuck_pods]
    return GroupDecision(
        status=status,
        deletes=context.node_loss.build_deletes(replaceable, grace_s=0, after_status=True),
        key_creates=build_key_create(context, status) if lacks_configuration else (),
        creates=creates,
        events=_build_events(before, status, newly_stuck, replaceable),
        runs=True,
        plan=origin.plan,
        # The operator may not know the node of a pod that has run.
        placed=not missing and all(pod.node or pod.started for pod in current),
        unplaced=_describe_unplaced(current),
        limit_range_defaults=_describe_limit_range_defaults(current),
        gang_object=gang,
        look_again_s=min((wait for wait in waits if wait is not None), default=None),
    )


def _build_status(
    epoch: BegunEpoch,
    phase: GroupPhase,
    startup_status: StartupStatus | None,
    message: str | None,
    stuck: Collection[int],
) -> GroupStatus:
    """Returns the next status of a group with an active epoch.

    Args:
        startup_status: progress of a starting group; None in other phases.
        stuck: indices of pods whose containers could not be created.
    """
    before, missing = epoch.status, epoch.missing
    ended_before_run = {index_of(pod) for pod in epoch.pods if startup.ended_before_run(pod)}
    # Count the rejection of a pod by its node once. While a pod with this index has ended before it ran, the
    # pod is the same pod: the operator creates the next pod only after it has seen that the name is free.
    counted_before = ended_before_run & set(before.rejected_pods)
    rejected = {index_of(pod) for pod in epoch.replaceable_pods if startup.is_rejected(pod)}
    newly_rejected = rejected - counted_before
    return transitions.with_active_epoch(
        before,
        phase=phase,
        message=message,
        revision=epoch.origin.revision_name,
        plan_hash=epoch.origin.plan_hash,
        startup=startup_status,
        all_pods_exist=not missing,
        now=epoch.context.now,
        # Pods that were never created are not stored: only this process of the operator knows them for sure.
        spare_pods=ended_before_run | (missing & set(before.spare_pods)),
        rejected_pods=counted_before | newly_rejected,
        newly_rejected=len(newly_rejected),
        stuck_pods=stuck,
    )


def _find_phase(epoch: BegunEpoch, report: GroupReport | None) -> GroupPhase:
    """Returns the phase of a group with an active epoch: Ready, Sleeping or Starting."""
    if epoch.missing:
        return GroupPhase.STARTING
    if all(pod.ready and not pod.ended for pod in epoch.pods):
        return GroupPhase.READY
    return GroupPhase.SLEEPING if _is_asleep(epoch.status, report) else GroupPhase.STARTING


def _build_message(
    epoch: BegunEpoch, phase: GroupPhase, startup_status: StartupStatus | None, report: GroupReport | None
) -> str | None:
    """Returns the message of a group with an active epoch, or None.

    Args:
        startup_status: progress of a starting group; None in other phases.
    """
    blocked = epoch.context.node_loss.describe_blocked(epoch.pods)
    if startup_status is not None:
        # While the group starts, a pod without a node comes first: the group waits for it in any case.
        unplaced = _describe_unplaced(epoch.pods)
        num_pods = len(epoch.origin.pods)
        return unplaced or blocked or startup.describe_progress(startup_status, epoch.pods, report, num_pods)
    return blocked or (_wake_message(epoch.pods) if phase is GroupPhase.SLEEPING else None)


def _create_missing_pods(
    epoch: BegunEpoch, status: GroupStatus
) -> tuple[tuple[CreateObject, ...], Manifest | None]:
    """Returns the creates of the missing pods, and the object for a gang scheduler, or None."""
    context, origin = epoch.context, epoch.origin
    if origin.plan is None or origin.revision is None:
        return (), None
    gang = build_epoch_gang_object(context, origin.revision, status, origin.plan, read_gang(epoch.pods))
    if not epoch.missing:
        return (), gang
    assignment = context.planner.constrain_added_pods(origin.revision.spec, origin.plan, epoch.pods)
    return build_pod_creates(context, origin.revision, status, origin.plan, epoch.missing, assignment), gang


def _is_asleep(status: GroupStatus, report: GroupReport | None) -> bool:
    """Reports whether the leader reports a sleeping rank."""
    if report is None:
        # A single request to the leader may fail, so the group keeps its phase.
        return status.phase is GroupPhase.SLEEPING
    return any(rank.phase is RankPhase.SLEEPING for rank in report.ranks)


def _build_events(
    before: GroupStatus, after: GroupStatus, stuck: Sequence[PodView], replaceable: Sequence[PodView]
) -> tuple[RecordEvent, ...]:
    """Returns the events about changes of an active epoch.

    Args:
        stuck: pods whose containers could not be created for the first time now.
        replaceable: pods that never ran and that the operator replaces now.
    """
    epoch_name = describe_epoch(after)
    if after.phase is GroupPhase.READY and before.phase is not GroupPhase.READY:
        return (RecordEvent(reason="GroupReady", message=f"{epoch_name} serves"),)
    reported = [
        RecordEvent(
            reason="PodReplaced",
            message=f"{epoch_name}: {startup.describe_end(pod)}; the operator replaces it"[:1000],
            warning=True,
        )
        for pod in replaceable
        if not pod.deleting  # a requested deletion needs no warning
    ]
    if stuck:
        waits = "; ".join(map(startup.describe_wait, stuck))
        reported.append(RecordEvent(reason="PodWaits", message=f"{epoch_name}: {waits}"[:1000], warning=True))
    return tuple(reported)


def _wake_message(pods: Sequence[PodView]) -> str:
    """Returns the message of a sleeping group, with the request that wakes it."""
    leader = min(pods, key=index_of)
    request = f"send POST /wake_up to the API of pod {leader.name} (kubectl port-forward)"
    return f"asleep. To wake the group, {request}"


def _describe_limit_range_defaults(pods: Sequence[PodView]) -> str:
    """Describes the resources that a LimitRange added to the pods of each role, or ""."""
    defaults_by_role = {pod.labels.get(names.LABEL_ROLE, ""): pod.defaulted for pod in pods if pod.defaulted}
    return "; ".join(
        f"role {role}: a LimitRange of the namespace gave its pods {values}. The plan does not count these "
        "values. Set roles[].resources"
        for role, values in sorted(defaults_by_role.items())
    )[:MAX_TEXT]


def _describe_unplaced(pods: Sequence[PodView]) -> str:
    """Describes the first pod for which a scheduler reports no node, and the reason; otherwise ""."""
    for pod in pods:
        if pod.unschedulable:
            return f"pod {pod.name} is not placed: {pod.unschedulable}"[:MAX_TEXT]
    return ""
