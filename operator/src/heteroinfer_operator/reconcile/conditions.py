"""The next status: conditions with reasons, the rank table, the ranks' times. Pure."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankStatus
from heteroinfer_contract.plan import Device, Plan, eager_reason
from heteroinfer_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    GroupPhase,
    GroupStatus,
    HeteroInferenceStatus,
    KvLimit,
    KvStatus,
    PlanStatus,
    RankEntry,
    RankPlan,
    Summary,
)
from heteroinfer_operator.cluster import PatchStatus, PodView, ResourceObservation
from heteroinfer_operator.errors import Shortage
from heteroinfer_operator.quantity import mebibytes
from heteroinfer_operator.reconcile.epoch_end import has_run
from heteroinfer_operator.reconcile.group import GroupDecision
from heteroinfer_operator.reconcile.group_planner import UNSCHEDULABLE, WAITING_FOR_MODEL
from heteroinfer_operator.reconcile.rollout import Rollout

_MEASURE_EVERY = timedelta(seconds=60)
_MOVED = 0.10
"""Step times are written when one of them moved by more than this part of itself."""


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


def status_write(observation: ResourceObservation, status: HeteroInferenceStatus) -> list[PatchStatus]:
    """Returns the write of a status, or nothing if it is stored already."""
    body = status.dump()
    if body == dict(observation.resource.status):
        return []
    return [PatchStatus(status=body, resource_version=observation.resource.resource_version)]


def group_conditions(
    decisions: Sequence[GroupDecision],
    wanted: int,
    *,
    suspended: bool,
    rollout: Rollout | None,
    refused: str,
    now: datetime,
    generation: int,
) -> tuple[Condition, ...]:
    """Returns Ready, Progressing, Degraded and Failed of all wanted groups."""
    groups = [decision.status for decision in decisions]
    ready = [group for group in groups if group.phase is GroupPhase.READY]
    failed = [group for group in groups if group.phase is GroupPhase.FAILED]
    asleep = [group for group in groups if group.phase is GroupPhase.SLEEPING]
    settled = {GroupPhase.READY, GroupPhase.FAILED, GroupPhase.SLEEPING}
    busy = [group for group in groups if group.phase not in settled]

    def make(kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
        return condition(kind, holds, reason, message, now=now, generation=generation)

    if suspended or not wanted:
        reason = "Suspended" if suspended else "ScaledToZero"
        return (
            make(ConditionType.READY, False, reason),
            make(ConditionType.PROGRESSING, False, "ObjectRefused" if refused else reason, refused),
            make(ConditionType.DEGRADED, False, reason),
            make(ConditionType.FAILED, False, reason),
        )
    worst = (failed or busy or asleep or ready)[0]
    words = (
        f"group {worst.index}: {worst.message}" if worst.message else f"{len(ready)} of {wanted} groups serve"
    )
    return (
        make(
            ConditionType.READY,
            bool(ready),
            "Serving" if ready else _ready_reason(worst),
            f"{len(ready)} of {wanted} groups serve" if ready else words,
        ),
        make(ConditionType.PROGRESSING, *_progress(busy, worst, words, rollout, refused)),
        make(ConditionType.DEGRADED, bool(ready) and len(ready) < wanted, worst.phase.value, words),
        make(
            ConditionType.FAILED,
            bool(failed),
            "RestartsUsedUp" if failed else "NotFailed",
            words if failed else "",
        ),
    )


def _progress(
    busy: Sequence[GroupStatus], worst: GroupStatus, words: str, rollout: Rollout | None, refused: str
) -> tuple[bool, str, str]:
    """Returns whether something is on its way, the reason and what it waits for."""
    if refused:
        return False, "ObjectRefused", refused
    if rollout is not None and rollout.stuck:
        return False, "RolloutStuck", rollout.message
    if busy:
        return True, _doing(worst), words
    if rollout is not None:
        return True, "RollingOut", rollout.message
    return False, "Settled", ""


def _ready_reason(worst: GroupStatus) -> str:
    """Returns the culprit's reason while a group is down because of a failure, else the phase."""
    if (
        worst.failures
        and worst.phase not in {GroupPhase.PENDING, GroupPhase.SLEEPING}
        and worst.failures[-1].epoch + 1 >= worst.epoch
    ):
        return worst.failures[-1].reason
    return _doing(worst)


def _doing(group: GroupStatus) -> str:
    """Returns what a group does as a reason; what it waits for, while it starts."""
    starts = group.phase is GroupPhase.STARTING and group.startup is not None
    return group.startup.phase.value if starts and group.startup else group.phase.value


def plan_conditions(
    decisions: Sequence[GroupDecision], before: HeteroInferenceStatus, *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Returns Planned and CapacityAvailable of all wanted groups."""

    def make(kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
        return condition(kind, holds, reason, message, now=now, generation=generation)

    planned, capacity = ConditionType.PLANNED, ConditionType.CAPACITY_AVAILABLE
    refusal = next((decision.refusal for decision in decisions if decision.refusal is not None), None)
    if isinstance(refusal, Shortage):
        return (
            make(planned, False, refusal.reason, refusal.message),
            make(capacity, False, refusal.reason, refusal.message),
        )
    if refusal is not None:
        holds = None if refusal.reason == WAITING_FOR_MODEL else False
        return (make(planned, holds, refusal.reason, refusal.message), make(capacity, None, refusal.reason))
    if not any(decision.plan is not None for decision in decisions):
        return (make(planned, None, "BetweenEpochs"), make(capacity, None, "BetweenEpochs"))
    unplaced = next((decision.unplaced for decision in decisions if decision.unplaced), "")
    return (
        make(planned, True, "PlanReady", _notes(decisions, before)),
        make(capacity, not unplaced, UNSCHEDULABLE if unplaced else "Placed", unplaced),
    )


def _notes(decisions: Sequence[GroupDecision], before: HeteroInferenceStatus) -> str:
    """Returns the notes on plans made now, or else those that were made for the living ones."""
    made = [decision.notes for decision in decisions if decision.notes is not None]
    if made:
        return "; ".join(dict.fromkeys(note for notes in made for note in notes))
    old = before.condition(ConditionType.PLANNED.value)
    return old.message if old is not None and old.status is ConditionStatus.TRUE else ""


def plan_status(plan: Plan) -> PlanStatus:
    """Returns the rank table of a plan."""
    return PlanStatus(
        hash=plan.hash,
        world_size=plan.world_size,
        eager_reason=(eager_reason(plan) or "")[:1024] or None,
        ranks=tuple(
            RankPlan(
                rank=rank.rank,
                stage=rank.stage,
                role=rank.role,
                device=rank.device,
                layers=rank.num_layers,
                memory=mebibytes(rank.weight_bytes + rank.kv_cache_bytes),
                predicted_step_ms=round(rank.predicted_step_s * 1e3, 1) or None,
            )
            for rank in plan.ranks
        ),
    )


def with_rank_entries(
    group: GroupStatus, plan: Plan, pods: Sequence[PodView], report: GroupReport | None, *, now: datetime
) -> GroupStatus:
    """Returns the group with one entry a rank, and its times if they are due."""
    by_index = {pod.labels[names.LABEL_POD_INDEX]: pod for pod in pods}
    before = {entry.rank: entry for entry in group.members}
    reported = report is not None and report.epoch == group.epoch and report.covers(plan)
    times = {rank.rank: rank for rank in report.ranks} if report is not None and reported else {}
    due = _due(group, before, times, now)
    entries = []
    for rank in plan.ranks:
        pod = by_index.get(str(rank.pod))
        if pod is None:
            continue
        old = before.get(rank.rank)
        entry = RankEntry(
            rank=rank.rank,
            role=rank.role,
            pod=pod.name,
            node=pod.node or None,
            started=has_run(pod),
            ready=pod.ready and not pod.ended,
        )
        measured = _milliseconds(times[rank.rank]) if due else _kept(old)
        entries.append(entry.model_copy(update=measured))
    update = {
        "members": tuple(entries),
        "measured_time": now if due else group.measured_time,
        "kv": _kv_cache(plan, times) or group.kv,
    }
    return group.model_copy(update=update)


def _kv_cache(plan: Plan, reported: dict[int, RankStatus]) -> KvStatus | None:
    """Returns the group's KV cache once every rank has reported its own; it changes with the epoch only."""
    if len(reported) < plan.world_size or not all(status.kv_blocks for status in reported.values()):
        return None
    tightest = min(plan.ranks, key=lambda rank: reported[rank.rank].kv_room_blocks)
    status = reported[tightest.rank]
    short = status.kv_room_bytes < tightest.kv_cache_bytes
    return KvStatus(
        blocks=status.kv_blocks,
        tokens=status.kv_blocks * plan.engine.block_size,
        limiting_rank=tightest.rank,
        limiting_role=tightest.role,
        limited_by=KvLimit.MEMORY if short else KvLimit.PLAN,
        room_blocks=status.kv_room_blocks,
    )


def _due(
    group: GroupStatus, before: dict[int, RankEntry], times: dict[int, RankStatus], now: datetime
) -> bool:
    if not times or not any(status.steps for status in times.values()):
        return False
    if group.measured_time is not None and now - group.measured_time < _MEASURE_EVERY:
        return False
    return any(_moved(before.get(rank), status) for rank, status in times.items())


def _moved(entry: RankEntry | None, status: RankStatus) -> bool:
    if entry is None or entry.compute_ms is None:
        return True
    return abs(status.compute_s * 1e3 - entry.compute_ms) > _MOVED * max(entry.compute_ms, 1e-3)


def _milliseconds(status: RankStatus) -> dict[str, float]:
    return {
        "step_ms": round(status.step_s * 1e3, 2),
        "compute_ms": round(status.compute_s * 1e3, 2),
        "wait_ms": round(status.wait_s * 1e3, 2),
    }


def _kept(entry: RankEntry | None) -> dict[str, float | None]:
    if entry is None:
        return {}
    return {"step_ms": entry.step_ms, "compute_ms": entry.compute_ms, "wait_ms": entry.wait_ms}


def summary(decisions: Sequence[GroupDecision], groups: Sequence[GroupStatus], wanted: int) -> Summary:
    """Returns the small values that `kubectl get` prints."""
    plan = next((decision.plan for decision in decisions if decision.plan is not None), None)
    entries = [entry for group in groups for entry in group.members if entry.compute_ms is not None]
    slowest = max(entries, key=lambda entry: entry.compute_ms or 0.0, default=None)
    step_ms = max((entry.step_ms or 0.0 for entry in entries), default=None)
    ready = sum(group.phase is GroupPhase.READY for group in groups)
    return Summary(
        groups=f"{ready}/{wanted}",
        gpu_ranks=None if plan is None else sum(rank.device is Device.GPU for rank in plan.ranks),
        cpu_ranks=None if plan is None else sum(rank.device is Device.CPU for rank in plan.ranks),
        step_ms=None if step_ms is None else f"{step_ms:.1f}",
        slowest_rank=None if slowest is None else f"{slowest.rank} ({slowest.role})",
        restarts=sum(group.restarts for group in groups),
        plan=None if plan is None else plan.hash,
    )
