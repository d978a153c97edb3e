"""What is shown of HeteroInferences: resources, their groups, their ranks. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic.alias_generators import to_camel

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.api import (
    ConditionStatus,
    ConditionType,
    FailureStatus,
    GroupStatus,
    HeteroInferenceStatus,
    PlanStatus,
    RankEntry,
)
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.rank_progress import describe_progress, format_ms, step_times_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What the leader of a group says now.

    Attributes:
        report: of its ranks, or None if it did not answer.
        kv_use: share of the KV cache in use, 0 to 1, or None if it did not answer.
    """

    report: GroupReport | None = None
    kv_use: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """One rank.

    Attributes:
        rank: global rank.
        role: its role.
        pod: its pod.
        node: of its pod, or "".
        phase: how far it has come.
        steps: model steps since warm-up, or None where only the status is known.
        step_ms: a decode step, in milliseconds, or None while there was none.
        compute_ms: of which its own compute.
        wait_ms: of which waiting for peers.
        predicted_ms: its compute in a step of one request, as planned, or None.
    """

    rank: int
    role: str
    pod: str
    node: str
    phase: str
    steps: int | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    wait_ms: float | None = None
    predicted_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """One group.

    Attributes:
        index: from 0.
        epoch: its incarnation.
        phase: what it does.
        message: what it waits for, or "".
        live: whether its ranks are reported by its leader now, not by the status.
        restarts: because of failures that count.
        kv_tokens: that its KV cache holds, or None while unknown.
        kv_use: share of it in use, 0 to 1, or None.
        predicted_ms: a step of one request as predicted, in milliseconds, or None.
        calibration: what that was made of, or "".
        failure: its last failure, or None.
        ranks: by rank.
    """

    index: int
    epoch: int
    phase: str
    message: str
    live: bool
    restarts: int
    kv_tokens: int | None
    kv_use: float | None
    predicted_ms: float | None
    calibration: str
    failure: FailureStatus | None
    ranks: tuple[RankLine, ...]

    @property
    def culprit(self) -> str:
        """Returns who ended its last epoch, in a few words, or ""."""
        if self.failure is None:
            return ""
        who = "" if self.failure.rank is None else f" rank {self.failure.rank}"
        code = "" if self.failure.exit_code is None else f" ({self.failure.exit_code})"
        return f"{self.failure.reason}{who}{code} at {self.failure.time:%m-%d %H:%M:%S}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLine:
    """One HeteroInference.

    Attributes:
        key: its name.
        available: status of its condition Available: whether a request would be answered.
        ready: status of its condition Ready.
        reason: of Ready.
        message: of Ready.
        groups: ready of all, as 1/2.
        lines: its groups, by index.
    """

    key: ResourceKey
    available: str
    ready: str
    reason: str
    message: str
    groups: str
    lines: tuple[GroupLine, ...]

    def dump(self) -> dict[str, Any]:
        """Returns JSON values, in the status's own spelling; times as text."""
        return {
            "namespace": self.key.namespace,
            "name": self.key.name,
            "available": self.available,
            "ready": self.ready,
            "reason": self.reason,
            "message": self.message,
            "groups": [_dump(group) for group in self.lines],
        }


def build_line(
    key: ResourceKey, status: HeteroInferenceStatus, live: Mapping[int, Live] | None = None
) -> ResourceLine:
    """Returns what is shown of a resource.

    Args:
        key: its name.
        status: as stored.
        live: by group index: what its leader says; one of another epoch is left out.
    """
    available = status.condition(ConditionType.AVAILABLE.value)
    ready = status.condition(ConditionType.READY.value)
    reported = live or {}
    return ResourceLine(
        key=key,
        available=available.status.value if available else ConditionStatus.UNKNOWN.value,
        ready=ready.status.value if ready else ConditionStatus.UNKNOWN.value,
        reason=ready.reason if ready else "",
        message=ready.message if ready else "",
        groups=(status.summary.groups if status.summary else None) or "",
        lines=tuple(
            _group(group, reported.get(group.index, Live()), _plan_of(group, status))
            for group in status.groups
        ),
    )


def _plan_of(group: GroupStatus, status: HeteroInferenceStatus) -> PlanStatus | None:
    return next((plan for plan in status.plans if plan.hash == group.plan_hash), None)


def _group(group: GroupStatus, live: Live, plan: PlanStatus | None) -> GroupLine:
    # Without the group's key a leader does not say which epoch it is of; its pod's name did.
    fits = live.report is not None and live.report.epoch in {0, group.epoch}
    report = live.report if fits else None
    reported = {rank.rank: rank for rank in report.ranks} if report is not None else {}
    predicted = {rank.rank: rank.predicted_step_ms for rank in plan.ranks} if plan is not None else {}
    return GroupLine(
        index=group.index,
        epoch=group.epoch,
        phase=group.phase.value,
        message=group.message or "",
        live=report is not None,
        restarts=group.restarts,
        kv_tokens=group.kv.tokens if group.kv else None,
        kv_use=live.kv_use if report is not None else None,
        predicted_ms=plan.predicted_step_ms if plan is not None else None,
        calibration=(plan.calibration if plan is not None else None) or "",
        failure=group.failures[-1] if group.failures else None,
        ranks=tuple(
            replace(_rank(entry, reported.get(entry.rank)), predicted_ms=predicted.get(entry.rank))
            for entry in group.members
        ),
    )


def _rank(entry: RankEntry, reported: RankStatus | None) -> RankLine:
    line = RankLine(
        rank=entry.rank,
        role=entry.role,
        pod=entry.pod,
        node=entry.node or "",
        phase=RankPhase.READY.value if entry.ready else "NotReady",
        step_ms=entry.step_ms,
        compute_ms=entry.compute_ms,
        wait_ms=entry.wait_ms,
    )
    if reported is None:
        return line
    step_ms, compute_ms, wait_ms = step_times_ms(reported)
    return replace(
        line,
        phase=describe_progress(reported),
        steps=reported.steps,
        step_ms=step_ms,
        compute_ms=compute_ms,
        wait_ms=wait_ms,
    )


def _dump(line: GroupLine | RankLine) -> dict[str, Any]:
    value = {to_camel(field.name): getattr(line, field.name) for field in fields(line)}
    if isinstance(line, GroupLine):
        value["ranks"] = [_dump(rank) for rank in line.ranks]
        value["failure"] = line.failure and line.failure.dump()
    return {key: each for key, each in value.items() if each is not None}


HEADINGS = (
    "name", "node", "phase", "steps", "step", "compute", "wait", "predicted", "kv", "restarts",
    "last failure",
)  # fmt: skip
"""Of the cells of a row; times in ms. Predicted is a group's step and a rank's compute, of one request."""


def build_cells(resources: Sequence[ResourceLine]) -> Iterable[tuple[str, ...]]:
    """Yields rows of text under HEADINGS: each resource, under it its groups, under them their ranks."""
    for resource in resources:
        available = {"True": "Available", "False": "not Available"}.get(resource.available, "")
        why = f"{resource.reason} {resource.groups}".strip()
        words = ", ".join(each for each in (available, why) if each)
        yield (str(resource.key), "", words, *_empty(8))
        for group in resource.lines:
            yield (
                f"  group {group.index} epoch {group.epoch}", "", group.phase, "", _step(group), "", "",
                format_ms(group.predicted_ms),
                _kv(group), str(group.restarts), group.culprit,
            )  # fmt: skip
            for rank in group.ranks:
                steps = "" if rank.steps is None else str(rank.steps)
                measured = (rank.step_ms, rank.compute_ms, rank.wait_ms)
                times = (format_ms(each) for each in (*measured, rank.predicted_ms))
                yield (f"    rank {rank.rank} {rank.role}", rank.node, rank.phase, steps, *times, *_empty(3))


def waits(resources: Sequence[ResourceLine]) -> Iterable[str]:
    """Yields in words what each resource that is not Ready waits for."""
    for resource in resources:
        if resource.ready != "True":
            reported = {group.message for group in resource.lines if group.message}
            words = "; ".join(sorted(reported) or filter(None, [resource.message]))
            yield f"{resource.key}: {resource.reason or 'not seen by the operator yet'}" + (
                f": {words}" if words else ""
            )


def predictions(resources: Sequence[ResourceLine]) -> Iterable[str]:
    """Yields what the predictions of each resource were made of."""
    for resource in resources:
        for made_of in dict.fromkeys(group.calibration for group in resource.lines if group.calibration):
            yield f"{resource.key}: predicted by {made_of}"


def _step(group: GroupLine) -> str:
    return format_ms(max((rank.step_ms for rank in group.ranks if rank.step_ms is not None), default=None))


def _empty(count: int) -> tuple[str, ...]:
    return ("",) * count


def _kv(group: GroupLine) -> str:
    if group.kv_tokens is None:
        return ""
    use = "" if group.kv_use is None else f"{100 * group.kv_use:.0f} % of "
    return f"{use}{group.kv_tokens} tokens"
