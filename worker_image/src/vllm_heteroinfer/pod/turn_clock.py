"""A clock that leaves out the time in which its process did not run. Pure: callers pass the times."""


class TurnClock:
    """Measures how late the turns of a loop come, and leaves the delays out of its time.

    A process that did not run (its pod frozen, its machine suspended, its CPU stolen) cannot know whether
    another process was silent or whether it failed to listen itself.

    Args:
        interval_s: between two turns, in seconds.
        now_s: on a clock that never goes back, in seconds.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._turn_s = now_s
        self._missed_s = 0.0

    def turn(self, now_s: float) -> float:
        """Records a turn of this process; returns how late the turn is, in seconds."""
        late_s = self._overdue_s(now_s)
        self._missed_s += late_s
        self._turn_s = now_s
        return late_s

    def awake_s(self, now_s: float) -> float:
        """Returns a time in seconds that advances only while turns come on time."""
        return now_s - self._missed_s - self._overdue_s(now_s)

    def _overdue_s(self, now_s: float) -> float:
        return max(0.0, now_s - self._turn_s - self._interval_s)
