"""The next status: conditions with reasons, the rank table, the ranks' times. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankStatus
from heteroinfer_contract.model_profile import ModelProfile
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
    storable_status,
)
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.api.status import MOST_COUNT
from heteroinfer_operator.cluster import PatchStatus, PodView, Refusal, ResourceObservation
from heteroinfer_operator.errors import HeteroInferError, PlanReason, Shortage
from heteroinfer_operator.planning.kv_cache import build_kv_cache
from heteroinfer_operator.planning.prediction import predict
from heteroinfer_operator.planning.prediction_again import PredictedPlan
from heteroinfer_operator.quantity import mebibytes
from heteroinfer_operator.reconcile.epoch_end import has_run
from heteroinfer_operator.reconcile.group_decision import GroupDecision
from heteroinfer_operator.reconcile.group_planner import UNSCHEDULABLE, WAITING_FOR_MODEL
from heteroinfer_operator.reconcile.lost_labels import REASON as LOST_LABEL
from heteroinfer_operator.reconcile.reconcile_context import CLIENTS_SCOPE
from heteroinfer_operator.reconcile.rollout import Rollout
from heteroinfer_operator.reconcile.silent_leaders import REASON as LEADER_SILENT

_RESTARTS_USED_UP: Final = "RestartsUsedUp"
_ROLLING_OUT: Final = "RollingOut"
_BETWEEN_EPOCHS: Final = "BetweenEpochs"
_MEASURE_EVERY = timedelta(seconds=60)
ENDING: Final = "pods answer the requests that they have, and end"
HELD: Final = "HeldByFinalizer"
"""Reason of Progressing where a pod that shall go is kept by a finalizer, which none of ours is."""
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
    stored = dict(observation.resource.status)
    if status.dump() == stored:
        return []
    body, defect = storable_status(status)
    if body == stored:
        return []
    version = observation.resource.resource_version
    return [PatchStatus(status=body, resource_version=version, defect=defect)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the conditions of a resource's life are made of.

    Attributes:
        decisions: of all wanted groups.
        wanted: groups.
        draining: whether pods are still there of groups that are not wanted, or not now.
        held: which pod that shall go is held by a finalizer, or "".
        suspended: as the spec has it.
        target: revision of the spec, or None if it cannot be read.
        problem: why no epoch of the spec could start, or None.
        rollout: that is not done, or None.
        refusals: of children that something wanted needs; first of those that something waits for.
        unreachable: why clients reach no group, however many serve, or None.
        port_unreachable: why clients do not reach groups at the port of the spec, or None.
        now: time of the reconcile.
        generation: of the spec.
    """

    decisions: Sequence[GroupDecision]
    wanted: int
    draining: bool
    held: str
    suspended: bool
    target: str | None
    problem: HeteroInferError | None
    rollout: Rollout | None
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
    def serving(self) -> list[GroupStatus]:
        """Returns the groups that serve, and that clients reach."""
        return [
            d.status
            for d in self.decisions
            if d.status.phase is GroupPhase.READY and not d.cut_off and not d.silent
        ]

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
    def stalled(self) -> tuple[str, str] | None:
        """Returns reason and words of what only somebody's act can end, or None."""
        failed = next((group for group in self.groups if group.phase is GroupPhase.FAILED), None)
        if failed is not None:
            return _RESTARTS_USED_UP, f"group {failed.index}: {failed.message}"
        problem = self.problem
        if problem is None or problem.reason == WAITING_FOR_MODEL or self.serves_spec:
            return (LOST_LABEL, self.lost_labels) if self.lost_labels else None
        return problem.reason, problem.message

    def make(self, kind: ConditionType, holds: bool | None, reason: str, message: str = "") -> Condition:
        """Returns a condition of now."""
        return condition(kind, holds, reason, message, now=self.now, generation=self.generation)


def life_conditions(life: Life) -> tuple[Condition, ...]:
    """Returns Available, Ready, Stalled, Progressing, Degraded and Failed."""
    if life.suspended or not life.wanted:
        return _at_rest(life)
    serving, failed = life.serving, [g for g in life.groups if g.phase is GroupPhase.FAILED]
    worst = _worst(life.groups)
    count = f"{len(serving)} of {life.wanted} groups serve"
    words = f"group {worst.index}: {worst.message}" if worst.message else count
    stalled = life.stalled
    available: tuple[bool | None, str, str] = (True, "Serving", count)
    if not serving:
        available = (False, _ready_reason(worst), words)
    if not serving and life.lost_labels:
        available = (False, LOST_LABEL, life.lost_labels)
    elif not serving and life.silent:
        available = (None, LEADER_SILENT, life.silent)
    if serving and life.unreachable is not None:
        available = (False, life.unreachable.reason, life.unreachable.message)
    return (
        life.make(ConditionType.AVAILABLE, *available),
        life.make(ConditionType.READY, *_ready(life, worst, words, count)),
        life.make(ConditionType.STALLED, stalled is not None, *(stalled or ("NotStalled", ""))),
        life.make(ConditionType.PROGRESSING, *_progress(life, worst, words)),
        life.make(
            ConditionType.DEGRADED,
            bool(serving) and len(serving) < life.wanted,
            LEADER_SILENT if life.silent else worst.phase.value,
            life.silent or words,
        ),
        life.make(
            ConditionType.FAILED,
            bool(failed),
            _RESTARTS_USED_UP if failed else "NotFailed",
            words if failed else "",
        ),
    )


def _at_rest(life: Life) -> tuple[Condition, ...]:
    """Returns the conditions of a resource of which nothing shall run."""
    reason = "Suspended" if life.suspended else "ScaledToZero"
    refused = life.refusals[0] if life.refusals else None
    going = life.held or (ENDING if life.draining else "")
    progress = (life.draining, reason, going)
    if refused is not None or life.held:
        progress = (False, *((refused.reason, refused.message) if refused else (HELD, life.held)))
    stalled = life.stalled if life.problem is not None else None
    return (
        life.make(ConditionType.AVAILABLE, False, reason),
        life.make(ConditionType.READY, not life.draining, "Stopping" if life.draining else reason, going),
        life.make(ConditionType.STALLED, stalled is not None, *(stalled or (reason, ""))),
        life.make(ConditionType.PROGRESSING, *progress),
        life.make(ConditionType.DEGRADED, False, reason),
        life.make(ConditionType.FAILED, False, reason),
    )


def _worst(groups: Sequence[GroupStatus]) -> GroupStatus:
    """Returns the group that people should look at first."""
    order = (GroupPhase.FAILED, None, GroupPhase.SLEEPING, GroupPhase.READY)
    ranks = {phase: rank for rank, phase in enumerate(order)}
    return min(groups, key=lambda group: ranks.get(group.phase, ranks[None]))


def _ready(life: Life, worst: GroupStatus, words: str, count: str) -> tuple[bool | None, str, str]:
    """Returns whether all wanted groups serve this spec, the reason, and words."""
    if life.serves_spec and not life.lost_labels:
        if life.port_unreachable is not None:
            return False, life.port_unreachable.reason, life.port_unreachable.message
        return (None, LEADER_SILENT, life.silent) if life.silent else (True, "Serving", count)
    if life.stalled is not None and worst.phase is not GroupPhase.FAILED:
        return False, *life.stalled
    if len(life.serving) < life.wanted:
        refused = next((each for each in life.refusals if each.scopes - {CLIENTS_SCOPE}), None)
        if refused is not None and refused.blocks and worst.phase is GroupPhase.PENDING:
            return False, refused.reason, refused.message
        return False, _ready_reason(worst), words
    return False, _ROLLING_OUT, life.rollout.message if life.rollout is not None else count


def _progress(life: Life, worst: GroupStatus, words: str) -> tuple[bool, str, str]:
    """Returns whether something is on its way, the reason and what it waits for."""
    if life.refusals:
        return False, life.refusals[0].reason, life.refusals[0].message
    if life.held:
        return False, HELD, life.held
    if life.rollout is not None and life.rollout.stuck:
        return False, "RolloutStuck", life.rollout.message
    settled = {GroupPhase.READY, GroupPhase.FAILED, GroupPhase.SLEEPING}
    if any(group.phase not in settled for group in life.groups):
        return True, _doing(worst), words
    if life.rollout is not None:
        return True, _ROLLING_OUT, life.rollout.message
    return False, "Settled", ""


def _ready_reason(worst: GroupStatus) -> str:
    """Returns the culprit's reason while a group is down because of a failure, else the phase."""
    waits = worst.phase in {GroupPhase.PENDING, GroupPhase.SLEEPING}
    # These phases come of failures alone, also in a status of 0.1.0 and after a suspension.
    is_down = worst.after_failure or worst.phase in {GroupPhase.FAILED, GroupPhase.WAITING}
    if is_down and worst.failures and not waits:
        return worst.failures[-1].reason
    return _doing(worst)


def _doing(group: GroupStatus) -> str:
    """Returns what a group does as a reason; what it waits for, while it starts."""
    starts = group.phase is GroupPhase.STARTING and group.startup is not None
    return group.startup.phase.value if starts and group.startup else group.phase.value


def plan_conditions(life: Life, before: HeteroInferenceStatus) -> tuple[Condition, ...]:
    """Returns Planned and CapacityAvailable of all wanted groups."""
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
    capacity_condition = life.make(capacity, not unplaced, UNSCHEDULABLE if unplaced else "Placed", unplaced)
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
            f"the plan of group {', '.join(lost)} is not kept any more, or cannot be read; it serves on, and "
            "its next epoch gets a new plan"
        )
        return (life.make(planned, None, PlanReason.PLAN_LOST.value, words), capacity_condition)
    return (life.make(planned, True, "PlanReady", _notes(running, before)), capacity_condition)


def _notes(decisions: Sequence[GroupDecision], before: HeteroInferenceStatus) -> str:
    """Returns the notes on plans made now, or else those that were made for the living ones."""
    made = [decision.notes for decision in decisions if decision.notes is not None]
    if made:
        return "; ".join(dict.fromkeys(note for notes in made for note in notes))
    old = before.condition(ConditionType.PLANNED.value)
    return old.message if old is not None and old.status is ConditionStatus.TRUE else ""


def plan_status(plan: Plan, predicted: PredictedPlan | None = None) -> PlanStatus:
    """Returns the rank table of a plan.

    Args:
        plan: of a group.
        predicted: the same by what is known of its machines now; None where that cannot be said.
    """
    ranks = plan.ranks if predicted is None else predicted.plan.ranks
    step = predict(plan) if predicted is None else predicted.step
    return PlanStatus(
        hash=plan.hash,
        predicted_step_ms=round(step.step_s * 1e3, 2),
        calibration=None if predicted is None else str(predicted)[:MAX_TEXT],
        world_size=plan.world_size,
        eager_reason=(eager_reason(plan) or "")[:MAX_TEXT] or None,
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
            for rank in ranks
        ),
    )


def with_rank_entries(
    group: GroupStatus,
    plan: Plan | None,
    pods: Sequence[PodView],
    report: GroupReport | None,
    *,
    now: datetime,
    profile: ModelProfile | None = None,
) -> GroupStatus:
    """Returns the group with one entry a rank, and its times if they are due; without a plan as before.

    Args:
        group: as it is so far.
        plan: that it runs, or None if it is not known.
        pods: of it.
        report: of its leader, or None.
        now: time of the reconcile.
        profile: of its model, or None.
    """
    before = {entry.rank: entry for entry in group.members}
    if plan is None:
        by_name = {pod.name: pod for pod in pods}
        kept = [_of_pod(entry, by_name[entry.pod]) for entry in group.members if entry.pod in by_name]
        return group.model_copy(update={"members": tuple(kept)})
    by_index = {pod.labels[names.LABEL_POD_INDEX]: pod for pod in pods}
    reported = report is not None and report.epoch == group.epoch and report.covers(plan)
    times = {rank.rank: rank for rank in report.ranks} if report is not None and reported else {}
    due = _due(group, before, times, now)
    entries = []
    for rank in plan.ranks:
        pod = by_index.get(str(rank.pod))
        if pod is None:
            continue
        entry = _of_pod(RankEntry(rank=rank.rank, role=rank.role, pod=pod.name), pod)
        measured = times.get(rank.rank) if due else None
        old = before.get(rank.rank)
        entries.append(entry.model_copy(update=_milliseconds(measured) if measured else _kept(old)))
    update = {
        "members": tuple(entries),
        "measured_time": now if due else group.measured_time,
        "kv": _kv_cache(plan, times, profile) or group.kv,
    }
    return group.model_copy(update=update)


def _of_pod(entry: RankEntry, pod: PodView) -> RankEntry:
    update = {"node": pod.node or None, "started": has_run(pod), "ready": pod.ready and not pod.ended}
    return entry.model_copy(update=update)


def _kv_cache(plan: Plan, reported: dict[int, RankStatus], profile: ModelProfile | None) -> KvStatus | None:
    """Returns the group's KV cache once every rank has reported its own; it changes with the epoch only."""
    if len(reported) < plan.world_size or not all(status.kv_blocks for status in reported.values()):
        return None
    tightest = min(plan.ranks, key=lambda rank: reported[rank.rank].kv_room_blocks)
    status = reported[tightest.rank]
    short = status.kv_room_bytes < tightest.kv_cache_bytes
    return KvStatus(
        blocks=status.kv_blocks,
        block_tokens=plan.engine.block_size,
        tokens=_kv_tokens(plan, status.kv_blocks, profile),
        limiting_rank=tightest.rank,
        limiting_role=tightest.role,
        limited_by=KvLimit.MEMORY if short else KvLimit.PLAN,
        room_blocks=status.kv_room_blocks,
    )


def _kv_tokens(plan: Plan, blocks: int, profile: ModelProfile | None) -> int:
    """Returns the tokens of so many blocks: each sequence takes some of every kind of layer."""
    engine = plan.engine
    if profile is None:
        return blocks * engine.block_size
    tensor, batches = plan.tensor_parallel_size, plan.batches_at_once
    return build_kv_cache(profile, engine, tensor=tensor, batches=batches).tokens(blocks)


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


def _predicted(plans: Sequence[PlanStatus]) -> str | None:
    step_ms = next((plan.predicted_step_ms for plan in plans), None)
    return None if step_ms is None else f"{step_ms:.1f}"


def summary(
    decisions: Sequence[GroupDecision],
    groups: Sequence[GroupStatus],
    plans: Sequence[PlanStatus],
    *,
    serving: int,
    wanted: int,
) -> Summary:
    """Returns the small values that `kubectl get` prints."""
    plan = next((decision.plan for decision in decisions if decision.plan is not None), None)
    entries = [entry for group in groups for entry in group.members if entry.compute_ms is not None]
    slowest = max(entries, key=lambda entry: entry.compute_ms or 0.0, default=None)
    step_ms = max((entry.step_ms or 0.0 for entry in entries), default=None)
    predicted = [found for found in plans if plan is not None and found.hash == plan.hash]
    return Summary(
        groups=f"{serving}/{wanted}",
        gpu_ranks=None if plan is None else sum(rank.device is Device.GPU for rank in plan.ranks),
        cpu_ranks=None if plan is None else sum(rank.device is Device.CPU for rank in plan.ranks),
        step_ms=None if step_ms is None else f"{step_ms:.1f}",
        predicted_step_ms=_predicted(predicted),
        slowest_rank=None if slowest is None else f"{slowest.rank} ({slowest.role})",
        restarts=min(sum(group.restarts for group in groups), MOST_COUNT),
        plan=None if plan is None else plan.hash,
    )
