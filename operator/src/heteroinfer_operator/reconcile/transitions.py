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
    """Returns the message of a group that is down because of this failure."""
    rank = "" if failure.rank is None else f"rank {failure.rank}: "
    return f"{failure.reason}: {rank}{failure.message}"[:MAX_TEXT]


# Facts that the pods show


def seen_in_epoch(status: GroupStatus, epoch: int) -> GroupStatus:
    """Sets the epoch that the pods show. A new epoch clears `spare_pods`, which belong to one epoch."""
    if status.epoch < epoch:
        return status.changed(epoch=epoch, spare_pods=())
    return status.changed(epoch=epoch)


def with_spare_pods(status: GroupStatus, indices: Collection[int]) -> GroupStatus:
    """Adds pods that vanished before they ran, by index. New pods may take their names."""
    return status.changed(spare_pods=tuple(sorted({*status.spare_pods, *indices})))


def with_revision_and_plan(
    status: GroupStatus, *, revision: str | None, plan_hash: str | None
) -> GroupStatus:
    """Sets the revision and plan that the pods show."""
    return status.changed(revision=revision, plan_hash=plan_hash)


def without_epoch(status: GroupStatus) -> GroupStatus:
    """Removes an epoch that the operator cannot have written."""
    return status.changed(epoch=0, epoch_start_time=None, spare_pods=())


def without_start_time(status: GroupStatus) -> GroupStatus:
    """Marks the epoch as not begun, because none of its pods was ever requested."""
    return status.changed(epoch_start_time=None)


def with_ranks(
    status: GroupStatus,
    members: Sequence[RankEntry],
    *,
    measured_time: datetime | None,
    kv: KvStatus | None,
    long_prompts: str | None,
) -> GroupStatus:
    """Sets the table of ranks and their last measurements."""
    return status.changed(
        members=tuple(members),
        measured_time=measured_time,
        kv=kv,
        kv_cache=None if kv is None else KvCacheStatus.of(kv),
        long_prompts=long_prompts,
    )


def with_members(status: GroupStatus, members: Sequence[RankEntry]) -> GroupStatus:
    """Replaces the table of ranks."""
    return status.changed(members=tuple(members))


# From one epoch to the next


def stopped(status: GroupStatus, *, message: str, has_pods: bool, had_epoch: bool) -> GroupStatus:
    """Returns the status of a group that is stopped because it must not run.

    The next epoch gets a new number if this epoch has begun (`had_epoch`).
    """
    status = _without_running_epoch(status).changed(
        phase=GroupPhase.STOPPING if has_pods else GroupPhase.PENDING, message=message, after_failure=False
    )
    return _with_next_epoch(status) if had_epoch else status


def replaced(status: GroupStatus, *, revision: str | None, message: str) -> GroupStatus:
    """Stops a group that another revision replaces, and clears its failures and restarts."""
    return _with_next_epoch(_without_running_epoch(status)).changed(
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
    is_final: bool,
    blocked_pod: str,
    next_epoch_time: datetime | None,
) -> GroupStatus:
    """Returns the status of a group whose epoch has ended: Failed or Stopping.

    Args:
        failures: failures of the group. The last failure ended the epoch.
        is_final: whether the group has used up its restarts.
        blocked_pod: message about a pod that does not end, or "".
        next_epoch_time: time of the restart; None for an immediate restart.
    """
    last = failures[-1]
    causes_restart = last.counted and not is_final
    status = _with_next_epoch(_without_running_epoch(status)).changed(
        next_epoch_time=next_epoch_time,
        restarts=next_count(status.restarts) if causes_restart else status.restarts,
        failures=failures,
        after_failure=True,
    )
    return failed(status) if is_final else stopping(status, message=blocked_pod or describe_failure(last))


def failed(status: GroupStatus, *, blocked_pod: str = "") -> GroupStatus:
    """Marks a group that has used up its restarts as failed.

    Args:
        blocked_pod: message about a pod that does not end, or "".
    """
    failure = describe_failure(status.failures[-1])
    message = f"{failure[: MAX_TEXT - len(blocked_pod) - 2]}; {blocked_pod}" if blocked_pod else failure
    return status.changed(phase=GroupPhase.FAILED, message=message)


def stopping(status: GroupStatus, *, message: str | None) -> GroupStatus:
    """Marks a group whose pods are being deleted."""
    return status.changed(phase=GroupPhase.STOPPING, message=message)


def deleted(status: GroupStatus, *, message: str) -> GroupStatus:
    """Marks a group whose resource is being deleted."""
    return status.changed(phase=GroupPhase.STOPPING, message=message, startup=None)


# Between epochs


def without_failures(status: GroupStatus) -> GroupStatus:
    """Clears the failures of a group because its next epoch uses another revision."""
    return status.changed(failures=(), restarts=0, next_epoch_time=None)


def with_uncounted_failure(
    status: GroupStatus,
    failures: tuple[FailureStatus, ...],
    *,
    was_final: bool,
    next_epoch_time: datetime | None,
) -> GroupStatus:
    """Replaces the failures after the last failure was attributed to a lost node and no longer counts.

    Args:
        was_final: whether the last failure used up the restarts. `ended` does not count such a failure in
            `restarts`, because no restart follows it.
    """
    return status.changed(
        failures=failures,
        restarts=status.restarts if was_final else max(0, status.restarts - 1),
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
    status = _without_running_epoch(status).changed(
        phase=GroupPhase.PENDING,
        message=message[:MAX_TEXT],
        startup=startup,
    )
    return _with_next_epoch(status) if had_epoch else status


# Start and run of an epoch


def starting(  # noqa: PLR0913 - the fields that a new epoch sets
    status: GroupStatus,
    *,
    epoch: int,
    revision: str,
    plan_hash: str,
    refusal: str | None,
    message: str,
    begun_at: datetime | None,
    startup: StartupStatus,
) -> GroupStatus:
    """Returns the status of a group whose new epoch starts.

    Args:
        refusal: message of a refused object that delays the pods, or None.
        begun_at: time at which the operator requests the pods; None while it waits.
    """
    rejections = status.rejections  # the new epoch keeps the count, which `_without_running_epoch` clears
    return _without_running_epoch(status).changed(
        epoch=epoch,
        revision=revision,
        plan_hash=plan_hash,
        phase=GroupPhase.STARTING if refusal is None else GroupPhase.PENDING,
        message=message if refusal is None else refusal[:MAX_TEXT],
        epoch_start_time=begun_at,
        next_epoch_time=None,
        rejections=rejections,
        startup=startup,
    )


def with_active_epoch(  # noqa: PLR0913 - the fields that an active epoch sets
    status: GroupStatus,
    *,
    phase: GroupPhase,
    message: str | None,
    revision: str | None,
    plan_hash: str | None,
    startup: StartupStatus | None,
    all_pods_exist: bool,
    now: datetime,
    spare_pods: Collection[int],
    rejected_pods: Collection[int],
    newly_rejected: int,
    stuck_pods: Collection[int],
) -> GroupStatus:
    """Returns the status of a group with an active epoch.

    Args:
        all_pods_exist: whether each pod of the epoch exists.
        spare_pods: indices of pods that ended before they ran, so that the operator may create them
            again under the same name.
        rejected_pods: indices of existing pods whose rejection was counted.
        newly_rejected: number of rejections to count now.
        stuck_pods: indices of pods whose containers could not be created.
    """
    is_ready = phase is GroupPhase.READY
    return status.changed(
        phase=phase,
        message=message[:MAX_TEXT] if message else None,
        plan_hash=plan_hash,
        revision=revision,
        epoch_start_time=status.epoch_start_time or (now if all_pods_exist else None),
        startup=startup,
        after_failure=status.after_failure and not is_ready,  # a Ready group has recovered
        served_time=status.served_time or (now if is_ready else None),
        spare_pods=tuple(sorted(spare_pods)),
        rejections=0 if is_ready else min(status.rejections + newly_rejected, MAX_COUNT),
        rejected_pods=tuple(sorted(rejected_pods)),
        stuck_pods=tuple(stuck_pods),
        damaged_pod=None,  # `with_lost_label` sets it again while a label is lost
    )


def with_lost_label(status: GroupStatus, *, pod: str, description: str) -> GroupStatus:
    """Records a pod that lost a label or its owner, and appends `description` to the message."""
    before = status.message
    message = f"{before[: MAX_TEXT - len(description) - 2]}; {description}" if before else description
    return status.changed(message=message[:MAX_TEXT], damaged_pod=pod)


# Changes for a dry run or for the size of the status


def with_dry_run_epoch(status: GroupStatus, *, plan_hash: str) -> GroupStatus:
    """Returns the status of the next epoch, whose objects the API server validates before it begins."""
    return status.changed(epoch=status.epoch + 1, plan_hash=plan_hash)


def without_details(status: GroupStatus) -> GroupStatus:
    """Drops nodes and times of the ranks. `status_size` calls it for a status that is too large."""
    members = (
        entry.changed(node=None, step_ms=None, compute_ms=None, wait_ms=None) for entry in status.members
    )
    return status.changed(members=tuple(members), measured_time=None)


def without_locked_memory_and_transports(status: GroupStatus) -> GroupStatus:
    """Drops locked memory and transports of the ranks.

    `status_size` calls it for a status that is too large.
    """
    members = (
        entry.changed(locked_memory_bytes=None, locked_memory_limit_bytes=None, transports=None)
        for entry in status.members
    )
    return status.changed(members=tuple(members))


def with_failures(status: GroupStatus, failures: Sequence[FailureStatus]) -> GroupStatus:
    """Replaces the failures, for example by failures with shorter messages."""
    return status.changed(failures=tuple(failures))


def _with_next_epoch(status: GroupStatus) -> GroupStatus:
    """Returns the status with the number of the next epoch, which has not begun."""
    return status.changed(epoch=next_epoch(status.epoch), epoch_start_time=None)


def _without_running_epoch(status: GroupStatus) -> GroupStatus:
    """Returns the status without the values that describe a running epoch."""
    return status.changed(
        startup=None,
        members=(),
        measured_time=None,
        kv=None,
        kv_cache=None,
        long_prompts=None,
        served_time=None,
        rejections=0,
        rejected_pods=(),
        spare_pods=(),
        stuck_pods=(),
        damaged_pod=None,
    )
