"""The transitions of a group: the only functions that change a GroupStatus. Pure.

Each function takes its values by keyword, and mypy checks the names and types of the fields that it changes.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

from heteroinfer_operator.api import (
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    KvStatus,
    RankEntry,
    StartupStatus,
)
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.api.status import MAX_COUNT, next_count, next_epoch


def describe_failure(failure: FailureStatus) -> str:
    """Message of a group that is down because of a failure."""
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    return f"{failure.reason}: {who}{failure.message}"[:MAX_TEXT]


# Facts that the pods show


def seen_in_epoch(status: GroupStatus, epoch: int) -> GroupStatus:
    """Sets the epoch that the pods show. A new epoch clears `spare_pods`, which belong to one epoch."""
    if status.epoch < epoch:
        return status.changed(epoch=epoch, spare_pods=())
    return status.changed(epoch=epoch)


def with_spare(status: GroupStatus, indices: Collection[int]) -> GroupStatus:
    """Adds pods that vanished before they ran, by index."""
    return status.changed(spare_pods=tuple(sorted({*status.spare_pods, *indices})))


def made_with(status: GroupStatus, *, revision: str | None, plan_hash: str | None) -> GroupStatus:
    """Sets the revision and plan that the pods show."""
    return status.changed(revision=revision, plan_hash=plan_hash)


def without_epoch(status: GroupStatus) -> GroupStatus:
    """Drops an epoch that cannot be trusted."""
    return status.changed(epoch=0, epoch_start_time=None, spare_pods=())


def not_begun(status: GroupStatus) -> GroupStatus:
    """Marks the epoch as not begun: none of its pods was ever requested."""
    return status.changed(epoch_start_time=None)


def with_ranks(
    status: GroupStatus, members: Sequence[RankEntry], *, measured_time: datetime | None, kv: KvStatus | None
) -> GroupStatus:
    """Sets the table of ranks and their last measurements."""
    return status.changed(
        members=tuple(members),
        measured_time=measured_time,
        kv=kv,
        kv_cache=None if kv is None else KvCacheStatus.of(kv),
    )


def with_members(status: GroupStatus, members: Sequence[RankEntry]) -> GroupStatus:
    """Replaces the table of ranks."""
    return status.changed(members=tuple(members))


# From one epoch to the next


def stopped(status: GroupStatus, *, message: str, has_pods: bool, had_epoch: bool) -> GroupStatus:
    """Stops a group that must not run.

    The next epoch gets a new number if this epoch has begun (`had_epoch`).
    """
    status = _nothing_runs(status).changed(
        phase=GroupPhase.STOPPING if has_pods else GroupPhase.PENDING, message=message, after_failure=False
    )
    return _next_epoch(status) if had_epoch else status


def replaced(status: GroupStatus, *, revision: str | None, message: str) -> GroupStatus:
    """Stops a group that another revision replaces, and clears its failures and restarts."""
    return _next_epoch(_nothing_runs(status)).changed(
        revision=revision,
        phase=GroupPhase.STOPPING,
        message=message,
        next_epoch_time=None,
        restarts=0,
        failures=(),
        after_failure=False,
    )


def ended(
    status: GroupStatus,
    failures: tuple[FailureStatus, ...],
    *,
    for_good: bool,
    held: str,
    next_epoch_time: datetime | None,
) -> GroupStatus:
    """Ends an epoch because of the last of the group's failures.

    `next_epoch_time` is None for a restart at once.
    """
    last = failures[-1]
    status = _next_epoch(_nothing_runs(status)).changed(
        next_epoch_time=next_epoch_time,
        restarts=next_count(status.restarts) if last.counted and not for_good else status.restarts,
        failures=failures,
        after_failure=True,
    )
    return failed(status) if for_good else stopping(status, message=held or describe_failure(last))


def failed(status: GroupStatus, *, held: str = "") -> GroupStatus:
    """Marks a group that has used up its restarts as failed; `held` is the reason why a pod does not end."""
    words = describe_failure(status.failures[-1])
    message = f"{words[: MAX_TEXT - len(held) - 2]}; {held}" if held else words
    return status.changed(phase=GroupPhase.FAILED, message=message)


def stopping(status: GroupStatus, *, message: str | None) -> GroupStatus:
    """Marks a group whose pods are being deleted."""
    return status.changed(phase=GroupPhase.STOPPING, message=message)


def deleted(status: GroupStatus, *, message: str) -> GroupStatus:
    """Marks a group whose resource is being deleted."""
    return status.changed(phase=GroupPhase.STOPPING, message=message, startup=None)


# Between epochs


def forgiven(status: GroupStatus) -> GroupStatus:
    """Clears the failures of a group because its next epoch uses another revision."""
    return status.changed(failures=(), restarts=0, next_epoch_time=None)


def excused(
    status: GroupStatus, failures: tuple[FailureStatus, ...], *, next_epoch_time: datetime | None
) -> GroupStatus:
    """Attributes the last failure to a lost node, so that it no longer counts."""
    return status.changed(
        failures=failures,
        restarts=max(0, status.restarts - 1),
        next_epoch_time=next_epoch_time,
        message=describe_failure(failures[-1]),
    )


def waiting(status: GroupStatus, *, until: datetime) -> GroupStatus:
    """Marks a group that waits before its next start."""
    return status.changed(phase=GroupPhase.WAITING, next_epoch_time=until)


def pending(status: GroupStatus, *, message: str | None) -> GroupStatus:
    """Marks a group that cannot start yet."""
    return status.changed(phase=GroupPhase.PENDING, message=message)


def not_planned(status: GroupStatus, *, message: str, startup: StartupStatus) -> GroupStatus:
    """Marks a group that cannot start because it has no plan."""
    return pending(status, message=message[:MAX_TEXT]).changed(startup=startup)


def refused(status: GroupStatus, *, message: str, startup: StartupStatus, had_epoch: bool) -> GroupStatus:
    """Marks a group that does not run because the API server refused one of its pods.

    The next epoch gets a new number if this epoch has begun (`had_epoch`).
    """
    status = _nothing_runs(status).changed(
        phase=GroupPhase.PENDING,
        message=message[:MAX_TEXT],
        startup=startup,
    )
    return _next_epoch(status) if had_epoch else status


# Start and run of an epoch


def starting(  # noqa: PLR0913 - the fields that a new epoch sets
    status: GroupStatus,
    *,
    epoch: int,
    revision: str,
    plan_hash: str,
    refusal: str | None,
    message: str,
    begun: datetime | None,
    startup: StartupStatus,
) -> GroupStatus:
    """Starts a new epoch."""
    rejections = status.rejections
    return _nothing_runs(status).changed(
        epoch=epoch,
        revision=revision,
        plan_hash=plan_hash,
        phase=GroupPhase.STARTING if refusal is None else GroupPhase.PENDING,
        message=message if refusal is None else refusal[:MAX_TEXT],
        epoch_start_time=begun,
        next_epoch_time=None,
        rejections=rejections,
        startup=startup,
    )


def living(  # noqa: PLR0913 - the fields that an active epoch sets
    status: GroupStatus,
    *,
    phase: GroupPhase,
    message: str | None,
    revision: str | None,
    plan_hash: str | None,
    startup: StartupStatus | None,
    whole: bool,
    now: datetime,
    spare_pods: Collection[int],
    rejected_pods: Collection[int],
    newly_rejected: int,
    stuck_pods: Collection[int],
) -> GroupStatus:
    """Updates a group with an active epoch.

    Args:
        spare_pods: indices of pods that ended before they ran.
        rejected_pods: indices of existing pods whose rejection was counted.
        newly_rejected: number of rejections to count now.
        stuck_pods: indices of pods whose containers could not be created.
    """
    ready = phase is GroupPhase.READY
    return status.changed(
        phase=phase,
        message=message[:MAX_TEXT] if message else None,
        plan_hash=plan_hash,
        revision=revision,
        epoch_start_time=status.epoch_start_time or (now if whole else None),
        startup=startup,
        after_failure=status.after_failure and not ready,
        served_time=status.served_time or (now if ready else None),
        spare_pods=tuple(sorted(spare_pods)),
        rejections=0 if ready else min(status.rejections + newly_rejected, MAX_COUNT),
        rejected_pods=tuple(sorted(rejected_pods)),
        stuck_pods=tuple(stuck_pods),
        damaged_pod=None,
    )


def with_loss(status: GroupStatus, *, pod: str, words: str) -> GroupStatus:
    """Records a pod that lost a label or its owner; appends `words` to the message."""
    before = status.message
    message = f"{before[: MAX_TEXT - len(words) - 2]}; {words}" if before else words
    return status.changed(message=message[:MAX_TEXT], damaged_pod=pod)


# Changes for a dry run or for the size of the status


def asked_for(status: GroupStatus, *, plan_hash: str) -> GroupStatus:
    """Status of the epoch whose objects the API server validates (dry run) before the epoch begins."""
    return status.changed(epoch=status.epoch + 1, plan_hash=plan_hash)


def without_details(status: GroupStatus) -> GroupStatus:
    """Drops nodes and times of the ranks because the status would be too large."""
    members = (
        entry.changed(node=None, step_ms=None, compute_ms=None, wait_ms=None) for entry in status.members
    )
    return status.changed(members=tuple(members), measured_time=None)


def with_failures(status: GroupStatus, failures: Sequence[FailureStatus]) -> GroupStatus:
    """Replaces the failures by shortened ones."""
    return status.changed(failures=tuple(failures))


def _next_epoch(status: GroupStatus) -> GroupStatus:
    return status.changed(epoch=next_epoch(status.epoch), epoch_start_time=None)


def _nothing_runs(status: GroupStatus) -> GroupStatus:
    return status.changed(
        startup=None,
        members=(),
        measured_time=None,
        kv=None,
        kv_cache=None,
        served_time=None,
        rejections=0,
        rejected_pods=(),
        spare_pods=(),
        stuck_pods=(),
        damaged_pod=None,
    )
