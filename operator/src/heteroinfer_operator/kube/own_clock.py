"""Since when something has been so, by this process's own clock.

Stamps of a cluster are of several clocks: of the controller manager (a node's conditions), of the API
server (a pod's deletion), of ours. The difference of two of them is a time only if both are of one.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

_SET: Final = timedelta(seconds=1)
"""A clock that differs by more from the time that has passed was set."""
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)
_LATEST_S: Final = 10 * 365 * 86400.0
"""Ten years: strangers may give their pods a grace period of ten thousand."""


def utc_now() -> datetime:
    """Returns the time of this machine's clock, which reconciles have as their `now`."""
    return datetime.now(UTC)


class AwakeClock:
    """Counts the seconds in which this process had its turns.

    A process that was stopped, or a machine that was suspended, saw nothing meanwhile: a node that it knew as
    unreachable may have come back since.

    Args:
        passed_s: seconds that never go back.
    """

    TICK_S: Final = 1.0
    _MOST_GAP_S: Final = 5.0

    def __init__(self, passed_s: Callable[[], float] = time.monotonic) -> None:
        self._passed_s = passed_s
        self._looked_s = passed_s()
        self._awake_s = 0.0

    def awake_s(self) -> float:
        """Returns the seconds since the start, less gaps in which nobody asked this clock."""
        now_s = self._passed_s()
        self._awake_s += min(max(now_s - self._looked_s, 0.0), self._MOST_GAP_S)
        self._looked_s = now_s
        return self._awake_s

    async def run(self) -> None:
        """Asks the clock each second until cancelled."""
        while True:
            self.awake_s()
            await asyncio.sleep(self.TICK_S)


class OwnClock:
    """Notes when stamps of other clocks were first seen; they themselves only tell one from the other.

    After a restart all is seen anew: what is counted from here then takes longer, never shorter. So it is
    counted by the time that has passed: a clock that is set forward or back changes no wait.

    Args:
        clock: of this process.
        passed_s: seconds that never go back.
    """

    def __init__(
        self, clock: Callable[[], datetime] = utc_now, passed_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._passed_s = passed_s
        self._seen: dict[str, _Seen] = {}

    def note(self, key: str, stamp: Hashable | None, *, later_s: float = 0.0) -> None:
        """Takes in a stamp.

        Args:
            key: what it is about.
            stamp: as another clock has it; None once it holds no more.
            later_s: what the stamp is about comes so many seconds after it was seen; ten years at most.
        """
        later_s = min(max(later_s, 0.0), _LATEST_S)
        if stamp is None:
            self._seen.pop(key, None)
        elif key not in self._seen or self._seen[key].stamp != stamp:
            moment = _later(self._clock(), later_s)
            self._seen[key] = _Seen(stamp, moment, self._passed_s() + later_s)

    def moment(self, key: str) -> datetime | None:
        """Returns the stamp of this process's clock for what `key` names, or None."""
        seen = self._seen.get(key)
        if seen is None:
            return None
        moment = _later(self._clock(), seen.at_s - self._passed_s())
        if abs(moment - seen.moment) > _SET:
            self._seen[key] = seen = _Seen(seen.stamp, moment, seen.at_s)
        return seen.moment


def _later(moment: datetime, seconds: float) -> datetime:
    """Returns a moment some seconds later, or the first or last moment that there is."""
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return _LAST if seconds > 0 else _FIRST


class _Seen(NamedTuple):
    """A stamp of another clock, and this process's: of its clock, and in seconds that never go back."""

    stamp: Hashable
    moment: datetime
    at_s: float
