"""Decides for a group with an active epoch: phase, pods to replace, messages and events. Pure."""

from collections.abc import Sequence

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankPhase
from heteroinfer_operator.api import GroupPhase, GroupStatus
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.cluster import CreateObject, Manifest, PodView, RecordEvent
from heteroinfer_operator.reconcile import startup, transitions
from heteroinfer_operator.reconcile.epoch_pods import decide_creates, decide_key, gang_object, name_epoch
from heteroinfer_operator.reconcile.group_planner import gang_of
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.made import BegunEpoch
from heteroinfer_operator.reconcile.reading import index_of


def decide_living(epoch: BegunEpoch, report: GroupReport | None) -> GroupDecision:
    """Decides the changes that a group with an active epoch needs."""
    context, before, current, made = epoch.context, epoch.status, epoch.pods, epoch.made
    missing, spare = epoch.missing, epoch.spare
    ready = not missing and all(pod.ready and not pod.ended for pod in current)
    asleep = not ready and not missing and _is_asleep(before, report)
    start = None
    if not ready and not asleep:
        start = startup.observe_startup(before.startup, current, report, whole=not missing, now=context.now)
    silent = context.node_loss.blocked_message(current)
    message = silent or (_how_to_wake(current) if asleep else None)
    if start is not None:
        message = (
            _describe_unplaced_pods(current)
            or silent
            or startup.describe(start, current, report, len(made.pods))
        )
    over = {index_of(pod) for pod in current if startup.is_over_unrun(pod)}
    # The operator creates the next pod of this name only after it has seen that the name is free.
    counted = over & set(before.rejected_pods)
    rejected = {index_of(pod) for pod in spare if startup.is_rejected(pod)} - counted
    stuck = startup.find_stuck(current, before.stuck_pods)
    status = transitions.living(
        before,
        phase=GroupPhase.READY if ready else GroupPhase.SLEEPING if asleep else GroupPhase.STARTING,
        message=message,
        revision=made.revision_name,
        plan_hash=made.plan_hash,
        startup=start,
        whole=not missing,
        now=context.now,
        # Only this process knows which pods were never created. The next process could not know it.
        spare_pods=over | (missing & set(before.spare_pods)),
        rejected_pods=counted | rejected,
        newly_rejected=len(rejected),
        stuck_pods=stuck,
    )
    creates, gang = _missing_pods(epoch, status)
    waits = [
        context.node_loss.look_again_s(current),
        startup.look_again_s(start, current, context.now, replace_after_s=epoch.replace_after_s),
    ]
    newly_stuck = [pod for index, pod in stuck.items() if index not in before.stuck_pods]
    return GroupDecision(
        status=status,
        deletes=context.node_loss.deletes(spare, grace_s=0, after_status=True),
        keys=decide_key(context, status) if any(map(startup.lacks_configuration, current)) else (),
        creates=creates,
        events=_events(before, status, newly_stuck, spare),
        runs=True,
        plan=made.plan,
        unplaced=_describe_unplaced_pods(current),
        defaulted=_describe_default_resources(current),
        gang_object=gang,
        look_again_s=min((wait for wait in waits if wait is not None), default=None),
    )


def _missing_pods(epoch: BegunEpoch, status: GroupStatus) -> tuple[tuple[CreateObject, ...], Manifest | None]:
    """Creates the missing pods, and the object that describes the epoch to a gang scheduler."""
    context, made = epoch.context, epoch.made
    if made.plan is None or made.revision is None:
        return (), None
    gang = gang_object(context, made.revision, status, made.plan, gang_of(epoch.pods))
    if not epoch.missing:
        return (), gang
    assigned = context.planner.node_assignment_again(made.revision.spec, made.plan, epoch.pods)
    return decide_creates(context, made.revision, status, made.plan, epoch.missing, assigned), gang


def _is_asleep(status: GroupStatus, report: GroupReport | None) -> bool:
    if report is None:
        # The leader may miss one answer. Its last report holds as long as no pod ends.
        return status.phase is GroupPhase.SLEEPING
    return any(rank.phase is RankPhase.SLEEPING for rank in report.ranks)


def _events(
    before: GroupStatus, after: GroupStatus, stuck: Sequence[PodView], spare: Sequence[PodView]
) -> tuple[RecordEvent, ...]:
    who = name_epoch(after)
    if after.phase is GroupPhase.READY and before.phase is not GroupPhase.READY:
        return (RecordEvent(reason="GroupReady", message=f"{who} serves"),)
    reported = [
        RecordEvent(
            reason="PodReplaced",
            message=f"{who}: {startup.describe_end(pod)}; the operator replaces it"[:1000],
            warning=True,
        )
        for pod in spare
        if not pod.deleting
    ]
    if stuck:
        trouble = "; ".join(map(startup.describe_wait, stuck))
        reported.append(RecordEvent(reason="PodWaits", message=f"{who}: {trouble}"[:1000], warning=True))
    return tuple(reported)


def _how_to_wake(pods: Sequence[PodView]) -> str:
    leader = min(pods, key=index_of)
    return f"asleep. To wake it, send POST /wake_up to the API of pod {leader.name} (kubectl port-forward)"


def _describe_default_resources(pods: Sequence[PodView]) -> str:
    """Describes the resources that a LimitRange gave the pods of each role, or ""."""
    given = {pod.labels.get(names.LABEL_ROLE, ""): pod.defaulted for pod in pods if pod.defaulted}
    return "; ".join(
        f"role {role}: a LimitRange of the namespace gave its pods {values}. The plan does not count this. "
        "Set resources of the role"
        for role, values in sorted(given.items())
    )[:MAX_TEXT]


def _describe_unplaced_pods(pods: Sequence[PodView]) -> str:
    return next(
        (
            f"pod {pod.name} is not placed: {pod.unschedulable}"[:MAX_TEXT]
            for pod in pods
            if pod.unschedulable
        ),
        "",
    )
