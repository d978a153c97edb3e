"""Until when the processes of a group wait for each other. Stdlib only."""

import time
from dataclasses import dataclass

NO_LIMIT_S = 7 * 86400.0
"""What ranks and the engine wait for each other at start: the leader's supervisor ends a start
that stands still long before, and one that moves shall not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment after which waiting is pointless.

    Attributes:
        at: on time.monotonic()'s clock, in seconds.
        total_s: how long the whole wait was to be, for messages.
    """

    at: float
    total_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Returns the deadline `seconds` from now."""
        return cls(at=time.monotonic() + seconds, total_s=seconds)

    @property
    def left_s(self) -> float:
        """Returns the time left, at least 0."""
        return max(0.0, self.at - time.monotonic())


MOST_TURN_S = 0.1
"""A look that comes later by more finds a process that had no turn: only so much of the wait counts."""


class Patience:
    """Counts down a wait in small naps, and counts no time in which this process had no turn.

    Whoever shares the machine, or was stopped with this process, had no turn either.
    """

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self._looked_at_s = time.monotonic()

    def napped(self, nap_s: float) -> None:
        """Takes in that a nap of so many seconds, which may have ended early or late, is over."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_at_s, nap_s + MOST_TURN_S)
        self.left_s, self._looked_at_s = max(0.0, self.left_s - passed_s), now_s
