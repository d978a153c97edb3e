"""How late a supervisor's own loop is, and how long a silent peer is waited for. PURE: times in."""

from collections import deque

from vllm_heteroinfer.pod.turn_clock import TurnClock

WINDOW_S = 30.0
"""How long a late turn is remembered."""
NEXT_DELAY = 4.0
"""A supervisor that was late by so much may be silent for this many times as long next."""
MOST_PATIENCE = 10.0
"""In heart-beat limits: more is not added to one, however busy a machine is."""


class LoopClock(TurnClock):
    """A supervisor's clock, which also remembers how late its turns came lately.

    A process that gets no CPU cannot tell a peer's silence from its own deafness: what the peer said
    lies in the kernel, unread.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        super().__init__(interval_s, now_s)
        self._late: deque[tuple[float, float]] = deque()
        """When and by how much, the worst first: a turn outlives those before it that were less late."""

    def turn(self, now_s: float) -> float:
        """Takes in that this process has its turn now; returns by how much it comes too late, in seconds."""
        late_s = super().turn(now_s)
        while self._late and self._late[-1][1] <= late_s:
            self._late.pop()
        self._late.append((now_s, late_s))
        while now_s - self._late[0][0] > WINDOW_S:
            self._late.popleft()
        return late_s

    def late_s(self) -> float:
        """Returns by how much the latest turn of the last WINDOW_S came too late, in seconds."""
        return self._late[0][1] if self._late else 0.0


def silence_limit_s(
    heartbeat_timeout_s: float, *, acknowledged: bool, own_late_s: float, peer_late_s: float
) -> float:
    """Returns for how long a peer may be silent before it is lost, in seconds.

    A machine that is gone or cut off acknowledges nothing, and has the limit as set. Else its supervisor
    may be stopped, or get no CPU. Where turns came late, the next may come later still.

    Args:
        acknowledged: whether the peer's machine acknowledges what is sent, as far as is known.
        own_late_s: how late turns of this process were lately; a peer may be on the same machine.
        peer_late_s: how late those of the peer were when it last spoke.
    """
    if not acknowledged:
        return heartbeat_timeout_s
    patience_s = NEXT_DELAY * max(own_late_s, peer_late_s)
    return heartbeat_timeout_s + min(patience_s, MOST_PATIENCE * heartbeat_timeout_s)
