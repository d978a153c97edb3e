"""How many connections a port of ours holds: who comes later ends who came first. Stdlib only."""

import contextlib
from collections.abc import Callable, Iterator


class ConnectionLimit:
    """Connections that have proved nothing yet; use from one event loop.

    Idle strangers give way, so that no number of them keeps out who speaks at once.

    Args:
        most: that are held.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[object, Callable[[], None]] = {}

    @contextlib.contextmanager
    def holding(self, end: Callable[[], None]) -> Iterator[None]:
        """Counts a connection for as long as the context lasts.

        Args:
            end: ends the connection; called when it is the oldest of too many.
        """
        token = object()
        self._open[token] = end
        if len(self._open) > self._most:
            self._open.pop(next(iter(self._open)))()
        try:
            yield
        finally:
            self._open.pop(token, None)
