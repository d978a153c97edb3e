"""How long something has lasted while this process looked at it. Pure.

The difference of two stamps of a clock is no such time: clocks are set, machines sleep, and a process that is
stopped sees nothing. So time is counted from look to look, and a long gap between two looks counts little.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

MOST_GAP_S: Final = 30.0
"""What a gap between two looks counts at most; things that are counted are looked at more often."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class SeenTime(Generic[KeyT]):
    """Seconds for which things have lasted, as far as this process has seen it.

    After a restart all is counted anew: what depends on it takes longer, never shorter.
    """

    _lasted_s: dict[KeyT, float] = field(default_factory=dict)
    _looked_s: float = 0.0

    def look(self, passed_s: float) -> Mapping[KeyT, float]:
        """Counts the time since the last look, and returns all times in seconds.

        Args:
            passed_s: seconds of a clock that is never set, such as `time.monotonic`.
        """
        gap_s = min(max(passed_s - self._looked_s, 0.0), MOST_GAP_S)
        self._looked_s = passed_s
        self._lasted_s = {key: lasted_s + gap_s for key, lasted_s in self._lasted_s.items()}
        return self._lasted_s

    def keep(self, lasting: Collection[KeyT]) -> None:
        """Starts to count what lasts from now on, and forgets what has ended."""
        self._lasted_s = {key: self._lasted_s.get(key, 0.0) for key in lasting}
