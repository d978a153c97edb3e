"""Measures how long a state has lasted, by this process's own clock.

Timestamps in a cluster come from several clocks: the controller manager's (a node's conditions), the API
server's (a pod's deletion) and this process's. The difference of two timestamps is a duration only if both
come from the same clock.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

_MAX_DRIFT: Final = timedelta(seconds=1)
"""If the wall clock and the monotonic clock differ by more than this, the wall clock was set."""
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)
_MAX_LATER_S: Final = 10 * 365 * 86400.0
"""Ten years. A user or a tool may set a grace period of ten thousand years."""


def utc_now() -> datetime:
    """Returns the time of this machine's clock. Reconciles use the same clock for `now`."""
    return datetime.now(UTC)


class AwakeClock:
    """Counts only the seconds in which this process ran.

    While a process is stopped or its machine is suspended, the process sees no changes. A node that was
    unreachable before this pause may be back, so the pause must not count as silence of the node.

    Args:
        monotonic_s: monotonic clock, in seconds.
    """

    TICK_S: Final = 1.0
    _MAX_GAP_S: Final = 5.0

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._last_call_s = monotonic_s()
        self._awake_s = 0.0

    def awake_s(self) -> float:
        """Returns the seconds for which this process ran since the start.

        A gap between two calls counts as 5 s at most.
        """
        now_s = self._monotonic_s()
        self._awake_s += min(max(now_s - self._last_call_s, 0.0), self._MAX_GAP_S)
        self._last_call_s = now_s
        return self._awake_s

    async def run(self) -> None:
        """Advances the clock each second until cancelled."""
        while True:
            self.awake_s()  # a call adds at most 5 s, so without frequent calls the clock would miss time
            await asyncio.sleep(self.TICK_S)


class OwnClock:
    """Notes when this process first saw each timestamp of another clock.

    The value of a timestamp is not used: a new timestamp only shows that a new state has begun. After a
    restart, this process sees every timestamp for the first time, so a wait may become longer, but never
    shorter. A change of the wall clock does not change a wait, because the monotonic clock measures it.

    Args:
        clock: this process's wall clock.
        monotonic_s: monotonic clock, in seconds.
    """

    def __init__(
        self, clock: Callable[[], datetime] = utc_now, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._monotonic_s = monotonic_s
        self._seen: dict[str, _Seen] = {}

    def record(self, key: str, stamp: Hashable | None, *, later_s: float = 0.0) -> None:
        """Notes the present time if an object's timestamp is new. Forgets an object without a timestamp.

        Args:
            key: names the object that the timestamp belongs to.
            stamp: the timestamp; None after the state has ended.
            later_s: seconds that are added to the present time; at most ten years. For example the grace
                period of a pod that is being deleted.
        """
        later_s = min(max(later_s, 0.0), _MAX_LATER_S)
        if stamp is None:
            self.forget(key)
        elif key not in self._seen or self._seen[key].stamp != stamp:
            at = _add_seconds(self._clock(), later_s)
            self._seen[key] = _Seen(stamp, at, self._monotonic_s() + later_s)

    def forget(self, key: str) -> None:
        """Forgets the timestamp of an object."""
        self._seen.pop(key, None)

    def time_of(self, key: str) -> datetime | None:
        """Returns when this process first saw an object's present timestamp, plus `later_s` of `record`.

        The time is by this process's wall clock. Returns None for an object without a timestamp.
        """
        seen = self._seen.get(key)
        if seen is None:
            return None
        # After a change of the wall clock, compute the time again from the monotonic clock. Otherwise return
        # the stored time, because the computed time differs by microseconds in each call.
        computed_at = _add_seconds(self._clock(), seen.at_s - self._monotonic_s())
        was_clock_set = abs(computed_at - seen.at) > _MAX_DRIFT
        if was_clock_set:
            self._seen[key] = seen = _Seen(seen.stamp, computed_at, seen.at_s)
        return seen.at


def _add_seconds(time_point: datetime, seconds: float) -> datetime:
    """Adds seconds to a time. Returns the first or last time of datetime if the result is out of range."""
    try:
        return time_point + timedelta(seconds=seconds)
    except OverflowError:
        return _LAST if seconds > 0 else _FIRST


class _Seen(NamedTuple):
    """A timestamp of another clock, and the time that `OwnClock.time_of` returns for it.

    Attributes:
        at: the time by the wall clock.
        at_s: the same time by the monotonic clock, in seconds.
    """

    stamp: Hashable
    at: datetime
    at_s: float
