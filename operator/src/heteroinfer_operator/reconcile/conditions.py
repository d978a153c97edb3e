"""The conditions of a resource: the first check with an answer decides each condition. Pure.

The docstring of each check describes the state of the resource in which the check has an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from heteroinfer_operator.api import (
    Condition,
    ConditionType,
    GroupPhase,
    GroupStatus,
)
from heteroinfer_operator.errors import PlanReason, Shortage
from heteroinfer_operator.reconcile.group_planner import UNSCHEDULABLE, WAITING_FOR_MODEL
from heteroinfer_operator.reconcile.life import Life
from heteroinfer_operator.reconcile.lost_labels import REASON as LOST_LABEL
from heteroinfer_operator.reconcile.scopes import CLIENTS_SCOPE
from heteroinfer_operator.reconcile.silent_leaders import REASON as LEADER_SILENT

_RESTARTS_USED_UP: Final = "RestartsUsedUp"
_ROLLING_OUT: Final = "RollingOut"
_BETWEEN_EPOCHS: Final = "BetweenEpochs"
ENDING: Final = "pods finish their running requests, then end"
HELD: Final = "HeldByFinalizer"
"""Reason of Progressing if another controller's finalizer blocks a pod that is being deleted."""


class ConditionAnswer(NamedTuple):
    """Answer of a check for its condition; `holds` None is Unknown."""

    holds: bool | None
    reason: str
    message: str = ""


ConditionCheck = Callable[[Life], ConditionAnswer | None]


def life_conditions(life: Life) -> tuple[Condition, ...]:
    """Returns the conditions Available, Ready, Stalled, Progressing, Degraded and Failed."""
    return tuple(life.make(kind, *_answer(checks, life)) for kind, checks in CHECKS.items())


def _answer(checks: Sequence[ConditionCheck], life: Life) -> ConditionAnswer:
    return next(answer for check in checks if (answer := check(life)) is not None)


# Available


def at_rest(life: Life) -> ConditionAnswer | None:
    """Answer for a resource that is suspended or scaled to zero; otherwise None."""
    return ConditionAnswer(False, life.at_rest) if life.at_rest else None


def clients_cut_off(life: Life) -> ConditionAnswer | None:
    """Answer if groups serve but clients cannot reach any group; otherwise None."""
    if not life.serving or life.unreachable is None:
        return None
    return ConditionAnswer(False, life.unreachable.reason, life.unreachable.message)


def serves(life: Life) -> ConditionAnswer | None:
    """Answer if a group serves; otherwise None."""
    return ConditionAnswer(True, "Serving", life.count) if life.serving else None


def labels_lost(life: Life) -> ConditionAnswer | None:
    """Answer if a group does not serve only because its pods have lost labels; otherwise None."""
    return ConditionAnswer(False, LOST_LABEL, life.lost_labels) if life.lost_labels else None


def leader_silent(life: Life) -> ConditionAnswer | None:
    """Answer if the operator cannot reach the leader of a group whose pods are ready; otherwise None."""
    return ConditionAnswer(None, LEADER_SILENT, life.silent) if life.silent else None


def down(life: Life) -> ConditionAnswer:
    """Answer with the reason why the worst group does not serve."""
    return ConditionAnswer(False, _down_reason(life.worst), life.words)


# Ready


def stopping_at_rest(life: Life) -> ConditionAnswer | None:
    """Answer for a resource that is suspended or scaled to zero: it is ready once it has no pods."""
    if not life.at_rest:
        return None
    return ConditionAnswer(
        not life.draining, "Stopping" if life.draining else life.at_rest, _why_pods_remain(life)
    )


def serves_spec(life: Life) -> ConditionAnswer | None:
    """Answer if all wanted groups run this spec: True, or the reason why clients cannot reach them."""
    if not life.serves_spec or life.lost_labels:
        return None
    if life.port_unreachable is not None:
        return ConditionAnswer(False, life.port_unreachable.reason, life.port_unreachable.message)
    return leader_silent(life) or ConditionAnswer(True, "Serving", life.count)


def stalled_while_none_failed(life: Life) -> ConditionAnswer | None:
    """Answer if the user must act, except after the failure of a group; otherwise None."""
    stalled = _stalled(life)
    if stalled is None or life.worst.phase is GroupPhase.FAILED:
        return None
    return ConditionAnswer(False, stalled.reason, stalled.message)


def object_refused(life: Life) -> ConditionAnswer | None:
    """Answer if a group waits because the API server refused an object that its pods need."""
    if len(life.serving) >= life.wanted or life.worst.phase is not GroupPhase.PENDING:
        return None
    refused = next((each for each in life.refusals if each.scopes - {CLIENTS_SCOPE}), None)
    return (
        ConditionAnswer(False, refused.reason, refused.message)
        if refused is not None and refused.blocks
        else None
    )


def group_down(life: Life) -> ConditionAnswer | None:
    """Answer if a group does not serve; otherwise None."""
    return down(life) if len(life.serving) < life.wanted else None


def rolling_out(life: Life) -> ConditionAnswer:
    """Answer if all groups serve, but some have an older revision."""
    return ConditionAnswer(
        False, _ROLLING_OUT, life.rollout.message if life.rollout is not None else life.count
    )


# Stalled


def problem_at_rest(life: Life) -> ConditionAnswer | None:
    """Answer for a resource that is suspended or scaled to zero; reports a spec that could not start."""
    if not life.at_rest:
        return None
    return (_stalled(life) if life.problem is not None else None) or ConditionAnswer(False, life.at_rest)


def group_failed(life: Life) -> ConditionAnswer | None:
    """Answer if a group has used up its restarts; otherwise None."""
    failed = next((group for group in life.groups if group.phase is GroupPhase.FAILED), None)
    if failed is None:
        return None
    return ConditionAnswer(True, _RESTARTS_USED_UP, f"group {failed.index}: {failed.message}")


def spec_cannot_start(life: Life) -> ConditionAnswer | None:
    """Answer if no epoch of the spec can start and some groups do not run it yet; otherwise None."""
    problem = life.problem
    if problem is None or problem.reason == WAITING_FOR_MODEL or life.serves_spec:
        return None
    return ConditionAnswer(True, problem.reason, problem.message)


def labels_must_be_mended(life: Life) -> ConditionAnswer | None:
    """Answer if pods have lost labels, which the user must restore: the operator may not change pods."""
    return ConditionAnswer(True, LOST_LABEL, life.lost_labels) if life.lost_labels else None


def not_stalled(life: Life) -> ConditionAnswer:
    """Answer if no action of the user is needed."""
    return ConditionAnswer(False, "NotStalled")


# Progressing


def stopping(life: Life) -> ConditionAnswer | None:
    """Answer while the pods of a suspended or scaled-down resource end; otherwise None."""
    return ConditionAnswer(life.draining, life.at_rest, _why_pods_remain(life)) if life.at_rest else None


def child_refused(life: Life) -> ConditionAnswer | None:
    """Answer if the API server refused an object that the resource needs; otherwise None."""
    return (
        ConditionAnswer(False, life.refusals[0].reason, life.refusals[0].message) if life.refusals else None
    )


def pod_held(life: Life) -> ConditionAnswer | None:
    """Answer if a finalizer blocks a pod that is being deleted; otherwise None."""
    return ConditionAnswer(False, HELD, life.held) if life.held else None


def rollout_stuck(life: Life) -> ConditionAnswer | None:
    """Answer if a rollout cannot continue until the user acts; otherwise None."""
    stuck = life.rollout is not None and life.rollout.stuck
    return ConditionAnswer(False, "RolloutStuck", life.rollout.message) if stuck and life.rollout else None


def group_moves(life: Life) -> ConditionAnswer | None:
    """Answer while a group starts or stops; otherwise None."""
    at_ends = {GroupPhase.READY, GroupPhase.FAILED, GroupPhase.SLEEPING}
    moves = any(group.phase not in at_ends for group in life.groups)
    return ConditionAnswer(True, _phase_reason(life.worst), life.words) if moves else None


def rollout_goes_on(life: Life) -> ConditionAnswer | None:
    """Answer during a rollout; otherwise None."""
    return None if life.rollout is None else ConditionAnswer(True, _ROLLING_OUT, life.rollout.message)


def settled(life: Life) -> ConditionAnswer:
    """Answer if nothing changes."""
    return ConditionAnswer(False, "Settled")


# Degraded and Failed


def some_serve(life: Life) -> ConditionAnswer:
    """Answer with the number of groups that do not serve."""
    reason = LEADER_SILENT if life.silent else life.worst.phase.value
    return ConditionAnswer(0 < len(life.serving) < life.wanted, reason, life.silent or life.words)


def restarts_used_up(life: Life) -> ConditionAnswer:
    """Answer: True if a group has used up its restarts, otherwise False."""
    failed = any(group.phase is GroupPhase.FAILED for group in life.groups)
    return (
        ConditionAnswer(True, _RESTARTS_USED_UP, life.words)
        if failed
        else ConditionAnswer(False, "NotFailed")
    )


_STALLS: Final[tuple[ConditionCheck, ...]] = (group_failed, spec_cannot_start, labels_must_be_mended)
CHECKS: Final[Mapping[ConditionType, tuple[ConditionCheck, ...]]] = MappingProxyType(
    {
        ConditionType.AVAILABLE: (at_rest, clients_cut_off, serves, labels_lost, leader_silent, down),
        ConditionType.READY: (
            stopping_at_rest,
            serves_spec,
            stalled_while_none_failed,
            object_refused,
            group_down,
            rolling_out,
        ),
        ConditionType.STALLED: (problem_at_rest, *_STALLS, not_stalled),
        ConditionType.PROGRESSING: (
            child_refused,
            pod_held,
            stopping,
            rollout_stuck,
            group_moves,
            rollout_goes_on,
            settled,
        ),
        ConditionType.DEGRADED: (at_rest, some_serve),
        ConditionType.FAILED: (at_rest, restarts_used_up),
    }
)
"""The checks of each condition; the first check with an answer decides."""


def _stalled(life: Life) -> ConditionAnswer | None:
    return next((answer for check in _STALLS if (answer := check(life)) is not None), None)


def _why_pods_remain(life: Life) -> str:
    """Describes why pods of a suspended resource still exist, or ""."""
    return life.held or (ENDING if life.draining else "")


def _down_reason(worst: GroupStatus) -> str:
    """Reason of the failure that stopped the group, otherwise the group's phase."""
    waits = worst.phase in {GroupPhase.PENDING, GroupPhase.SLEEPING}
    # Only failures cause these phases, also in a status of 0.1.0 and after a suspension.
    is_down = worst.after_failure or worst.phase in {GroupPhase.FAILED, GroupPhase.WAITING}
    if is_down and worst.failures and not waits:
        return worst.failures[-1].reason
    return _phase_reason(worst)


def _phase_reason(group: GroupStatus) -> str:
    """Reason for the group's phase; for a starting group its startup phase."""
    starts = group.phase is GroupPhase.STARTING and group.startup is not None
    return group.startup.phase.value if starts and group.startup else group.phase.value


def plan_conditions(life: Life) -> tuple[Condition, ...]:
    """The conditions Planned and CapacityAvailable over all wanted groups."""
    planned, capacity = ConditionType.PLANNED, ConditionType.CAPACITY_AVAILABLE
    refusals = [decision.refusal for decision in life.decisions if decision.refusal is not None]
    refusal = next(iter(refusals), life.problem)
    if isinstance(refusal, Shortage):
        return (
            life.make(planned, False, refusal.reason, refusal.message),
            life.make(capacity, False, refusal.reason, refusal.message),
        )
    running = [decision for decision in life.decisions if decision.runs]
    unplaced = next((decision.unplaced for decision in running if decision.unplaced), "")
    defaulted = next((decision.defaulted for decision in running if decision.defaulted), "")
    words = "; ".join(filter(None, (unplaced, defaulted)))
    capacity_condition = life.make(capacity, not unplaced, UNSCHEDULABLE if unplaced else "Placed", words)
    if refusal is not None and refusal.reason != WAITING_FOR_MODEL:
        return (
            life.make(planned, False, refusal.reason, refusal.message),
            capacity_condition if running else life.make(capacity, None, refusal.reason),
        )
    if refusal is not None and (refusals or not running):
        return (
            life.make(planned, None, refusal.reason, refusal.message),
            life.make(capacity, None, refusal.reason),
        )
    if not running:
        return (life.make(planned, None, _BETWEEN_EPOCHS), life.make(capacity, None, _BETWEEN_EPOCHS))
    lost = [str(decision.status.index) for decision in running if decision.plan is None]
    if lost:
        words = (
            f"the plan of group {', '.join(lost)} was deleted or cannot be read. The group keeps serving; "
            "its next epoch gets a new plan"
        )
        return (life.make(planned, None, PlanReason.PLAN_LOST.value, words), capacity_condition)
    return (life.make(planned, True, "PlanReady", life.plan_notes), capacity_condition)
