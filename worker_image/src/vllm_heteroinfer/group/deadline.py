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
