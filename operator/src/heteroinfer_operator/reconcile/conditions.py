"""The conditions of a resource. The first check with an answer decides each condition. Pure.

A check returns None if it does not decide its condition.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from heteroinfer_operator.api import (
    Condition,
    ConditionType,
    GroupPhase,
    GroupStatus,
    StartupPhase,
)
from heteroinfer_operator.errors import PlanReason, Shortage
from heteroinfer_operator.reconcile.group_planner import UNSCHEDULABLE, WAITING_FOR_MODEL
from heteroinfer_operator.reconcile.life import ConditionFacts
from heteroinfer_operator.reconcile.lost_labels import REASON as LOST_LABEL
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.scopes import CLIENTS_SCOPE
from heteroinfer_operator.reconcile.silent_leaders import REASON as LEADER_SILENT

_RESTARTS_USED_UP: Final = "RestartsUsedUp"
_ROLLING_OUT: Final = "RollingOut"
_ROLLOUT_STUCK: Final = "RolloutStuck"
_BETWEEN_EPOCHS: Final = "BetweenEpochs"
ENDING: Final = "pods finish their running requests, then end"
HELD_BY_FINALIZER: Final = "HeldByFinalizer"
"""Reason of Progressing if another controller's finalizer blocks a pod that is being deleted."""


class ConditionAnswer(NamedTuple):
    """Answer of a check for its condition. The status is Unknown if `holds` is None."""

    holds: bool | None
    reason: str
    message: str = ""


ConditionCheck = Callable[[ConditionFacts], ConditionAnswer | None]


def build_life_conditions(facts: ConditionFacts) -> tuple[Condition, ...]:
    """Builds the conditions Available, Ready, Stalled, Progressing, Degraded and Failed."""
    return tuple(facts.build(kind, *_answer(checks, facts)) for kind, checks in CHECKS.items())


def _answer(checks: Sequence[ConditionCheck], facts: ConditionFacts) -> ConditionAnswer:
    """Returns the first answer. The last check of each condition always answers."""
    return next(answer for check in checks if (answer := check(facts)) is not None)


# Available


def no_group_wanted(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if the resource is suspended or scaled to zero; otherwise returns None."""
    return ConditionAnswer(False, facts.why_no_group) if facts.why_no_group else None


def no_client_reaches_groups(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if groups serve but clients reach no group; otherwise returns None."""
    if facts.unreachable is None or not (facts.serving or facts.kept):
        return None
    return ConditionAnswer(False, facts.unreachable.reason, facts.unreachable.message)


def some_group_serves(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True if a wanted group or the kept group serves; otherwise returns None.

    The kept group is no longer wanted, and serves until a wanted group serves.
    """
    if facts.kept is not None and not facts.serving:
        return ConditionAnswer(True, "Serving", f"group {facts.kept.index}: {facts.kept.message}")
    return ConditionAnswer(True, "Serving", facts.serving_count) if facts.serving else None


def serving_group_lost_labels(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if pods of a group that would serve have lost labels; otherwise returns None."""
    return (
        ConditionAnswer(False, LOST_LABEL, facts.lost_labels_message) if facts.lost_labels_message else None
    )


def leader_does_not_answer(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers Unknown if the operator cannot reach the leader of a Ready group; otherwise returns None."""
    return ConditionAnswer(None, LEADER_SILENT, facts.silent_leader) if facts.silent_leader else None


def worst_group_down(facts: ConditionFacts) -> ConditionAnswer:
    """Answers False with the reason and message of the group that needs attention most."""
    return ConditionAnswer(False, _down_reason(facts.worst), facts.worst_message)


# Ready


def ready_if_no_pod_left(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers whether all pods are gone if no group is wanted; returns None if a group is wanted."""
    if not facts.why_no_group:
        return None
    return ConditionAnswer(
        not facts.draining, "Stopping" if facts.draining else facts.why_no_group, _why_pods_remain(facts)
    )


def all_serve_spec(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True if all groups serve this spec and clients reach them; otherwise returns None.

    If clients cannot reach the spec's port, the answer is False. If a leader does not answer the operator,
    the answer is Unknown. If a pod has lost labels, this check returns None, so that the next check
    (`stalled_but_none_failed`) reports the pod.
    """
    if not facts.serves_spec or facts.lost_labels_message:
        return None
    if facts.port_unreachable is not None:
        return ConditionAnswer(False, facts.port_unreachable.reason, facts.port_unreachable.message)
    return leader_does_not_answer(facts) or ConditionAnswer(True, "Serving", facts.serving_count)


def stalled_but_none_failed(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if the user must act and no group has failed; otherwise returns None.

    `a_group_is_down` reports a group that has failed.
    """
    stall = _find_stall(facts)
    if stall is None or facts.worst.phase is GroupPhase.FAILED:
        return None
    return ConditionAnswer(False, stall.reason, stall.message)


def object_refused(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if a group waits for an object that the API server refused; otherwise returns None.

    A group waits if too few groups serve and the worst group is Pending. No group waits for the clients'
    Service (CLIENTS_SCOPE), so a refusal of this Service is ignored. The group also does not wait for an
    object that exists and that others change (`blocks` is False).
    """
    if len(facts.serving) >= facts.wanted or facts.worst.phase is not GroupPhase.PENDING:
        return None
    refused = next((refusal for refusal in facts.refusals if refusal.scopes - {CLIENTS_SCOPE}), None)
    if refused is None or not refused.blocks:
        return None
    return ConditionAnswer(False, refused.reason, refused.message)


def a_group_is_down(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False with the reason if a wanted group does not serve; otherwise returns None."""
    return worst_group_down(facts) if len(facts.serving) < facts.wanted else None


def rolling_out(facts: ConditionFacts) -> ConditionAnswer:
    """Answers False, because all groups serve but some groups have an older revision."""
    if facts.rollout is None:
        return ConditionAnswer(False, _ROLLING_OUT, facts.serving_count)
    reason = _ROLLOUT_STUCK if facts.rollout.stuck else _ROLLING_OUT
    return ConditionAnswer(False, reason, facts.rollout.message)


# Stalled


def answer_if_no_group_is_wanted(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers for a resource that is suspended or scaled to zero; returns None if a group is wanted.

    If the spec has a problem, the answer is the first reason why the user must act. Without such a reason,
    the answer is False with the reason why no group is wanted.
    """
    if not facts.why_no_group:
        return None
    stall = _find_stall(facts) if facts.problem is not None else None
    return stall if stall is not None else ConditionAnswer(False, facts.why_no_group)


def group_failed(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True with its message if a group has used up its restarts; otherwise returns None."""
    failed = next((group for group in facts.groups if group.phase is GroupPhase.FAILED), None)
    if failed is None:
        return None
    return ConditionAnswer(True, _RESTARTS_USED_UP, f"group {failed.index}: {failed.message}")


def spec_cannot_start(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True if the spec has a problem and a group does not serve it yet; otherwise returns None."""
    problem = facts.problem
    if problem is None or problem.reason == WAITING_FOR_MODEL or facts.serves_spec:
        return None
    return ConditionAnswer(True, problem.reason, problem.message)


def labels_must_be_restored(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True if pods have lost labels; otherwise returns None.

    The operator has no right to restore labels, so the user must.
    """
    return ConditionAnswer(True, LOST_LABEL, facts.lost_labels_message) if facts.lost_labels_message else None


def not_stalled(facts: ConditionFacts) -> ConditionAnswer:
    """Answers False, because no action of the user is needed."""
    return ConditionAnswer(False, "NotStalled")


# Progressing


def pods_end(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers whether pods still end if no group is wanted; returns None if a group is wanted."""
    if not facts.why_no_group:
        return None
    return ConditionAnswer(facts.draining, facts.why_no_group, _why_pods_remain(facts))


def any_object_refused(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if the API server refused an object that the resource needs; otherwise returns None."""
    if not facts.refusals:
        return None
    refusal = facts.refusals[0]
    return ConditionAnswer(False, refusal.reason, refusal.message)


def pod_blocked(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if a finalizer blocks a pod that is being deleted; otherwise returns None."""
    return ConditionAnswer(False, HELD_BY_FINALIZER, facts.blocked_pod) if facts.blocked_pod else None


def rollout_stuck(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers False if a rollout cannot continue until the user acts; otherwise returns None."""
    if facts.rollout is None or not facts.rollout.stuck:
        return None
    return ConditionAnswer(False, _ROLLOUT_STUCK, facts.rollout.message)


def group_starts_or_stops(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True with the reason if a group starts or stops; otherwise returns None."""
    lasting_phases = {GroupPhase.READY, GroupPhase.FAILED, GroupPhase.SLEEPING}
    if all(group.phase in lasting_phases for group in facts.groups):
        return None
    return ConditionAnswer(True, _phase_reason(facts.worst), facts.worst_message)


def rollout_in_progress(facts: ConditionFacts) -> ConditionAnswer | None:
    """Answers True if a rollout is in progress; otherwise returns None."""
    return None if facts.rollout is None else ConditionAnswer(True, _ROLLING_OUT, facts.rollout.message)


def no_change(facts: ConditionFacts) -> ConditionAnswer:
    """Answers False, because no change is in progress."""
    return ConditionAnswer(False, "Settled")


# Degraded and Failed


def only_some_serve(facts: ConditionFacts) -> ConditionAnswer:
    """Answers True if some of the wanted groups serve and others do not, otherwise False."""
    reason = LEADER_SILENT if facts.silent_leader else facts.worst.phase.value
    return ConditionAnswer(
        0 < len(facts.serving) < facts.wanted, reason, facts.silent_leader or facts.worst_message
    )


def restarts_used_up(facts: ConditionFacts) -> ConditionAnswer:
    """Answers True if a group has used up its restarts, otherwise False."""
    failed = any(group.phase is GroupPhase.FAILED for group in facts.groups)
    if not failed:
        return ConditionAnswer(False, "NotFailed")
    return ConditionAnswer(True, _RESTARTS_USED_UP, facts.worst_message)


_STALLS: Final[tuple[ConditionCheck, ...]] = (group_failed, spec_cannot_start, labels_must_be_restored)
CHECKS: Final[Mapping[ConditionType, tuple[ConditionCheck, ...]]] = MappingProxyType(
    {
        ConditionType.AVAILABLE: (
            no_group_wanted,
            no_client_reaches_groups,
            some_group_serves,
            serving_group_lost_labels,
            leader_does_not_answer,
            worst_group_down,
        ),
        ConditionType.READY: (
            ready_if_no_pod_left,
            all_serve_spec,
            stalled_but_none_failed,
            object_refused,
            a_group_is_down,
            rolling_out,
        ),
        ConditionType.STALLED: (answer_if_no_group_is_wanted, *_STALLS, not_stalled),
        ConditionType.PROGRESSING: (
            any_object_refused,
            pod_blocked,
            pods_end,
            rollout_stuck,
            group_starts_or_stops,
            rollout_in_progress,
            no_change,
        ),
        ConditionType.DEGRADED: (no_group_wanted, only_some_serve),
        ConditionType.FAILED: (no_group_wanted, restarts_used_up),
    }
)
"""The checks of each condition; the first check with an answer decides."""


def _find_stall(facts: ConditionFacts) -> ConditionAnswer | None:
    """Returns the first reason why the user must act, or None."""
    return next((answer for check in _STALLS if (answer := check(facts)) is not None), None)


def _why_pods_remain(facts: ConditionFacts) -> str:
    """Describes why pods of a suspended resource still exist, or ""."""
    return facts.blocked_pod or (ENDING if facts.draining else "")


def _down_reason(worst: GroupStatus) -> str:
    """Returns why a group does not serve: the reason of its last failure, otherwise of its phase."""
    has_other_cause = worst.phase in {GroupPhase.PENDING, GroupPhase.SLEEPING}
    # A status of 0.1.0, or from before a suspension, lacks `after_failure`. But only failures cause these
    # two phases.
    is_after_failure = worst.after_failure or worst.phase in {GroupPhase.FAILED, GroupPhase.WAITING}
    if is_after_failure and worst.failures and not has_other_cause:
        return worst.failures[-1].reason
    return _phase_reason(worst)


def _phase_reason(group: GroupStatus) -> str:
    """Returns the reason that names the group's phase; for a starting group, its startup phase."""
    if group.phase is GroupPhase.STARTING and group.startup is not None:
        return group.startup.phase.value
    return group.phase.value


def build_plan_conditions(facts: ConditionFacts) -> tuple[Condition, ...]:
    """Builds the conditions Planned and CapacityAvailable from the decisions about all wanted groups.

    The first problem in this order decides both conditions: missing capacity, a plan that cannot be made, a
    group that waits for the model, no running group, and a running group whose plan is lost.
    """
    planned, capacity = ConditionType.PLANNED, ConditionType.CAPACITY_AVAILABLE
    refusals = [decision.refusal for decision in facts.decisions if decision.refusal is not None]
    refusal = next(iter(refusals), facts.problem)
    if isinstance(refusal, Shortage):
        return (
            facts.build(planned, False, refusal.reason, refusal.message),
            facts.build(capacity, False, refusal.reason, refusal.message),
        )
    running = [decision for decision in facts.decisions if decision.runs]
    capacity_condition = _build_capacity_condition(facts, running)
    if refusal is not None and refusal.reason != WAITING_FOR_MODEL:
        return (
            facts.build(planned, False, refusal.reason, refusal.message),
            capacity_condition if running else facts.build(capacity, None, refusal.reason),
        )
    # The model is unknown. If this delays no group (`refusals` is empty), the plans of running groups count.
    if refusal is not None and (refusals or not running):
        return (
            facts.build(planned, None, refusal.reason, refusal.message),
            facts.build(capacity, None, refusal.reason),
        )
    if not running:
        return (facts.build(planned, None, _BETWEEN_EPOCHS), facts.build(capacity, None, _BETWEEN_EPOCHS))
    without_plan = [str(decision.status.index) for decision in running if decision.plan is None]
    if without_plan:
        plans = "the plan" if len(without_plan) == 1 else "each plan"
        message = (
            f"{plans} of group {', '.join(without_plan)} was deleted or cannot be read. No action is needed: "
            "the pods keep serving, and the next epoch gets a new plan"
        )
        return (facts.build(planned, None, PlanReason.PLAN_LOST.value, message), capacity_condition)
    return (facts.build(planned, True, "PlanReady", facts.plan_notes), capacity_condition)


def _build_capacity_condition(facts: ConditionFacts, running: Sequence[GroupDecision]) -> Condition:
    """Builds the condition CapacityAvailable from the pods of running groups: do all pods have nodes?"""
    capacity = ConditionType.CAPACITY_AVAILABLE
    unplaced = next((decision.unplaced for decision in running if decision.unplaced), "")
    defaulted = next(
        (decision.limit_range_defaults for decision in running if decision.limit_range_defaults), ""
    )
    message = "; ".join(filter(None, (unplaced, defaulted)))
    if unplaced:
        return facts.build(capacity, False, UNSCHEDULABLE, message)
    if all(decision.placed for decision in running):
        return facts.build(capacity, True, "Placed", message)
    # The pods are new, and a scheduler has not looked at all of them yet.
    return facts.build(capacity, None, StartupPhase.SCHEDULING.value, message)
