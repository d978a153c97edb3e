"""Ports that strangers reach: many may wait, few are taken in at once, idle ones give way. Stdlib only."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

MOST_WAITING: Final = 1024
"""Connections that the kernel holds for us; beyond them a peer's is tried again after a second."""
MOST_AT_ONCE: Final = 16
"""Connections that one turn of the loop takes in: heart-beats come between them."""
READ_LIMIT_BYTES: Final = 2**16


async def listen(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    host: str | None,
    port: int,
    *,
    limit: int = READ_LIMIT_BYTES,
) -> asyncio.Server:
    """Returns a server that listens; raises OSError if the port cannot be taken.

    Args:
        host: as `addresses.bind_host` gives it.
        limit: of what is read of a connection ahead, in bytes.
    """
    server = await asyncio.start_server(serve, host=host, port=port, limit=limit, backlog=MOST_AT_ONCE)
    # One number means both to asyncio (asyncio/selector_events.py::_accept_connection, CPython 3.11).
    for each in server.sockets:
        with each.dup() as own:
            own.listen(MOST_WAITING)
    return server


class ConnectionLimit:
    """Connections that have proved nothing yet; use from one event loop.

    Idle strangers give way, so that no number of them keeps out who speaks at once.
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
