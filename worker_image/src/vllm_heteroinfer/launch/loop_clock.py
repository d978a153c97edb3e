"""Measures scheduling delays of a supervisor, and the allowed silence of its peers. Pure."""

from collections import deque

from vllm_heteroinfer.pod.turn_clock import TurnClock

WINDOW_S = 30.0
"""Time for which a late turn counts, in seconds."""
NEXT_DELAY = 4.0
"""The allowed silence of a supervisor grows by this many times its largest recent delay."""
MAX_EXTENSION = 10.0
"""Largest extension of the heartbeat limit for busy machines, as a multiple of the limit."""


class LoopClock(TurnClock):
    """A supervisor's clock, which also records recent scheduling delays.

    The clock leaves out long delays. A supervisor that was not scheduled cannot know whether a peer is
    silent, because the peer's messages may wait unread in the kernel.

    Delays of up to one interval count as time in which the supervisor ran: the supervisor still reads
    messages often enough. On a busy node, most turns are a little late. When the clock left out these delays
    too, a limit of 5 s took 7.5 s (turns 0.15 s late, 2026-11-28).
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        super().__init__(interval_s, now_s, tolerated_s=interval_s)
        self._late: deque[tuple[float, float]] = deque()
        """(time, delay) of late turns, the largest delay first; a larger delay replaces earlier ones."""

    def turn(self, now_s: float) -> float:
        """Records a turn of the event loop. Returns how late the turn is, in seconds.

        Forgets earlier delays that are not larger than this delay, and delays older than WINDOW_S.
        """
        late_s = super().turn(now_s)
        while self._late and self._late[-1][1] <= late_s:
            self._late.pop()
        self._late.append((now_s, late_s))
        while now_s - self._late[0][0] > WINDOW_S:
            self._late.popleft()
        return late_s

    def late_s(self) -> float:
        """Returns the largest delay of a turn in the last WINDOW_S, in seconds."""
        return self._late[0][1] if self._late else 0.0


def silence_limit_s(
    heartbeat_timeout_s: float, *, acknowledged: bool, own_late_s: float, peer_late_s: float
) -> float:
    """Returns for how many seconds a peer may be silent before it counts as lost.

    A machine that is gone or disconnected acknowledges nothing; then only the heartbeat limit applies. If the
    machine acknowledges data, the peer's supervisor may be stopped or get no CPU. If recent turns were late,
    the next turn may be later, so the limit grows.

    Args:
        acknowledged: whether the peer's machine acknowledges data; true if unknown.
        own_late_s: recent scheduling delay of this process, in seconds; the peer may be on the same machine.
        peer_late_s: scheduling delay of the peer in its last message, in seconds.
    """
    if not acknowledged:
        return heartbeat_timeout_s
    extension_s = NEXT_DELAY * max(own_late_s, peer_late_s)
    return heartbeat_timeout_s + min(extension_s, MAX_EXTENSION * heartbeat_timeout_s)
