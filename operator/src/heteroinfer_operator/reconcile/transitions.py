"""The transitions of a group: the only functions that write a GroupStatus. Pure.

Each takes what it needs by keyword, and mypy checks the names and types of the fields that it changes.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

from heteroinfer_operator.api import (
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvStatus,
    RankEntry,
    StartupStatus,
)
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.api.status import MOST_COUNT, next_count, next_epoch


def describe_failure(failure: FailureStatus) -> str:
    """Returns the message of a group that is down because of a failure."""
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    return f"{failure.reason}: {who}{failure.message}"[:MAX_TEXT]


# What the pods show


def seen_in_epoch(status: GroupStatus, epoch: int) -> GroupStatus:
    """Returns the status of a group whose pods show its epoch; spare pods are of one epoch alone."""
    if status.epoch < epoch:
        return status.changed(epoch=epoch, spare_pods=())
    return status.changed(epoch=epoch)


def made_with(status: GroupStatus, *, revision: str | None, plan_hash: str | None) -> GroupStatus:
    """Returns the status of a group whose pods show their revision and plan."""
    return status.changed(revision=revision, plan_hash=plan_hash)


def without_epoch(status: GroupStatus) -> GroupStatus:
    """Returns the status of a group whose epoch in the status cannot be believed."""
    return status.changed(epoch=0, epoch_start_time=None, spare_pods=())


def not_begun(status: GroupStatus) -> GroupStatus:
    """Returns the status of a group of whose epoch no pod was ever asked for."""
    return status.changed(epoch_start_time=None)


def with_ranks(
    status: GroupStatus, members: Sequence[RankEntry], *, measured_time: datetime | None, kv: KvStatus | None
) -> GroupStatus:
    """Returns the status with its table of ranks and what they reported."""
    return status.changed(members=tuple(members), measured_time=measured_time, kv=kv)


def with_members(status: GroupStatus, members: Sequence[RankEntry]) -> GroupStatus:
    """Returns the status with another table of ranks."""
    return status.changed(members=tuple(members))


# From one epoch to the next


def stopped(status: GroupStatus, *, message: str, has_pods: bool, had_epoch: bool) -> GroupStatus:
    """Returns the status of a group that shall not run.

    The next epoch has another number if this one has begun (`had_epoch`).
    """
    status = _nothing_runs(status).changed(
        phase=GroupPhase.STOPPING if has_pods else GroupPhase.PENDING, message=message, after_failure=False
    )
    return _next_epoch(status) if had_epoch else status


def replaced(status: GroupStatus, *, revision: str | None, message: str) -> GroupStatus:
    """Returns the status of a group whose pods go for those of another revision: it begins anew."""
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
    """Returns the status of a group whose epoch has ended by the last of its failures.

    `next_epoch_time` is None for at once.
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
    """Returns the status of a group that has used up its restarts; `held` is why a pod does not end."""
    words = describe_failure(status.failures[-1])
    message = f"{words[: MAX_TEXT - len(held) - 2]}; {held}" if held else words
    return status.changed(phase=GroupPhase.FAILED, message=message)


def stopping(status: GroupStatus, *, message: str | None) -> GroupStatus:
    """Returns the status of a group whose pods go."""
    return status.changed(phase=GroupPhase.STOPPING, message=message)


def deleted(status: GroupStatus, *, message: str) -> GroupStatus:
    """Returns the status of a group whose resource is being deleted."""
    return status.changed(phase=GroupPhase.STOPPING, message=message, startup=None)


# Between epochs


def forgiven(status: GroupStatus) -> GroupStatus:
    """Returns the status of a group without its failures: the next epoch is of another revision."""
    return status.changed(failures=(), restarts=0, next_epoch_time=None)


def excused(
    status: GroupStatus, failures: tuple[FailureStatus, ...], *, next_epoch_time: datetime | None
) -> GroupStatus:
    """Returns the status of a group whose last failure is put down to its node, and does not count."""
    return status.changed(
        failures=failures,
        restarts=max(0, status.restarts - 1),
        next_epoch_time=next_epoch_time,
        message=describe_failure(failures[-1]),
    )


def waiting(status: GroupStatus, *, until: datetime) -> GroupStatus:
    """Returns the status of a group that waits before it starts again."""
    return status.changed(phase=GroupPhase.WAITING, next_epoch_time=until)


def pending(status: GroupStatus, *, message: str | None) -> GroupStatus:
    """Returns the status of a group that cannot start yet."""
    return status.changed(phase=GroupPhase.PENDING, message=message)


def not_planned(status: GroupStatus, *, message: str, startup: StartupStatus) -> GroupStatus:
    """Returns the status of a group that has no plan to start by."""
    return pending(status, message=message[:MAX_TEXT]).changed(startup=startup)


def refused(status: GroupStatus, *, message: str, startup: StartupStatus, had_epoch: bool) -> GroupStatus:
    """Returns the status of a group of which a pod was refused, so that none of it runs.

    The next epoch has another number if this one has begun (`had_epoch`).
    """
    status = _nothing_runs(status).changed(
        phase=GroupPhase.PENDING,
        message=message[:MAX_TEXT],
        startup=startup,
    )
    return _next_epoch(status) if had_epoch else status


# An epoch that begins and lives


def starting(  # noqa: PLR0913 - what an epoch begins with
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
    """Returns the status of a group that starts."""
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


def living(  # noqa: PLR0913 - what an epoch shows
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
    """Returns the status of a group whose epoch lives.

    `spare_pods` ended before they ran; of `rejected_pods`, which are counted and still there,
    `newly_rejected` are counted now; containers of `stuck_pods` could not be made. All are indices.
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
        rejections=0 if ready else min(status.rejections + newly_rejected, MOST_COUNT),
        rejected_pods=tuple(sorted(rejected_pods)),
        stuck_pods=tuple(stuck_pods),
        damaged_pod=None,
    )


def with_loss(status: GroupStatus, *, pod: str, words: str) -> GroupStatus:
    """Returns the status with a pod that lost a label or its owner, and words about it in its message."""
    before = status.message
    message = f"{before[: MAX_TEXT - len(words) - 2]}; {words}" if before else words
    return status.changed(message=message[:MAX_TEXT], damaged_pod=pod)


# What is asked or kept of a group


def asked_for(status: GroupStatus, *, plan_hash: str) -> GroupStatus:
    """Returns the status of the epoch that the API server is asked for before it begins."""
    return status.changed(epoch=status.epoch + 1, plan_hash=plan_hash)


def without_details(status: GroupStatus) -> GroupStatus:
    """Returns the status without nodes and times of its ranks: there is no space for them."""
    members = (
        entry.changed(node=None, step_ms=None, compute_ms=None, wait_ms=None) for entry in status.members
    )
    return status.changed(members=tuple(members), measured_time=None)


def with_failures(status: GroupStatus, failures: Sequence[FailureStatus]) -> GroupStatus:
    """Returns the status with failures of which some words were left out."""
    return status.changed(failures=tuple(failures))


def _next_epoch(status: GroupStatus) -> GroupStatus:
    return status.changed(epoch=next_epoch(status.epoch), epoch_start_time=None)


def _nothing_runs(status: GroupStatus) -> GroupStatus:
    return status.changed(
        startup=None,
        members=(),
        measured_time=None,
        kv=None,
        served_time=None,
        rejections=0,
        rejected_pods=(),
        spare_pods=(),
        stuck_pods=(),
        damaged_pod=None,
    )
