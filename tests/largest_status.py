"""Builds the largest status of a resource that the CRD accepts: every list full, every text and name long."""

from datetime import UTC, datetime, timedelta

from heteroinfer_contract.plan import MAX_WORLD_SIZE, Device
from heteroinfer_operator.api import (
    MAX_GROUPS,
    MAX_PLANS,
    MAX_PROFILE_LENGTH,
    MAX_RANKS,
    Condition,
    ConditionStatus,
    ConditionType,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    HeteroInferenceStatus,
    ModelStatus,
    PlanStatus,
    RankEntry,
    RankPlan,
)
from heteroinfer_operator.api.status import MAX_FAILURES

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROLE = "r" * 63
NODE = "n" * 253
RESOURCE = "x" * 40


def build_largest_status() -> HeteroInferenceStatus:
    """Builds the status before the operator leaves out any part."""
    groups = tuple(_group(index, MAX_RANKS // MAX_GROUPS) for index in range(MAX_GROUPS))
    conditions = tuple(
        Condition(
            type=kind.value,
            status=ConditionStatus.FALSE,
            reason="R" * 64,
            message="m" * 4096,
            last_transition_time=NOW,
        )
        for kind in ConditionType
    )
    return HeteroInferenceStatus(
        conditions=conditions,
        model=ModelStatus(profile="p" * MAX_PROFILE_LENGTH, message="m" * 1024),
        plans=tuple(_plan(number) for number in range(MAX_PLANS)),
        groups=groups,
    )


def _group(index: int, ranks: int) -> GroupStatus:
    """Returns a group's status with the longest texts and all lists full."""
    return GroupStatus(
        index=index,
        revision="r" * 10,
        plan_hash="h" * 16,
        epoch=1_795_333_237_556,
        phase=GroupPhase.WAITING,
        message="m" * 1024,
        spare_pods=tuple(range(ranks)),
        rejected_pods=tuple(range(ranks)),
        failures=tuple(_failure(index, number) for number in range(MAX_FAILURES)),
        measured_time=NOW,
        members=tuple(_rank(index, rank) for rank in range(ranks)),
    )


def _failure(group: int, number: int) -> FailureStatus:
    return FailureStatus(
        epoch=1_795_333_237_556 + number,
        time=NOW + timedelta(minutes=number, seconds=group),
        reason="R" * 32,
        message="m" * 1024,
        rank=255,
        exit_code=-11,
    )


def _rank(group: int, rank: int) -> RankEntry:
    """Returns a rank's entry with the longest texts and numbers."""
    pod = f"{RESOURCE}-{group}-1795333237556-{rank}"
    return RankEntry(
        rank=rank,
        role=ROLE,
        pod=pod,
        node=NODE,
        started=True,
        ready=False,
        step_ms=123456.78,
        compute_ms=123456.78,
        wait_ms=123456.78,
        locked_memory_bytes=2**53,
        locked_memory_limit_bytes=2**53,
        transports=("ranks:nccl_net_socket", "stages:gloo"),
    )


def _plan(number: int) -> PlanStatus:
    """Returns a plan's status with the longest texts and numbers."""
    ranks = tuple(
        RankPlan(
            rank=rank,
            stage=rank,
            role=ROLE,
            device=Device.CPU,
            layers=100,
            memory="123456Mi",
            predicted_step_ms=1234.5,
        )
        for rank in range(MAX_WORLD_SIZE)
    )
    return PlanStatus(hash=f"{number:016x}", world_size=MAX_WORLD_SIZE, eager_reason="m" * 1024, ranks=ranks)
