"""A clock that counts no time in which its process had no turn. PURE: times in."""


class TurnClock:
    """Measures how late the turns of a loop come, and leaves out the time in which it had none.

    A process without a turn (its pod frozen, its machine suspended, its CPU stolen) cannot tell the
    silence of another process from its own deafness.

    Args:
        interval_s: between two turns, in seconds.
        now_s: on a clock that never goes back, in seconds.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._turn_s = now_s
        self._missed_s = 0.0

    def turn(self, now_s: float) -> float:
        """Takes in that this process has its turn now; returns by how much it comes too late, in seconds."""
        late_s = self._overdue_s(now_s)
        self._missed_s += late_s
        self._turn_s = now_s
        return late_s

    def awake_s(self, now_s: float) -> float:
        """Returns a time that goes on only while turns come when they are due, in seconds."""
        return now_s - self._missed_s - self._overdue_s(now_s)

    def _overdue_s(self, now_s: float) -> float:
        return max(0.0, now_s - self._turn_s - self._interval_s)
