"""What counts the cost of messages between ranks. Stdlib only."""

from collections.abc import Callable


class Meter:
    """Counts what a hop or a collective cost; this one counts nothing."""

    def waited(self, seconds: float) -> None:
        """Adds time until what peers send was there."""

    def transferred(self, direction: str, seconds: float, num_bytes: int) -> None:
        """Adds time spent copying, sending and combining, and bytes; direction is `send` or `recv`."""

    def waiting_for(self, rank: int | None) -> None:
        """Says which global rank this one waits for now; None when it has come."""

    def runs_on(self) -> Callable[[float], None]:
        """Says that the device works on after the step's calls; returns what to call at the end of it."""
        return lambda seconds: None
