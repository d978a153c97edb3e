"""Measures how long states have lasted while this process observed them. Pure.

The difference of two clock times does not measure this: clocks are set, machines sleep, and a stopped process
observes nothing. So this module sums the times between observations, and counts a long gap as MAX_GAP_S.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

MAX_GAP_S: Final = 30.0
"""A gap between two observations counts as at most this many seconds. Regular gaps are shorter."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class SeenTime(Generic[KeyT]):
    """Seconds for which states have lasted, as far as this process has observed.

    After a restart of this process, each time starts at 0. So a wait may become longer, but never shorter.
    """

    _lasted_s: dict[KeyT, float] = field(default_factory=dict)
    _observed_at_s: float = 0.0

    def add_elapsed(self, now_s: float) -> Mapping[KeyT, float]:
        """Adds the time since the last observation to each state. Returns all times in seconds.

        Args:
            now_s: time of a monotonic clock, in seconds.
        """
        gap_s = min(max(now_s - self._observed_at_s, 0.0), MAX_GAP_S)
        self._observed_at_s = now_s
        self._lasted_s = {key: lasted_s + gap_s for key, lasted_s in self._lasted_s.items()}
        return self._lasted_s

    def set_states(self, lasting: Collection[KeyT]) -> None:
        """Sets the states that last now. New states start at 0 s; states that have ended are forgotten."""
        self._lasted_s = {key: self._lasted_s.get(key, 0.0) for key in lasting}
