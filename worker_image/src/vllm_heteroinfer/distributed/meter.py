"""What counts the cost of messages between ranks. Stdlib only."""

from typing import Protocol


class Meter(Protocol):
    """Counts what a hop or a collective cost."""

    def waited(self, seconds: float) -> None:
        """Adds time until what peers send was there."""

    def transferred(self, direction: str, seconds: float, num_bytes: int) -> None:
        """Adds time spent copying, sending and combining, and bytes; direction is `send` or `recv`."""

    def waiting_for(self, rank: int | None) -> None:
        """Says which global rank this one waits for now; None when it has come."""
