"""Decides for a group without an active epoch whether it waits or starts. Pure.

While the spec is refused, the next epoch uses the revision of the last epoch.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus, StartupPhase
from heteroinfer_operator.api.status import next_epoch
from heteroinfer_operator.cluster import PodView, Refusal
from heteroinfer_operator.errors import PlanError, SpecError
from heteroinfer_operator.manifests.group_key_secret import KIND as SECRET
from heteroinfer_operator.manifests.identity import EpochRef
from heteroinfer_operator.planning import EpochPlan
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import restarts, startup, transitions
from heteroinfer_operator.reconcile.epoch_pods import (
    build_epoch_gang_object,
    build_key_create,
    build_pod_creates,
    build_start_events,
)
from heteroinfer_operator.reconcile.group_planner import WAITING_FOR_MODEL
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.ends import end_because_never_seen
from heteroinfer_operator.reconcile.one_group.stopping import (
    attribute_loss_to_node,
    continue_stopping,
    end_epoch,
    status_of_refused_group,
)
from heteroinfer_operator.reconcile.reconcile_context import POD, Context
from heteroinfer_operator.reconcile.revisions import Revision

_TURN_EVERY_S: Final = 1.0
"""Seconds between checks of a group that waits for the start of another group."""
_NOT_ANSWERED: Final = "waiting for the API server to validate the new revision (dry run)"


def decide_between_epochs(
    context: Context, status: GroupStatus, pods: Sequence[PodView], starts_after: int | None
) -> GroupDecision:
    """Returns the decision about a group without an active epoch: a wait or a start.

    The checks are in this order: old pods or used-up restarts, an epoch whose pods never appeared, the wait
    after a failure, the refusal of a pod, and the validation of a new revision.

    Args:
        starts_after: index of a group that must have its pods first, or None.
    """
    revision_name = next_revision_name(context, status)
    must_wait_for_dry_run = _must_wait_for_dry_run(context, status, revision_name)
    # An unvalidated revision does not clear failures: if it is refused, the group keeps its old revision.
    if revision_name is not None and status.revision != revision_name and not must_wait_for_dry_run:
        status = transitions.without_failures(status)
    status, events = attribute_loss_to_node(context, status, pods)
    if pods or restarts.used_up(status.failures, context.life.restart):
        return continue_stopping(context, status, pods, events)
    # The operator has requested the epoch's pods, and no object was refused, but no pod exists.
    if status.epoch_start_time is not None and context.refusal_of(status.index) is None:
        return end_epoch(context, status, pods, end_because_never_seen(status.epoch))
    if status.next_epoch_time is not None and status.next_epoch_time > context.now:
        # The wait is at most backoffMax, even if the clock was set back or the user has lowered backoffMax.
        max_wait = timedelta(seconds=parse_duration_s(context.life.restart.backoff_max))
        until = min(status.next_epoch_time, context.now + max_wait)
        wait_s = (until - context.now).total_seconds()
        return GroupDecision(status=transitions.waiting(status, until=until), look_again_s=wait_s)
    refusal, wait_s = _find_pod_refusal(context, status, starts_after)
    if refusal is not None:
        # The status may show that the epoch has begun, because the operator writes the status before the API
        # server refuses the pods.
        had_epoch = status.epoch_start_time is not None
        return GroupDecision(
            status=status_of_refused_group(context, status, refusal, had_epoch=had_epoch), look_again_s=wait_s
        )
    if must_wait_for_dry_run:
        message = _NOT_ANSWERED if context.admission.is_unanswered else status.message
        return GroupDecision(status=transitions.pending(status, message=message))
    return _start_epoch(context, status)


def _find_pod_refusal(
    context: Context, status: GroupStatus, starts_after: int | None
) -> tuple[Refusal | None, float]:
    """Returns the refusal of a pod for which a group must wait, and the wait in seconds.

    After a refusal of the group's own pod, the group waits until the next try. After a refusal of another
    group's pod, groups start one at a time, and this group waits for the pods of group `starts_after`.
    Returns None instead of a refusal if the group may start.

    Args:
        starts_after: index of a group that must have its pods first, or None.
    """
    own_refusal = context.pod_refusal_of(status.index)
    if own_refusal is not None and own_refusal.retry_at > context.now:
        return own_refusal, (own_refusal.retry_at - context.now).total_seconds()
    if starts_after is None or context.refused_worker is None:
        return None, 0.0
    # The message names this group's own refusal, even if its retry is due now.
    group, refusal = context.refused_worker if own_refusal is None else (status.index, own_refusal)
    message = (
        f"the API server refused a pod of group {group}, so the operator starts the groups one at a time: "
        f"this group starts after group {starts_after} has its pods. The refusal: {refusal.message}"
    )
    return replace(refusal, message=message), _TURN_EVERY_S


def next_revision_name(context: Context, status: GroupStatus) -> str | None:
    """Returns the name of the revision of a group's next epoch; None if no revision can start now."""
    last = _last_revision_and_plan(context, status)
    if last is not None and _keeps_last_revision(context, status):
        last_revision, _ = last
        return last_revision.name
    return context.target.name if context.problem is None else None


def _must_wait_for_dry_run(context: Context, status: GroupStatus, revision: str | None) -> bool:
    """Reports whether a group's next epoch must wait for the API server's dry run of the target revision.

    Until the first dry run has ended, every group waits. If that dry run got no answer, a group that keeps
    its revision starts, and only a group that would change to the target revision waits.

    Args:
        revision: name of the next epoch's revision, or None.
    """
    if not context.waits_for_admission:
        return False
    return not context.admission.is_unanswered or status.revision != revision


def _keeps_last_revision(context: Context, status: GroupStatus) -> bool:
    """Reports whether a group's next epoch keeps the group's last revision instead of the target revision.

    The target is the revision of the current spec. A group keeps an older revision if the target cannot
    start, has failed, or has no answer of the API server yet. A group that already has the target keeps it
    even if the target cannot start now, with one exception: while the model is inspected again, the group
    waits, because a change of the model may have ended the group.
    """
    has_target = status.revision == context.target.name
    if context.problem is None:
        is_target_uncertain = context.target_failed or context.admission.is_unanswered
        return is_target_uncertain and not has_target
    is_model_inspected = context.problem.reason == WAITING_FOR_MODEL
    return not has_target or not is_model_inspected


def _last_revision_and_plan(context: Context, status: GroupStatus) -> tuple[Revision, Plan] | None:
    """Returns the revision and plan that a group last used; None unless both are still stored."""
    revision = context.revisions.get(status.revision or "")
    plan = context.plans.get(status.plan_hash or "")
    return (revision, plan) if revision is not None and plan is not None else None


def _plan_epoch(context: Context, status: GroupStatus) -> tuple[Revision, EpochPlan, str]:
    """Chooses revision and plan of the next epoch: of the current spec, or of the group's last epoch.

    Returns:
        The revision, the plan, and the hash under which the plan is stored.

    Raises:
        HeteroInferError: the spec cannot start now, and the group does not keep its last revision.
    """
    last = _last_revision_and_plan(context, status)
    if last is None or not _keeps_last_revision(context, status):
        if context.problem is not None:
            raise context.problem
        planned = context.planner.make(status.index)
        assert context.target.name is not None  # an unreadable spec is a `context.problem`, raised above
        target = context.revisions[context.target.name].with_mode(context.planner.chosen)
        return target, planned, planned.plan.hash
    revision, plan = last
    spec = revision.spec_of_pods(context.options.pod_resources)
    planned = context.planner.make_again(status.index, spec, plan)
    return revision, planned, status.plan_hash or plan.hash


def _choose_epoch_number(context: Context, status: GroupStatus, *, waits_for_refusal: bool) -> int:
    """Returns the number of a group's next epoch.

    Args:
        waits_for_refusal: whether the epoch waits because an object was refused.
    """
    # If the last epoch has begun, pods that the operator never saw may have run. So a new epoch needs a new
    # number.
    number = status.epoch if status.epoch_start_time is None else next_epoch(status.epoch)
    # The objects that pods need carry the epoch's number too, so it stays until the first pod is requested.
    first_pod = EpochRef(owner=context.owner, index=status.index, epoch=number).pod_name(0)
    is_unrequested = waits_for_refusal or first_pod in context.never_requested
    if number > 0 and is_unrequested:
        return number
    # A lost status may have had any number below `first_epoch`.
    return max(number, context.first_epoch)


def _start_epoch(context: Context, status: GroupStatus) -> GroupDecision:
    """Returns the decision that starts the next epoch; without a plan, the reason why the group waits.

    If the API server refused an object that the pods need, the epoch begins later and keeps its number.
    """
    try:
        revision, planned, plan_hash = _plan_epoch(context, status)
    except (PlanError, SpecError) as problem:
        phase = StartupPhase.MODEL if problem.reason == WAITING_FOR_MODEL else StartupPhase.SCHEDULING
        waiting = startup.begin_phase(phase, status.startup, context.now)
        return GroupDecision(
            status=transitions.not_planned(status, message=problem.message, startup=waiting), refusal=problem
        )
    plan, refusal = planned.plan, context.refusal_of(status.index)
    # An epoch begins when the operator requests its first pod. So the epoch does not begin while an object
    # that pods need is refused, or before the next attempt at a refused pod.
    waits_for_refusal = refusal is not None and (refusal.kind != POD or refusal.retry_at > context.now)
    status = transitions.starting(
        status,
        epoch=_choose_epoch_number(context, status, waits_for_refusal=waits_for_refusal),
        revision=revision.name,
        plan_hash=plan_hash,
        refusal=None if refusal is None else refusal.message,
        message=f"creating {len(plan.pods)} pods",
        begun_at=None if waits_for_refusal else context.now,
        startup=startup.begin_phase(StartupPhase.SCHEDULING, status.startup, context.now),
    )
    pods_to_create = set() if waits_for_refusal else {pod.index for pod in plan.pods}
    # `build_pod_creates` creates the Secret only together with pods, so a refused Secret is tried again here.
    waits_for_key = waits_for_refusal and refusal is not None and refusal.kind == SECRET
    return GroupDecision(
        status=status,
        key_creates=build_key_create(context, status) if waits_for_key else (),
        creates=build_pod_creates(context, revision, status, plan, pods_to_create, planned.node_assignment),
        events=build_start_events(status, planned) if refusal is None else (),
        runs=True,
        plan=plan,
        new_plan=plan if plan_hash == plan.hash else None,  # None: another version has stored this plan
        notes=planned.notes if planned.choice is None else (*planned.notes, str(planned.choice)),
        unplaced=planned.missing,
        gang_object=build_epoch_gang_object(context, revision, status, plan, planned.node_assignment.gang),
    )
