"""Deadlines for the processes of a group that wait for each other. Stdlib only."""

import time
from dataclasses import dataclass

NO_LIMIT_S = 7 * 86400.0
"""Longest wait of ranks and the engine for each other at start. The leader's supervisor ends a start without
progress much earlier, and a start that makes progress must not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The end of a wait.

    Attributes:
        at: time on the clock of time.monotonic(), in seconds.
        total_s: length of the whole wait, for messages.
    """

    at: float
    total_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Returns the deadline `seconds` from now."""
        return cls(at=time.monotonic() + seconds, total_s=seconds)

    @property
    def left_s(self) -> float:
        """The remaining time, at least 0."""
        return max(0.0, self.at - time.monotonic())


MAX_TURN_S = 0.1
"""Longest delay of a nap's end that counts as waiting. After a longer delay, this process did not run."""


class WaitCountdown:
    """Counts down a wait in short naps; leaves out time in which this process did not run.

    In such a time, the awaited process often did not run either: it is on the same machine, or was stopped
    too.
    """

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self._updated_at_s = time.monotonic()

    def record_nap(self, nap_s: float) -> None:
        """Records the end of a nap.

        Args:
            nap_s: intended length of the nap, which may have ended early or late.
        """
        now_s = time.monotonic()
        passed_s = min(now_s - self._updated_at_s, nap_s + MAX_TURN_S)
        self.left_s, self._updated_at_s = max(0.0, self.left_s - passed_s), now_s
