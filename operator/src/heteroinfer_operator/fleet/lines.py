"""The values that status, top and up show about resources, their groups and their ranks. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

from pydantic.alias_generators import to_camel

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.printable import format_layers
from heteroinfer_operator.api import (
    ConditionStatus,
    ConditionType,
    FailureStatus,
    GroupStatus,
    HeteroInferenceStatus,
    PlanStatus,
)
from heteroinfer_operator.cluster import ResourceKey

_NO_PLANS: Final[Mapping[str, Plan]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderAnswer:
    """The answer of a group's leader to this command.

    Attributes:
        report: report about the ranks; None if the leader did not answer.
        kv_use: used share of the KV cache, 0 to 1; None if the leader did not answer.
    """

    report: GroupReport | None = None
    kv_use: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """The shown values of one rank. Unknown values are None; an unknown `node` or `pod` is "".

    Attributes:
        phase: phase of the rank's start; while the rank loads, with the percentage of its weights.
        steps: model steps since warm-up.
        step_ms: time of a decode step, in milliseconds.
        compute_ms: time in which the rank computes in that step.
        wait_ms: time in which the rank waits for other ranks in that step.
        predicted_ms: predicted `compute_ms` of a step with one request.
        layers: layers of the rank, such as "0-11".
        seen_s: seconds since its last heartbeat.
        locked_memory_bytes: memory that the rank has locked.
        locked_memory_limit_bytes: maximum memory that the rank may lock; None if there is no limit, or if it
            is unknown.
        transports: how tensors of the rank travel, such as `ranks:nccl_p2p`.
    """

    rank: int
    role: str
    phase: str
    pod: str = ""
    node: str = ""
    steps: int | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    wait_ms: float | None = None
    predicted_ms: float | None = None
    stage: int | None = None
    device: str | None = None
    layers: str | None = None
    seen_s: float | None = None
    locked_memory_bytes: int | None = None
    locked_memory_limit_bytes: int | None = None
    transports: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """The shown values of one group.

    Attributes:
        message: the reason why the group waits, or "".
        live: whether the values of the ranks come from the leader's report, not from the stored status.
        restarts: restarts that count towards restart.maxRestarts.
        kv_tokens: size of the group's KV cache in tokens, or None.
        kv_use: used share of the KV cache, 0 to 1, or None.
        predicted_ms: predicted time of a step with one request, in milliseconds, or None.
        calibration: description of the rates that the prediction uses, or "".
        long_prompts: description of the experts that the GPU computes in long prompts: as measured by the
            group, otherwise as predicted; "" if both are unknown.
        failure: the group's last failure, or None.
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
    long_prompts: str
    failure: FailureStatus | None
    ranks: tuple[RankLine, ...]

    @property
    def last_failure_text(self) -> str:
        """Reason, rank, exit code and time of the last failure, or ""."""
        if self.failure is None:
            return ""
        rank = "" if self.failure.rank is None else f" rank {self.failure.rank}"
        code = "" if self.failure.exit_code is None else f" ({self.failure.exit_code})"
        return f"{self.failure.reason}{rank}{code} at {self.failure.time:%m-%d %H:%M:%S}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLine:
    """The shown values of one HeteroInference.

    Attributes:
        available: status of the condition Available, which is True if groups would answer requests.
        ready: status of the condition Ready. `reason` and `message` come from this condition.
        groups: ready groups and all groups, such as 1/2.
        lines: the resource's groups, in the order of their indexes.
    """

    key: ResourceKey
    available: str
    ready: str
    reason: str
    message: str
    groups: str
    lines: tuple[GroupLine, ...]

    @property
    def has_status(self) -> bool:
        """Whether an operator has written the status. Before that, the condition Ready has no reason."""
        return bool(self.reason)

    def dump(self) -> dict[str, Any]:
        """Returns JSON values. Fields have the same names as in the status, and times are text."""
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
    key: ResourceKey,
    status: HeteroInferenceStatus,
    answers: Mapping[int, LeaderAnswer],
    plans: Mapping[str, Plan] = _NO_PLANS,
) -> ResourceLine:
    """Combines the status of a resource with the answers of its leaders.

    Args:
        answers: answers of leaders, by group index. A report about another epoch is ignored.
        plans: plans in use, by hash. The ranks of a group come from its plan, or without a plan from the
            status.
    """
    available = status.condition(ConditionType.AVAILABLE.value)
    ready = status.condition(ConditionType.READY.value)
    predictions = {plan.hash: plan for plan in status.plans}
    return ResourceLine(
        key=key,
        available=available.status.value if available else ConditionStatus.UNKNOWN.value,
        ready=ready.status.value if ready else ConditionStatus.UNKNOWN.value,
        reason=ready.reason if ready else "",
        message=ready.message if ready else "",
        groups=(status.summary.groups or "") if status.summary else "",
        lines=tuple(
            _group_line(
                group,
                answers.get(group.index, LeaderAnswer()),
                predictions.get(group.plan_hash or ""),
                plans.get(group.plan_hash or ""),
            )
            for group in status.groups
        ),
    )


def _group_line(
    group: GroupStatus, answer: LeaderAnswer, predicted: PlanStatus | None, plan: Plan | None
) -> GroupLine:
    """Builds the values of a group from its status, its leader's answer and its plan."""
    # To a client without the group's key, a leader reports epoch 0. Such a report is current, too, because
    # the name of the leader's pod contains the group's epoch.
    is_current = answer.report is not None and answer.report.epoch in {0, group.epoch}
    report = answer.report if is_current else None
    reported = {rank.rank: rank for rank in report.ranks} if report is not None else {}
    predicted_ms = {rank.rank: rank.predicted_step_ms for rank in predicted.ranks} if predicted else {}
    ranks = _stored_ranks(group) if plan is None else _planned_ranks(group, plan)
    return GroupLine(
        index=group.index,
        epoch=group.epoch,
        phase=group.phase.value,
        message=group.message or "",
        live=report is not None,
        restarts=group.restarts,
        kv_tokens=group.kv.tokens if group.kv else None,
        kv_use=answer.kv_use if report is not None else None,
        predicted_ms=predicted.predicted_step_ms if predicted else None,
        calibration=(predicted.calibration if predicted else None) or "",
        long_prompts=group.long_prompts or (predicted.long_prompts if predicted else None) or "",
        failure=group.failures[-1] if group.failures else None,
        ranks=tuple(
            replace(_with_report(rank, reported.get(rank.rank)), predicted_ms=predicted_ms.get(rank.rank))
            for rank in ranks
        ),
    )


def _stored_ranks(group: GroupStatus) -> Iterable[RankLine]:
    """Yields the ranks that the status contains, with their last known times."""
    for entry in group.members:
        yield RankLine(
            rank=entry.rank,
            role=entry.role,
            pod=entry.pod,
            node=entry.node or "",
            phase=RankPhase.READY.value if entry.ready else "NotReady",
            step_ms=entry.step_ms,
            compute_ms=entry.compute_ms,
            wait_ms=entry.wait_ms,
            locked_memory_bytes=entry.locked_memory_bytes,
            locked_memory_limit_bytes=entry.locked_memory_limit_bytes,
            transports=entry.transports or None,
        )


def _planned_ranks(group: GroupStatus, plan: Plan) -> Iterable[RankLine]:
    """Yields the ranks of a plan, without pods and times, which a plan does not contain."""
    for rank in plan.ranks:
        yield RankLine(
            rank=rank.rank,
            role=rank.role,
            phase=group.phase.value,
            stage=rank.stage,
            device=rank.device.value,
            layers=format_layers(rank.layers),
        )


def _with_report(line: RankLine, reported: RankStatus | None) -> RankLine:
    """Returns a rank with its values in the leader's report; without a report, the unchanged rank."""
    if reported is None:
        return line
    phase = reported.phase.value
    if reported.phase is RankPhase.LOADING and reported.total_bytes:
        phase = f"{phase} {100 * reported.loaded_bytes // reported.total_bytes} %"
    if reported.locked_memory_bytes is not None:  # otherwise keep the values of the status
        line = replace(
            line,
            locked_memory_bytes=reported.locked_memory_bytes,
            locked_memory_limit_bytes=reported.locked_memory_limit_bytes,
            transports=reported.transports or None,
        )
    times = (reported.step_s, reported.compute_s, reported.wait_s)
    step_ms, compute_ms, wait_ms = (1e3 * time_s if reported.steps else None for time_s in times)
    return replace(
        line,
        phase=phase,
        steps=reported.steps,
        step_ms=step_ms,
        compute_ms=compute_ms,
        wait_ms=wait_ms,
        seen_s=reported.heartbeat_age_s,
    )


def _dump(line: GroupLine | RankLine) -> dict[str, Any]:
    """Returns the known values as JSON, without the age of the heartbeat, which only a live table needs."""
    known = {field.name: getattr(line, field.name) for field in fields(line) if field.name != "seen_s"}
    value = {to_camel(name): each for name, each in known.items()}
    if isinstance(line, GroupLine):
        value["ranks"] = [_dump(rank) for rank in line.ranks]
        value["failure"] = line.failure and line.failure.dump()
    return {key: each for key, each in value.items() if each is not None}
