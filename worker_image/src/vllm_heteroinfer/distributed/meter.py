"""The interface that counts the cost of messages between ranks. Stdlib only."""

from collections.abc import Callable


class Meter:
    """Counts the cost of hops and collectives. This base class discards all values."""

    def add_wait(self, seconds: float) -> None:
        """Adds the time of a wait for data from peers."""

    def add_transfer(self, direction: str, seconds: float, num_bytes: int) -> None:
        """Adds bytes, and the time to copy, send and combine them; direction is `send` or `recv`."""

    def set_awaited_rank(self, rank: int | None) -> None:
        """Reports the global rank that this rank waits for now; None when the wait ends."""

    def continue_on_device(self) -> Callable[[float], None]:
        """Reports that the device still works on this step after the worker's calls.

        Returns a function to call when the device is done, with the seconds that the last copy to the host
        took.
        """
        return lambda seconds: None
