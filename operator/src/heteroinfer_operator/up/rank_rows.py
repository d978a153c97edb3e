"""What is shown of a resource that runs here: a row a rank. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from heteroinfer_contract.group_report import GroupReport, RankStatus
from heteroinfer_contract.plan import Plan, RankAssignment
from heteroinfer_operator.api import GroupPhase, GroupStatus, HeteroInferenceStatus
from heteroinfer_operator.rank_progress import describe_progress, format_ms, step_times_ms

HEADINGS = (
    "rank",
    "stage",
    "role",
    "device",
    "layers",
    "state",
    "steps",
    "step",
    "compute",
    "predicted",
    "wait",
    "seen",
)
"""Of the cells of a row; times in milliseconds, `seen` in seconds since the last heart-beat.
step = compute + wait + transfer: a straggler is a rank whose compute is long. Predicted is the compute of one
request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank now.

    Attributes:
        group: index of its group.
        assignment: of the plan.
        status: what its leader says of it, or None while the leader doesn't answer.
        group_phase: of its group.
        predicted_ms: its compute in a step of one request, as predicted, in milliseconds, or None.
    """

    group: int
    assignment: RankAssignment
    status: RankStatus | None
    group_phase: GroupPhase
    predicted_ms: float | None = None

    @property
    def name(self) -> str:
        """Returns the rank in words, for lines of text."""
        group = f"group {self.group} " if self.group else ""
        rank = self.assignment
        return f"{group}rank {rank.rank} ({rank.role}, {rank.device}, layers {self.layers})"

    @property
    def layers(self) -> str:
        """Returns the layers it holds, first and last."""
        return f"{self.assignment.first_layer}-{self.assignment.end_layer - 1}"

    @property
    def state(self) -> str:
        """Returns how far it has come, with the share of its weights that is read."""
        if self.status is None:
            return self.group_phase.value
        return describe_progress(self.status)

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns the row's text under each of HEADINGS."""
        assignment, status = self.assignment, self.status
        head = (
            f"{self.group}/{assignment.rank}" if self.group else str(assignment.rank),
            str(assignment.stage),
            assignment.role,
            assignment.device.value,
            self.layers,
            self.state,
        )
        if status is None:
            return (*head, "", "", "", format_ms(self.predicted_ms), "", "")
        step, compute, wait = (format_ms(time_ms) for time_ms in step_times_ms(status))
        times = (step, compute, format_ms(self.predicted_ms), wait)
        return (*head, str(status.steps), *times, f"{status.heartbeat_age_s:.1f}")


def build_rows(
    status: HeteroInferenceStatus, plans: Mapping[str, Plan], reports: Mapping[int, GroupReport]
) -> tuple[RankRow, ...]:
    """Returns a row for each rank of each group that has a plan.

    Args:
        status: of the resource.
        plans: in use, by hash.
        reports: by group: what its leader says; one of an older epoch is left out.
    """
    predicted = {
        (plan.hash, rank.rank): rank.predicted_step_ms for plan in status.plans for rank in plan.ranks
    }
    return tuple(
        replace(row, predicted_ms=predicted.get((group.plan_hash or "", row.assignment.rank)))
        for group in status.groups
        for row in _group_rows(group, plans, reports)
    )


def _group_rows(
    group: GroupStatus, plans: Mapping[str, Plan], reports: Mapping[int, GroupReport]
) -> Iterable[RankRow]:
    plan = plans.get(group.plan_hash or "")
    if plan is None:
        return
    report = reports.get(group.index)
    current = report is not None and report.epoch == group.epoch
    reported = {rank.rank: rank for rank in report.ranks} if report is not None and current else {}
    for assignment in plan.ranks:
        yield RankRow(
            group=group.index,
            assignment=assignment,
            status=reported.get(assignment.rank),
            group_phase=group.phase,
        )
