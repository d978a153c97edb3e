"""Decides what to do with one group. Pure.

From its first run on, every pod must stay for its epoch to continue. If the operator sees a pod end before
the pod ran, or vanish without a node, it replaces that pod alone while the others wait; under Kueue it ends
the whole epoch. A pod that disappeared unseen may have run, and may still run on an unreachable node, so its
name is not used again.

A running epoch continues without the spec and without its plan: the operator stores the revision that the
epoch was created with, and the labels of the pods identify it.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.manifests.identity import find_place
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.one_group.between_epochs import decide_between_epochs, next_revision
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.ends import find_epoch_end, find_overdue, pod_missing
from heteroinfer_operator.reconcile.one_group.living import decide_living
from heteroinfer_operator.reconcile.one_group.made import BegunEpoch, Made, had_run
from heteroinfer_operator.reconcile.one_group.stopping import (
    ENDED_EPOCH_GRACE_S,
    end_epoch,
    give_back,
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
    """Decides the changes that a group needs.

    Args:
        status: its `epoch` is 0 before the first epoch.
        pods: the group's pods of all epochs.
        may_replace: whether the rollout may replace a group of an old revision now.
        starts_after: index of a group that must have its pods first.
    """
    number = max([status.epoch, *(epoch_of(pod) for pod in pods)])
    is_forgotten = status.epoch < number
    current = [pod for pod in pods if epoch_of(pod) == number]
    status = transitions.seen_in_epoch(status, number)
    if context.life.suspend:
        return stop_group(context, status, pods, "suspended: set spec.suspend to false to start")
    made = Made.of(context, status, current)
    unmade = _find_begun(context, status, context.unmade)
    status = transitions.with_spare(
        status, made.missing(current) & _find_begun(context, status, context.never_placed)
    )
    # Without pods, members that never ran prove an epoch only if its plan or revision is still stored.
    has_members = had_run(status) or (status.members and made.is_known)
    if not current and not has_members and not (unmade and _can_still_start(context, status, made)):
        return decide_between_epochs(context, _not_begun(context, status), pods, starts_after)
    if is_forgotten:
        status = transitions.made_with(status, revision=made.revision_name, plan_hash=made.plan_hash)
    if may_replace and current and made.revision_name != context.target.name:
        return replace_group(context, status, pods)
    if report is not None and (report.epoch != number or (made.plan and not report.covers(made.plan))):
        report = None
    epoch = BegunEpoch(context=context, status=status, pods=current, made=made)
    epoch_end = find_epoch_end(epoch)
    if epoch_end is not None:
        return end_epoch(context, status, pods, epoch_end)
    if lacking := sorted(epoch.missing - set(status.spare_pods) - unmade):
        return _end_incomplete(epoch, pods, lacking[0])
    living = _without_older(context, decide_living(epoch, report), pods)
    overdue = find_overdue(epoch, living.status.startup, report)
    return living if overdue is None else end_epoch(context, status, pods, overdue)


def _find_begun(context: Context, status: GroupStatus, pods: Collection[str]) -> set[int]:
    """Indices of the named pods in the begun epoch of a group."""
    if status.epoch_start_time is None or not pods:
        return set()
    places = (find_place(context.owner, name) for name in pods)
    return {place[2] for place in places if place is not None and place[:2] == (status.index, status.epoch)}


def _not_begun(context: Context, status: GroupStatus) -> GroupStatus:
    """Marks the epoch as not begun if its first pod was never requested.

    The operator requests the other pods only after it has created the first.
    """
    first = context.epoch_ref(status).pod_name(0)
    return transitions.not_begun(status) if first in context.unasked else status


def _can_still_start(context: Context, status: GroupStatus, made: Made) -> bool:
    """Checks whether an epoch without any pod so far can still start with its revision and plan."""
    has_all = made.plan is not None and made.revision is not None and context.refusal_of(status.index) is None
    return has_all and made.revision_name == next_revision(context, status)


def _end_incomplete(epoch: BegunEpoch, pods: Sequence[PodView], index: int) -> GroupDecision:
    """Ends an epoch that lacks a pod if the pod was, or may have been, created."""
    context, status = epoch.context, epoch.status
    refusal = context.pod_refusal_of(status.index)
    if refusal is not None:
        return give_back(context, status, epoch.pods, refusal)
    return end_epoch(context, status, pods, pod_missing(epoch, index))


def _without_older(context: Context, living: GroupDecision, pods: Sequence[PodView]) -> GroupDecision:
    """Adds the deletion of pods of older epochs that appeared only after the end of their epoch."""
    older = [pod for pod in pods if epoch_of(pod) < living.status.epoch]
    deletes = context.node_loss.deletes(older, grace_s=ENDED_EPOCH_GRACE_S)
    return replace(living, deletes=(*living.deletes, *deletes))
