"""The facts from which the conditions of a resource are built. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Final

from heteroinfer_operator.api import Condition, ConditionStatus, ConditionType, GroupPhase, GroupStatus
from heteroinfer_operator.cluster import Refusal
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.rollout import Rollout

_ORDER: Final[Mapping[GroupPhase, int]] = MappingProxyType(
    {GroupPhase.FAILED: 0, GroupPhase.SLEEPING: 2, GroupPhase.READY: 3}
)
"""Position of phases: a group whose phase has the lowest position needs attention most."""
_ORDER_OF_OTHERS: Final = 1
"""Position of all other phases."""


def build_condition(
    kind: ConditionType, holds: bool | None, reason: str, message: str, *, now: datetime, generation: int
) -> Condition:
    """Builds a condition with status True, False, or, if `holds` is None, Unknown."""
    state = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}[holds]
    return Condition(
        type=kind.value,
        status=state,
        reason=reason,
        message=message[:4096],
        last_transition_time=now,
        observed_generation=generation,
    )


def find_serving(decisions: Sequence[GroupDecision]) -> tuple[GroupStatus, ...]:
    """Returns the statuses of Ready groups that clients reach and whose leader answers the operator."""
    return tuple(
        each.status
        for each in decisions
        if each.status.phase is GroupPhase.READY and not each.is_cut_off and not each.silent_leader
    )


def find_worst(decisions: Sequence[GroupDecision]) -> GroupStatus:
    """Returns the status of the group that needs attention most; an empty status without groups."""
    groups = (decision.status for decision in decisions)
    worst = min(groups, key=lambda group: _ORDER.get(group.phase, _ORDER_OF_OTHERS), default=None)
    return worst or GroupStatus(index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionFacts:
    """The facts from which the conditions of a resource are built.

    Attributes:
        kept: group that is no longer wanted and serves until a wanted group serves, or None.
        draining: whether pods of stopping or unwanted groups still exist.
        blocked_pod: message about a pod that a finalizer blocks, or "".
        target: revision of the spec, or None if the spec cannot be read.
        rollout: unfinished rollout, or None.
        refusals: refusals of needed objects; refusals that block come first.
        unreachable: why clients cannot reach any group, even if groups serve, or None.
        port_unreachable: why clients cannot reach groups at the spec's port, or None.
    """

    decisions: Sequence[GroupDecision]
    serving: Sequence[GroupStatus]
    kept: GroupStatus | None
    worst: GroupStatus
    wanted: int
    draining: bool
    blocked_pod: str
    suspended: bool
    target: str | None
    problem: HeteroInferError | None
    rollout: Rollout | None
    plan_notes: str
    refusals: Sequence[Refusal]
    unreachable: Refusal | None
    port_unreachable: Refusal | None
    now: datetime
    generation: int

    @property
    def groups(self) -> list[GroupStatus]:
        """Next statuses of all groups."""
        return [decision.status for decision in self.decisions]

    @property
    def silent_leader(self) -> str:
        """Message about a group whose leader the operator cannot reach, or ""."""
        return next((each.silent_leader for each in self.decisions if each.silent_leader), "")

    @property
    def lost_labels_message(self) -> str:
        """Message about a pod of a Ready group that has lost labels, or ""."""
        for decision in self.decisions:
            if decision.lost_labels_message and decision.status.phase is GroupPhase.READY:
                return f"group {decision.status.index}: {decision.lost_labels_message}"
        return ""

    @property
    def serves_spec(self) -> bool:
        """Whether the pods of all wanted groups are ready with the revision of the spec."""
        ready = [group for group in self.groups if group.phase is GroupPhase.READY]
        return (
            self.target is not None
            and len(ready) == self.wanted
            and all(group.revision == self.target for group in ready)
        )

    @property
    def why_no_group(self) -> str:
        """Reason why no group is wanted (Suspended, ScaledToZero), or ""."""
        if self.suspended:
            return "Suspended"
        return "" if self.wanted else "ScaledToZero"

    @property
    def serving_count(self) -> str:
        """Text with the number of serving groups."""
        return f"{len(self.serving)} of {self.wanted} groups serve"

    @property
    def worst_message(self) -> str:
        """Message of the group that needs attention most, or the number of serving groups."""
        worst = self.worst
        return f"group {worst.index}: {worst.message}" if worst.message else self.serving_count

    def build(self, kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
        """Builds a condition with the time and generation of this reconcile."""
        return build_condition(kind, holds, reason, message, now=self.now, generation=self.generation)
