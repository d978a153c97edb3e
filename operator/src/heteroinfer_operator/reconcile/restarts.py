"""The number of restarts that a group may use, and the wait before each. Pure."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from heteroinfer_operator.api import MAX_FAILURES, FailureStatus, RestartSpec
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile.epoch_end import IMAGE_CHANGED, NODE_LOST

_FIRST_BACKOFF_S = 10.0
"""Wait before the second restart within the window; each further restart waits twice as long."""


_MESSAGE_CHARACTERS = 400
"""Length of a stored failure's message: 64 groups with 21 failures each stay below etcd's 1.5 MiB limit."""


def count_recent(failures: Sequence[FailureStatus], restart: RestartSpec) -> int:
    """Returns the number of failures that count against `maxRestarts` now.

    These are the failures within the window that ends at the last failure. The window does not end at the
    present time, so that a group that has used up its restarts stays failed. The failures since the last
    epoch that served count instead if they are more. Otherwise starts that each fail after 30 minutes would
    repeat without end in a window of one hour.
    """
    if not failures:
        return 0
    since = failures[-1].time - timedelta(seconds=parse_duration_s(restart.window))
    without_service = 0
    for failure in reversed(failures):
        if failure.served:
            break
        if failure.counted:
            without_service += 1
    in_window = sum(failure.counted and failure.time >= since for failure in failures)
    return max(without_service, in_window)


def used_up(failures: Sequence[FailureStatus], restart: RestartSpec) -> bool:
    """Reports whether a group has used up its restarts.

    Returns False if the last failure does not count, such as an eviction.
    """
    return bool(failures) and failures[-1].counted and count_recent(failures, restart) > restart.max_restarts


def still_count(failures: Sequence[FailureStatus], restart: RestartSpec, now: datetime) -> bool:
    """Reports whether stored failures still delay or prevent the next start.

    This is so if the last failure is within the window, if its epoch never served, or if no restart is left.
    """
    if not failures:
        return False
    since = now - timedelta(seconds=parse_duration_s(restart.window))
    last = failures[-1]
    return last.time > since or not last.served or used_up(failures, restart)


def next_epoch_time(failures: Sequence[FailureStatus], restart: RestartSpec) -> datetime | None:
    """Returns the time of the next start of a group whose epoch has ended; None if it may start immediately.

    Ends that do not count as restarts, such as evictions, also delay the next start. An end because of an
    upgrade (ImageChanged) delays only starts after another such end.
    """
    last = failures[-1]
    count = count_recent(failures, restart) if last.counted else _count_recent_exempt_ends(failures, restart)
    if count <= 1:  # the first restart within the window does not wait
        return None
    return last.time + timedelta(seconds=backoff_s(count - 2, restart))


def backoff_s(num_waits: int, restart: RestartSpec) -> float:
    """Returns the seconds to wait after `num_waits` earlier waits.

    Each wait is twice as long as the wait before, up to `backoff_max`.
    """
    # The exponent is limited, because a large power would overflow.
    return min(_FIRST_BACKOFF_S * 2.0 ** min(num_waits, 32), parse_duration_s(restart.backoff_max))


def _count_recent_exempt_ends(failures: Sequence[FailureStatus], restart: RestartSpec) -> int:
    """Returns how many epoch ends within the window, of the last end's kind, did not count as restarts.

    There are two kinds: upgrades (ImageChanged), and all others, such as evictions. They are counted
    separately, so that an eviction does not delay the restart of an upgrade.
    """
    last = failures[-1]
    since = last.time - timedelta(seconds=parse_duration_s(restart.window))
    was_upgrade = last.reason == IMAGE_CHANGED
    ends_of_same_kind = [failure for failure in failures if (failure.reason == IMAGE_CHANGED) == was_upgrade]
    return sum(not failure.counted and failure.time >= since for failure in ends_of_same_kind)


def attribute_to_lost_node(failures: Sequence[FailureStatus], message: str) -> tuple[FailureStatus, ...]:
    """Attributes the last failure to a lost node, so that the failure no longer counts.

    Other pods notice a lost pod within seconds, but Kubernetes reports a lost node only after most of a
    minute. Until this report, the failure counts as a lost pod.
    """
    last = failures[-1]
    reported = f"{message}; before that: {last.message}"[:_MESSAGE_CHARACTERS]
    changed = last.changed(reason=NODE_LOST, message=reported, counted=False)
    return (*failures[:-1], changed)


def add_failure(failures: Sequence[FailureStatus], failure: FailureStatus) -> tuple[FailureStatus, ...]:
    """Adds a failure to the failures of a group, and keeps at most MAX_FAILURES.

    The oldest failures that do not count as restarts are dropped first, then the oldest.
    """
    shortened = failure.changed(message=failure.message[:_MESSAGE_CHARACTERS])
    kept = [*failures, shortened]
    while len(kept) > MAX_FAILURES:  # the new failure always stays
        dropped = next((old for old in kept[:-1] if not old.counted), kept[0])
        kept.remove(dropped)
    return tuple(kept)
