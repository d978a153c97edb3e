"""Opens ports that strangers can reach, and limits their connections. Stdlib only."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

MAX_WAITING_CONNECTIONS: Final = 1024
"""Maximum connections that wait in the kernel. If the queue is full, a peer tries again after a second."""
MAX_ACCEPTED_AT_ONCE: Final = 16
"""Connections that one turn of the event loop accepts, so that heartbeats are not delayed."""
READ_LIMIT_BYTES: Final = 2**16


async def listen(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    host: str | None,
    port: int,
    *,
    limit: int = READ_LIMIT_BYTES,
) -> asyncio.Server:
    """Returns a server that listens. Further connections wait in a long queue of the kernel.

    Args:
        host: result of `addresses.bind_host`.
        limit: size of each connection's read buffer, in bytes.

    Raises:
        OSError: the port is in use, or the address is not available.
    """
    server = await asyncio.start_server(
        serve, host=host, port=port, limit=limit, backlog=MAX_ACCEPTED_AT_ONCE
    )
    # asyncio uses its backlog both as the length of the queue and as the number of connections to accept in
    # one turn (asyncio/selector_events.py::_accept_connection, CPython 3.11). So set the length alone here.
    for socket in server.sockets:
        with socket.dup() as duplicate:
            duplicate.listen(MAX_WAITING_CONNECTIONS)
    return server


class ConnectionLimit:
    """Limits the number of unauthenticated connections. Use it from one event loop.

    Closes the oldest connection above the limit, so that idle strangers cannot keep out a peer that
    authenticates immediately.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: dict[object, Callable[[], None]] = {}

    @contextlib.contextmanager
    def counting(self, end: Callable[[], None]) -> Iterator[None]:
        """Counts a connection for as long as the context lasts.

        Args:
            end: closes the connection; called if there are too many connections and this one is the oldest.
        """
        token = object()
        self._open[token] = end
        if len(self._open) > self._max_connections:
            oldest = next(iter(self._open))
            close_oldest = self._open.pop(oldest)
            close_oldest()
        try:
            yield
        finally:
            self._open.pop(token, None)
