"""How often a group may be started again, and when. Pure."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from heteroinfer_operator.api import MAX_FAILURES, FailureStatus, RestartSpec
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile.epoch_end import IMAGE_CHANGED, NODE_LOST

_FIRST_BACKOFF_S = 10.0
"""Wait before the second restart within the window; each further one waits twice as long."""


_MESSAGE_CHARACTERS = 400
"""Of a kept failure: 64 groups with 21 of them stay below etcd's 1.5 MiB an object."""


def recent(failures: Sequence[FailureStatus], restart: RestartSpec) -> int:
    """Returns how many failures count: those within the window that ends at the last one.

    Beyond it count those of epochs that never served, back to the last epoch that did: two starts of
    30 minutes in a window of one hour would else go on for ever. The window ends at the last failure,
    not now: a group that has used up its restarts stays failed however much time passes.
    """
    if not failures:
        return 0
    since = failures[-1].time - timedelta(seconds=parse_duration_s(restart.window))
    in_vain = 0
    for failure in reversed(failures):
        if failure.served:
            break
        in_vain += failure.counted
    return max(in_vain, sum(failure.counted and failure.time >= since for failure in failures))


def used_up(failures: Sequence[FailureStatus], restart: RestartSpec) -> bool:
    """Returns whether a group has failed for good: by a failure that counts, never by an eviction."""
    return bool(failures) and failures[-1].counted and recent(failures, restart) > restart.max_restarts


def still_count(failures: Sequence[FailureStatus], restart: RestartSpec, now: datetime) -> bool:
    """Returns whether failures tell anything of the next start: how long it waits, or that there is none."""
    if not failures:
        return False
    since = now - timedelta(seconds=parse_duration_s(restart.window))
    last = failures[-1]
    return last.time > since or not last.served or used_up(failures, restart)


def next_epoch_time(failures: Sequence[FailureStatus], restart: RestartSpec) -> datetime | None:
    """Returns when a group whose epoch has ended is started again; None is at once.

    What does not count, such as evictions, makes the next start wait all the same. Upgrades make only
    further upgrades wait.
    """
    last = failures[-1]
    count = recent(failures, restart) if last.counted else _uncounted(failures, restart)
    if count <= 1:
        return None
    return last.time + timedelta(seconds=backoff_s(count - 2, restart))


def backoff_s(before: int, restart: RestartSpec) -> float:
    """Returns how long to wait, in seconds, after so many waits before."""
    return min(_FIRST_BACKOFF_S * 2.0 ** min(before, 32), parse_duration_s(restart.backoff_max))


def _uncounted(failures: Sequence[FailureStatus], restart: RestartSpec) -> int:
    last = failures[-1]
    since = last.time - timedelta(seconds=parse_duration_s(restart.window))
    alike = [each for each in failures if (each.reason == IMAGE_CHANGED) == (last.reason == IMAGE_CHANGED)]
    return sum(not each.counted and each.time >= since for each in alike)


def excuse(failures: Sequence[FailureStatus], message: str) -> tuple[FailureStatus, ...]:
    """Returns the failures with the last one put down to a lost node, which counts for nothing.

    Peers miss a pod within seconds, the cluster its node after most of a minute: what was counted
    as a lost pod was none.
    """
    last = failures[-1]
    reported = f"{message}; before that: {last.message}"[:_MESSAGE_CHARACTERS]
    changed = last.changed(reason=NODE_LOST, message=reported, counted=False)
    return (*failures[:-1], changed)


def remember(failures: Sequence[FailureStatus], failure: FailureStatus) -> tuple[FailureStatus, ...]:
    """Returns the failures to keep: those that don't count are forgotten first, then the oldest."""
    short = failure.changed(message=failure.message[:_MESSAGE_CHARACTERS])
    kept = [*failures, short]
    while len(kept) > MAX_FAILURES:
        spare = next((old for old in kept[:-1] if not old.counted), kept[0])
        kept.remove(spare)
    return tuple(kept)
