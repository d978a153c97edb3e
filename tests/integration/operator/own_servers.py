"""Runs servers in a test that close all connections before the end of the event loop, which would warn."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web


@contextlib.asynccontextmanager
async def stream_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[asyncio.Server]:
    """Serves each connection by `serve`, and closes it. Aborts open connections at the end of the context.

    `asyncio.start_server` alone leaves connections open: the event loop cancels their tasks at its end, and
    warns about each open transport.
    """
    serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
    ended = False

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection, and removes it from the open ones."""
        task = asyncio.current_task()
        assert task is not None
        serving[task] = writer
        try:
            if not ended:
                await serve(reader, writer)
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            del serving[task]

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    try:
        yield server
    finally:
        ended = True
        server.close()
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait([*serving])
        await asyncio.sleep(0)  # the loop closes an aborted transport in its next turn


async def end_tls(runner: web.AppRunner) -> None:
    """Ends a web server that uses TLS, and aborts its connections.

    `cleanup` alone closes a connection only after its client has confirmed the end of TLS, and the event loop
    does not wait for that.
    """
    for site in [*runner.sites]:
        await site.stop()
    for connection in runner.server.connections if runner.server is not None else ():
        if connection.transport is not None:
            connection.transport.abort()
    await runner.cleanup()
    await asyncio.sleep(0)  # the loop closes an aborted transport in its next turn
