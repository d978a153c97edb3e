"""Decides what to do with one group. Pure.

Once a pod has run, its end is also the end of its epoch. If the operator sees a pod end before the pod ran,
or vanish before the pod had a node, the operator replaces only this pod, and the other pods wait. (Under
Kueue, the whole epoch ends.) A pod that disappeared unseen may have run, and may still run on an unreachable
node. So its name is not used again, and the epoch ends.

A running epoch continues without the spec and without its plan: the operator stores the revision that the
epoch was created with, and the labels of the pods identify it.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.manifests.identity import parse_worker_name
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.one_group.between_epochs import decide_between_epochs, next_revision_name
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.ends import (
    end_because_pod_missing,
    find_epoch_end,
    find_late_ranks,
)
from heteroinfer_operator.reconcile.one_group.living import decide_living
from heteroinfer_operator.reconcile.one_group.made import BegunEpoch, EpochOrigin, names_of_run_pods
from heteroinfer_operator.reconcile.one_group.stopping import (
    ENDED_EPOCH_GRACE_S,
    end_epoch,
    free_resources_of_pods,
    replace_group,
    stop_group,
)
from heteroinfer_operator.reconcile.reading import epoch_of
from heteroinfer_operator.reconcile.reconcile_context import Context


def decide_group(
    context: Context,
    status: GroupStatus,
    pods: Sequence[PodView],
    *,
    may_replace: bool,
    report: GroupReport | None = None,
    starts_after: int | None = None,
) -> GroupDecision:
    """Decides the changes that a group needs now: stop, wait, start, replace, end its epoch, or continue.

    Args:
        status: last status of the group; its `epoch` is 0 before the first epoch.
        pods: the group's pods of all epochs.
        may_replace: whether the rollout may replace a group of an old revision now.
        starts_after: index of a group that must have its pods first.
    """
    epoch_number = max([status.epoch, *(epoch_of(pod) for pod in pods)])
    is_status_outdated = status.epoch < epoch_number
    current = [pod for pod in pods if epoch_of(pod) == epoch_number]
    status = transitions.seen_in_epoch(status, epoch_number)
    if context.life.suspend:
        return stop_group(context, status, pods, "suspended: set spec.suspend to false to start")
    origin = EpochOrigin.from_pods(context, status, current)
    never_created = _indices_in_begun_epoch(context, status, context.never_created)
    # A pod that was deleted before it had a node never ran, so a new pod may take its name.
    never_placed = _indices_in_begun_epoch(context, status, context.never_placed)
    status = transitions.with_spare_pods(status, origin.missing_indices(current) & never_placed)
    if not (current or _has_epoch_without_pods(context, status, origin, never_created)):
        return decide_between_epochs(context, _without_unrequested_epoch(context, status), pods, starts_after)
    if is_status_outdated:  # then the status has the revision and plan of an older epoch
        status = transitions.with_revision_and_plan(
            status, revision=origin.revision_name, plan_hash=origin.plan_hash
        )
    if may_replace and current and origin.revision_name != context.target.name:
        return replace_group(context, status, pods)
    if report is not None and not _is_report_of_epoch(report, epoch_number, origin):
        report = None
    epoch = BegunEpoch(context=context, status=status, pods=current, origin=origin)
    epoch_end = find_epoch_end(epoch)
    if epoch_end is not None:
        return end_epoch(context, status, pods, epoch_end)
    if missing := sorted(epoch.missing - set(status.spare_pods) - never_created):
        return _end_because_pod_missing(epoch, pods, missing[0])
    running = _with_deletes_of_older_pods(context, decide_living(epoch, report), pods)
    # This check needs the new startup phase, so it comes after `decide_living`.
    timed_out = find_late_ranks(epoch, running.status.startup, report)
    return running if timed_out is None else end_epoch(context, status, pods, timed_out)


def _has_epoch_without_pods(
    context: Context, status: GroupStatus, origin: EpochOrigin, never_created: Collection[int]
) -> bool:
    """Reports whether a group without pods has an epoch that must end, or that can still start.

    Args:
        never_created: indices of the epoch's pods that the operator wanted to create.
    """
    have_pods_run = bool(names_of_run_pods(status))
    # Entries of pods that never ran prove an epoch only if its plan or revision is stored.
    had_pods = bool(status.members) and origin.knows_pod_count
    return have_pods_run or had_pods or (bool(never_created) and _can_still_start(context, status, origin))


def _is_report_of_epoch(report: GroupReport, epoch: int, origin: EpochOrigin) -> bool:
    """Reports whether a leader's report is about this epoch and its plan."""
    covers_plan = origin.plan is None or report.covers(origin.plan)
    return report.epoch == epoch and covers_plan


def _indices_in_begun_epoch(context: Context, status: GroupStatus, pods: Collection[str]) -> set[int]:
    """Returns the indices of the named pods in the group's begun epoch."""
    if status.epoch_start_time is None or not pods:
        return set()
    indices = set()
    for name in pods:
        parsed_name = parse_worker_name(context.owner, name)
        if parsed_name is not None:
            group, epoch, pod_index = parsed_name
            if (group, epoch) == (status.index, status.epoch):
                indices.add(pod_index)
    return indices


def _without_unrequested_epoch(context: Context, status: GroupStatus) -> GroupStatus:
    """Marks the epoch as not begun if the operator never requested its first pod.

    In this case the operator requested no other pod either, because it creates the first pod before all
    other pods.
    """
    first_pod = context.epoch_ref(status).pod_name(0)
    return transitions.without_start_time(status) if first_pod in context.never_requested else status


def _can_still_start(context: Context, status: GroupStatus, origin: EpochOrigin) -> bool:
    """Reports whether an epoch without any pod so far can still start with its revision and plan.

    Both must be stored, no refusal may delay the pods, and the next epoch must not need another revision.
    """
    is_stored = origin.plan is not None and origin.revision is not None
    is_refused = context.refusal_of(status.index) is not None
    return is_stored and not is_refused and origin.revision_name == next_revision_name(context, status)


def _end_because_pod_missing(epoch: BegunEpoch, pods: Sequence[PodView], index: int) -> GroupDecision:
    """Returns the decision that ends an epoch in which a pod is missing that may have been created.

    If the API server refuses a pod of the group, the other pods give up their resources until the next
    attempt.
    """
    context, status = epoch.context, epoch.status
    refusal = context.pod_refusal_of(status.index)
    if refusal is not None:
        return free_resources_of_pods(context, status, epoch.pods, refusal)
    return end_epoch(context, status, pods, end_because_pod_missing(epoch, index))


def _with_deletes_of_older_pods(
    context: Context, running: GroupDecision, pods: Sequence[PodView]
) -> GroupDecision:
    """Adds deletes of pods of older epochs, which appeared only after the end of their epochs."""
    older = [pod for pod in pods if epoch_of(pod) < running.status.epoch]
    deletes = context.node_loss.build_deletes(older, grace_s=ENDED_EPOCH_GRACE_S)
    return replace(running, deletes=(*running.deletes, *deletes))
