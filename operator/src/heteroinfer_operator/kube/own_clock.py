"""Since when something has been so, by this process's own clock.

Stamps of a cluster are of several clocks: of the controller manager (a node's conditions), of the API
server (a pod's deletion), of ours. The difference of two of them is a time only if both are of one.
"""

from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta


def utc_now() -> datetime:
    """Returns the time of this machine's clock, which reconciles have as their `now`."""
    return datetime.now(UTC)


class OwnClock:
    """Notes when stamps of other clocks were first seen; they themselves only tell one from the other.

    After a restart all is seen anew: what is counted from here then takes longer, never shorter.

    Args:
        clock: of this process.
    """

    def __init__(self, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[Hashable, datetime]] = {}

    def note(self, key: str, stamp: Hashable | None, *, later_s: float = 0.0) -> None:
        """Takes in a stamp.

        Args:
            key: what it is about.
            stamp: as another clock has it; None once it holds no more.
            later_s: what the stamp is about comes so many seconds after it was seen.
        """
        if stamp is None:
            self._seen.pop(key, None)
        elif key not in self._seen or self._seen[key][0] != stamp:
            self._seen[key] = (stamp, self._clock() + timedelta(seconds=later_s))

    def moment(self, key: str) -> datetime | None:
        """Returns the stamp of this process's clock for what `key` names, or None."""
        seen = self._seen.get(key)
        return None if seen is None else seen[1]
