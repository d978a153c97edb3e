"""A clock that leaves out the time in which its process did not run. Pure: callers pass the times."""


class TurnClock:
    """A clock for a loop: measures how late each turn comes, and does not count the delays.

    If a process did not run (its pod was frozen, its machine suspended, or it got no CPU), it cannot know
    whether another process was silent: messages may wait unread.

    Args:
        interval_s: intended time between two turns, in seconds.
        now_s: current time of a clock that never goes back, in seconds.
        tolerated_s: delay of a turn that still counts as time in which the process ran, in seconds.
    """

    def __init__(self, interval_s: float, now_s: float, *, tolerated_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._tolerated_s = tolerated_s
        self._last_turn_s = now_s
        self._missed_s = 0.0

    def turn(self, now_s: float) -> float:
        """Records a turn of this process; returns how late the turn is, in seconds."""
        late_s = self._lateness_s(now_s)
        self._missed_s += self._uncounted_s(late_s)
        self._last_turn_s = now_s
        return late_s

    def awake_s(self, now_s: float) -> float:
        """Returns the time in seconds, without the delays of turns beyond the tolerance."""
        return now_s - self._missed_s - self._uncounted_s(self._lateness_s(now_s))

    def _lateness_s(self, now_s: float) -> float:
        """Returns how late a turn at `now_s` would be, in seconds."""
        return max(0.0, now_s - self._last_turn_s - self._interval_s)

    def _uncounted_s(self, late_s: float) -> float:
        """Returns the part of a delay that does not count, in seconds."""
        return max(0.0, late_s - self._tolerated_s)
