"""Measures how long states have lasted while this process observed them. Pure.

The difference of two clock times does not measure that: clocks are set, machines sleep, and a stopped process
observes nothing. So time is summed from observation to observation, and a long gap counts as MAX_GAP_S.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

MAX_GAP_S: Final = 30.0
"""A gap between two observations counts at most this many seconds. Regular observations are more frequent."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class SeenTime(Generic[KeyT]):
    """Seconds for which states have lasted, as far as this process has observed.

    After a restart the count starts at 0, so waits may become longer, but never shorter.
    """

    _lasted_s: dict[KeyT, float] = field(default_factory=dict)
    _looked_s: float = 0.0

    def look(self, passed_s: float) -> Mapping[KeyT, float]:
        """Adds the time since the last observation; returns all times in seconds.

        Args:
            passed_s: time of a monotonic clock, in seconds.
        """
        gap_s = min(max(passed_s - self._looked_s, 0.0), MAX_GAP_S)
        self._looked_s = passed_s
        self._lasted_s = {key: lasted_s + gap_s for key, lasted_s in self._lasted_s.items()}
        return self._lasted_s

    def keep(self, lasting: Collection[KeyT]) -> None:
        """Starts counting new states and forgets states that have ended."""
        self._lasted_s = {key: self._lasted_s.get(key, 0.0) for key in lasting}
