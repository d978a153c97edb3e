"""Ports that strangers reach: many may wait, and few are taken in at once. Stdlib only."""

import asyncio
from collections.abc import Awaitable, Callable
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
        serve: one connection.
        host: as `addresses.bind_host` gives it.
        port: to listen on.
        limit: of what is read of a connection ahead, in bytes.
    """
    server = await asyncio.start_server(serve, host=host, port=port, limit=limit, backlog=MOST_AT_ONCE)
    # One number means both to asyncio (asyncio/selector_events.py::_accept_connection, CPython 3.11).
    for each in server.sockets:
        with each.dup() as own:
            own.listen(MOST_WAITING)
    return server
