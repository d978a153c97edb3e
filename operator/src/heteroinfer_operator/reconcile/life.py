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

_SEVERITY: Final[Mapping[GroupPhase, int]] = MappingProxyType(
    {GroupPhase.FAILED: 0, GroupPhase.SLEEPING: 2, GroupPhase.READY: 3}
)
_ON_ITS_WAY: Final = 1
"""Severity of all other phases."""


def condition(
    kind: ConditionType, holds: bool | None, reason: str, message: str, *, now: datetime, generation: int
) -> Condition:
    """Builds a condition; `holds` None is Unknown."""
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
    """Groups that serve and that clients can reach."""
    return tuple(
        d.status for d in decisions if d.status.phase is GroupPhase.READY and not d.cut_off and not d.silent
    )


def find_worst(decisions: Sequence[GroupDecision]) -> GroupStatus:
    """The group that needs attention most; without groups, a waiting group 0."""
    groups = (decision.status for decision in decisions)
    worst_first = min(groups, key=lambda group: _SEVERITY.get(group.phase, _ON_ITS_WAY), default=None)
    return worst_first or GroupStatus(index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The facts from which the conditions of a resource are built.

    Attributes:
        draining: whether pods of stopping or unwanted groups still exist.
        held: message about a pod that a finalizer blocks, or "".
        target: revision of the spec, or None if the spec cannot be read.
        rollout: unfinished rollout, or None.
        refusals: refusals of needed objects; refusals that block come first.
        unreachable: why clients cannot reach any group, even if groups serve, or None.
        port_unreachable: why clients cannot reach groups at the spec's port, or None.
    """

    decisions: Sequence[GroupDecision]
    serving: Sequence[GroupStatus]
    worst: GroupStatus
    wanted: int
    draining: bool
    held: str
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
        """Next statuses of the groups."""
        return [decision.status for decision in self.decisions]

    @property
    def silent(self) -> str:
        """Message about a group whose leader the operator cannot reach, or ""."""
        return next((d.silent for d in self.decisions if d.silent), "")

    @property
    def lost_labels(self) -> str:
        """Message about a pod of a Ready group that has lost labels, or ""."""
        lacking = (d for d in self.decisions if d.lost_labels and d.status.phase is GroupPhase.READY)
        return next((f"group {d.status.index}: {d.lost_labels}" for d in lacking), "")

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
    def at_rest(self) -> str:
        """Reason why no group is wanted (Suspended, ScaledToZero), or ""."""
        return "Suspended" if self.suspended else "" if self.wanted else "ScaledToZero"

    @property
    def count(self) -> str:
        """Number of serving groups as a message."""
        return f"{len(self.serving)} of {self.wanted} groups serve"

    @property
    def words(self) -> str:
        """Message of the worst group, otherwise the number of serving groups."""
        worst = self.worst
        return f"group {worst.index}: {worst.message}" if worst.message else self.count

    def make(self, kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
        """Builds a condition with the time and generation of this reconcile."""
        return condition(kind, holds, reason, message, now=self.now, generation=self.generation)
