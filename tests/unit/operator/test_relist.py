"""`relist` makes a cache list again, even if an event or a list arrives at that moment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from heteroinfer_operator.kube.server import Query
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache


class Server:
    """Returns empty lists and sends the events of the test."""

    watch_silence_s = 100.0

    def __init__(self) -> None:
        self.lists = 0
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.may_list = asyncio.Event()
        self.may_list.set()

    async def list_pages(self, path: str, query: Query) -> AsyncIterator[dict[str, Any]]:
        self.lists += 1
        await self.may_list.wait()
        yield {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "10"}, "items": []}

    async def watch(self, path: str, query: Query) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield await self.events.get()


@contextlib.asynccontextmanager
async def cache_of(server: Server) -> AsyncIterator[WatchCache[str]]:
    cache = WatchCache(
        server,  # type: ignore[arg-type]
        Collection(label="pods", path="/pods"),
        trim=lambda stored: str(stored["metadata"]["name"]),
        changed=lambda before, after: None,
    )
    task = asyncio.create_task(cache.run())
    try:
        yield cache
    finally:
        task.cancel()


async def until_listed(server: Server, lists: int) -> None:
    async with asyncio.timeout(5):
        while server.lists < lists:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("with_event", [False, True])
async def test_an_event_in_progress_does_not_undo_a_relist(with_event: bool) -> None:
    """Once, the event set the version for the next watch, and nothing was listed."""
    server = Server()
    async with cache_of(server) as cache:
        await cache.synced.wait()
        await asyncio.sleep(0.01)  # now the cache watches
        if with_event:
            metadata = {"name": "a", "uid": "u", "resourceVersion": "11"}
            server.events.put_nowait({"type": "ADDED", "object": {"metadata": metadata}})
        cache.request_relist()
        await until_listed(server, 2)


async def test_a_list_in_progress_does_not_undo_a_relist() -> None:
    server = Server()
    server.may_list.clear()
    async with cache_of(server) as cache:
        await until_listed(server, 1)
        cache.request_relist()
        server.may_list.set()
        await until_listed(server, 2)
