"""The table of a group's ranks in the status: pods, step times, KV cache and locked memory. Pure."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from heteroinfer_contract.group_report import GroupReport, RankStatus
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus, KvLimit, KvStatus, RankEntry
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.planning.kv_cache import build_kv_cache
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.epoch_end import has_run
from heteroinfer_operator.reconcile.reading import index_of

_WRITE_EVERY: Final = timedelta(seconds=60)
"""Time between two writes of step times."""
_NEW_SLOWEST_EVERY: Final = timedelta(seconds=10)
"""Time between two writes of step times if another rank has become the slowest."""
_MIN_CHANGE: Final = 0.10
"""Relative change of a step time that causes a write."""


def with_rank_entries(
    group: GroupStatus,
    plan: Plan | None,
    pods: Sequence[PodView],
    report: GroupReport | None,
    *,
    now: datetime,
    profile: ModelProfile | None = None,
) -> GroupStatus:
    """Returns the group with an entry for each rank, and with new step times if their write is due.

    Without a plan, the entries of existing pods stay.

    Args:
        pods: pods of the group's current epoch.
        report: the leader's last report, or None.
    """
    old_entries = {entry.rank: entry for entry in group.members}
    if plan is None:
        by_name = {pod.name: pod for pod in pods}
        kept_entries = [
            _with_pod_state(entry, by_name[entry.pod]) for entry in group.members if entry.pod in by_name
        ]
        return transitions.with_members(group, kept_entries)
    by_index = {index_of(pod): pod for pod in pods}
    reported: dict[int, RankStatus] = {}
    if report is not None and report.epoch == group.epoch and report.covers(plan):
        reported = {rank.rank: rank for rank in report.ranks}
    is_due = _is_write_due(group, old_entries, reported, now)
    entries = []
    for rank in plan.ranks:
        pod = by_index.get(rank.pod)
        if pod is None:
            continue
        entry = _with_pod_state(RankEntry(rank=rank.rank, role=rank.role, pod=pod.name), pod)
        old_entry, status = old_entries.get(rank.rank), reported.get(rank.rank)
        entry = _with_new_times(entry, status) if status and is_due else _with_old_times(entry, old_entry)
        entries.append(_with_locked_memory(entry, old_entry, status, is_due=is_due))
    return transitions.with_ranks(
        group,
        entries,
        measured_time=now if is_due else group.measured_time,
        kv=_build_kv_status(plan, reported, profile) or group.kv,
        long_prompts=_describe_long_prompts(plan, reported) or group.long_prompts,
    )


def _with_pod_state(entry: RankEntry, pod: PodView) -> RankEntry:
    """Returns the entry with the node and the state of its pod."""
    return entry.changed(node=pod.node or None, started=has_run(pod), ready=pod.ready and not pod.ended)


def _build_kv_status(
    plan: Plan, reported: dict[int, RankStatus], profile: ModelProfile | None
) -> KvStatus | None:
    """Returns the size of the group's KV cache, or None until every rank has reported its part.

    The rank with space for the fewest blocks limits the cache of all ranks. The cause (`limited_by`) is
    memory if this rank has less free memory than the plan requires, otherwise the plan.
    """
    if len(reported) < plan.world_size or not all(status.kv_blocks for status in reported.values()):
        return None
    tightest = min(plan.ranks, key=lambda rank: reported[rank.rank].kv_room_blocks)
    status = reported[tightest.rank]
    lacks_memory = status.kv_room_bytes < tightest.kv_cache_bytes
    return KvStatus(
        blocks=status.kv_blocks,
        block_tokens=plan.engine.block_size,
        tokens=_kv_tokens(plan, status.kv_blocks, profile),
        limiting_rank=tightest.rank,
        limiting_role=tightest.role,
        limited_by=KvLimit.MEMORY if lacks_memory else KvLimit.PLAN,
        room_blocks=status.kv_room_blocks,
    )


def _describe_long_prompts(plan: Plan, reported: dict[int, RankStatus]) -> str | None:
    """Describes the smallest step in which the GPU computes some of the experts; None if it is unknown."""
    rank = next((rank.rank for rank in plan.ranks if rank.ring_bytes), None)
    min_tokens = None if rank is None or rank not in reported else reported[rank].gpu_experts_from
    if min_tokens is None:
        return None
    if min_tokens == 0:  # the GPU never computes experts
        return f"CPUs compute all experts in all steps, as measured. The log of rank {rank} has the reason"
    return f"in steps of {min_tokens:,} tokens or more, the GPU computes a part of the experts, as measured"


def _kv_tokens(plan: Plan, blocks: int, profile: ModelProfile | None) -> int:
    """Returns the number of tokens for which this number of blocks has space.

    Each sequence takes blocks for every kind of layer. Without the model's profile, the kinds of layers are
    unknown, and the result assumes a single kind.
    """
    engine = plan.engine
    if profile is None:
        return blocks * engine.block_size
    tensor, batches = plan.tensor_parallel_size, plan.batches_at_once
    kv = build_kv_cache(profile, engine, ranks_of_stage=tensor, batches_at_once=batches)
    return kv.tokens(blocks)


def _is_write_due(
    group: GroupStatus, old_entries: dict[int, RankEntry], reported: dict[int, RankStatus], now: datetime
) -> bool:
    """Reports whether the status gets new step times now.

    A step time must have changed, and the last write must be old enough.
    """
    if not any(status.steps for status in reported.values()):  # no rank has computed a step
        return False
    interval = _NEW_SLOWEST_EVERY if _has_new_slowest(old_entries, reported) else _WRITE_EVERY
    if group.measured_time is not None and now - group.measured_time < interval:
        return False
    return any(_has_changed(old_entries.get(rank), status) for rank, status in reported.items())


def _has_new_slowest(old_entries: dict[int, RankEntry], reported: dict[int, RankStatus]) -> bool:
    """Reports whether another rank is now clearly slower than the rank that is slowest in the status."""
    slowest = max(reported, key=lambda rank: reported[rank].compute_s)
    old_slowest = max(old_entries, key=lambda rank: old_entries[rank].compute_ms or 0.0, default=slowest)
    if old_slowest not in reported:
        return False
    return reported[slowest].compute_s > (1 + _MIN_CHANGE) * reported[old_slowest].compute_s


def _has_changed(entry: RankEntry | None, status: RankStatus) -> bool:
    """Reports whether a rank's step time differs enough from the entry in the status."""
    if entry is None or entry.compute_ms is None:
        return True
    return abs(status.compute_s * 1e3 - entry.compute_ms) > _MIN_CHANGE * max(entry.compute_ms, 1e-3)


def _with_new_times(entry: RankEntry, status: RankStatus) -> RankEntry:
    """Returns the entry with measured times."""
    return entry.changed(
        step_ms=round(status.step_s * 1e3, 2),
        compute_ms=round(status.compute_s * 1e3, 2),
        wait_ms=round(status.wait_s * 1e3, 2),
    )


def _with_locked_memory(
    entry: RankEntry, old_entry: RankEntry | None, status: RankStatus | None, *, is_due: bool
) -> RankEntry:
    """Returns the entry with the rank's locked memory and transports.

    These values come from the first report that has them. Later they change only together with the step
    times, because each change is a write of the status.

    Args:
        old_entry: the rank's entry in the last status, perhaps of an earlier pod.
        is_due: whether this reconcile writes new step times.
    """
    if old_entry is not None and old_entry.pod != entry.pod:
        old_entry = None  # the values of an earlier pod do not apply
    is_known = old_entry is not None and old_entry.locked_memory_bytes is not None
    if status is not None and status.locked_memory_bytes is not None and (is_due or not is_known):
        return entry.changed(
            locked_memory_bytes=status.locked_memory_bytes,
            locked_memory_limit_bytes=status.locked_memory_limit_bytes,
            transports=status.transports or None,
        )
    if old_entry is None:
        return entry
    return entry.changed(
        locked_memory_bytes=old_entry.locked_memory_bytes,
        locked_memory_limit_bytes=old_entry.locked_memory_limit_bytes,
        transports=old_entry.transports,
    )


def _with_old_times(entry: RankEntry, old_entry: RankEntry | None) -> RankEntry:
    """Returns the entry with the times of the rank's old entry, or without times if it has no old entry."""
    if old_entry is None:
        return entry
    return entry.changed(
        step_ms=old_entry.step_ms, compute_ms=old_entry.compute_ms, wait_ms=old_entry.wait_ms
    )
