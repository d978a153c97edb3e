"""What the conditions of a resource are made of. Pure."""

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
    """Returns a condition; `holds` None is Unknown."""
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
    """Returns the groups that serve, and that clients reach."""
    return tuple(
        d.status for d in decisions if d.status.phase is GroupPhase.READY and not d.cut_off and not d.silent
    )


def find_worst(decisions: Sequence[GroupDecision]) -> GroupStatus:
    """Returns the group that people should look at first; of none a group that waits."""
    groups = (decision.status for decision in decisions)
    worst_first = min(groups, key=lambda group: _SEVERITY.get(group.phase, _ON_ITS_WAY), default=None)
    return worst_first or GroupStatus(index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the conditions of a resource's life are made of.

    Attributes:
        draining: whether pods are still there of groups that are not wanted, or not now.
        held: which pod that shall go is held by a finalizer, or "".
        target: revision of the spec, or None if it cannot be read.
        rollout: that is not done, or None.
        refusals: of children that something wanted needs; first of those that something waits for.
        unreachable: why clients reach no group, however many serve, or None.
        port_unreachable: why clients do not reach groups at the port of the spec, or None.
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
        """Returns the groups' next statuses."""
        return [decision.status for decision in self.decisions]

    @property
    def silent(self) -> str:
        """Returns which group's leader cannot be reached any more, and what to do, or ""."""
        return next((d.silent for d in self.decisions if d.silent), "")

    @property
    def lost_labels(self) -> str:
        """Returns which labels somebody took off a pod of a group that runs, and what to do, or ""."""
        lacking = (d for d in self.decisions if d.lost_labels and d.status.phase is GroupPhase.READY)
        return next((f"group {d.status.index}: {d.lost_labels}" for d in lacking), "")

    @property
    def serves_spec(self) -> bool:
        """Returns whether the pods of all wanted groups are ready with what the spec asks for."""
        ready = [group for group in self.groups if group.phase is GroupPhase.READY]
        return (
            self.target is not None
            and len(ready) == self.wanted
            and all(group.revision == self.target for group in ready)
        )

    @property
    def at_rest(self) -> str:
        """Returns the reason for which no group is wanted (Suspended, ScaledToZero), or ""."""
        return "Suspended" if self.suspended else "" if self.wanted else "ScaledToZero"

    @property
    def count(self) -> str:
        """Returns how many groups serve, in words."""
        return f"{len(self.serving)} of {self.wanted} groups serve"

    @property
    def words(self) -> str:
        """Returns what the worst group waits for, or else how many serve."""
        worst = self.worst
        return f"group {worst.index}: {worst.message}" if worst.message else self.count

    def make(self, kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
        """Returns a condition of now."""
        return condition(kind, holds, reason, message, now=self.now, generation=self.generation)
