"""Tests a cache on an API server with malformed lists, events and objects. Each causes a new list."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from kubernetes.aio import client

from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.stored_fields import UnreadableError, as_text, as_text_map
from tests.integration.operator.running_operator import until

PATH = "/api/v1/configmaps"


def stored(name: str, version: int | str, value: object = "v", uid: str = "u") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)},
        "data": {"key": value},
    }


@dataclass(slots=True)
class ScriptedServer:
    """Serves scripted lists, and the scripted events of each watch in turn."""

    items: list[Any] = field(default_factory=list)
    version: str = "10"
    watches: list[list[Any]] = field(default_factory=list)
    lists: int = 0
    watched_from: list[str] = field(default_factory=list)
    port: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a list with the scripted items, and a watch with the next scripted events."""
        if "watch" not in request.query:
            self.lists += 1
            body = {
                "kind": "ConfigMapList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": self.version},
                "items": self.items,
            }
            return web.json_response(body)
        self.watched_from.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while not self.watches:
            await asyncio.sleep(0.02)
        for event in self.watches.pop(0):
            await response.write(json.dumps(event).encode() + b"\n")
        return response


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    app = web.Application()
    app.add_routes([web.get(PATH, scripted.answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    scripted.port = runner.addresses[0][1]
    yield scripted
    await runner.cleanup()


class RunningCache:
    """A cache of the texts under `key`, and the changes that it reported."""

    def __init__(self, scripted: ScriptedServer) -> None:
        self.changes: list[tuple[str | None, str | None]] = []
        self.raises: list[Exception] = []
        configuration = client.Configuration(host=f"http://127.0.0.1:{scripted.port}")
        self.server = ApiServer(configuration)
        self.cache: WatchCache[str] = WatchCache(
            self.server, Collection(label="maps", path=PATH), trim=self._trim, changed=self._changed
        )
        self.task = asyncio.get_running_loop().create_task(self.cache.run())

    def _trim(self, item: Manifest) -> str:
        return as_text(as_text_map(item.get("data"), "data").get("key"), "key")

    def _changed(self, before: str | None, after: str | None) -> None:
        if self.raises:
            raise self.raises.pop()
        self.changes.append((before, after))

    def get(self, name: str) -> str | None:
        return self.cache.get(NamespacedName(namespace="ns", name=name))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.server.close()


@pytest_asyncio.fixture
async def running(scripted: ScriptedServer) -> AsyncIterator[RunningCache]:
    cache = RunningCache(scripted)
    yield cache
    await cache.close()


def event(kind: str, body: object) -> dict[str, object]:
    return {"type": kind, "object": body}


async def test_an_unreadable_object_is_ignored_and_logged_once(
    scripted: ScriptedServer, running: RunningCache, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.items = [stored("good", 3), stored("bad", 4, 10**30), {"metadata": {}}, "no object"]
    too_old = event("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    other_bad = stored("bad", 15, 8, uid="another")
    scripted.watches = [
        [event("MODIFIED", stored("good", 11, 5)), too_old],
        [event("MODIFIED", stored("bad", 12, 6)), event("MODIFIED", stored("bad", 13, "read"))],
        [
            event("DELETED", stored("bad", 14, 7)),
            event("ADDED", other_bad),
            event("ADDED", stored("late", 16)),
        ],
    ]
    await until("the last event", lambda: running.get("late") == "v")
    assert scripted.lists == 2
    errors = [line.getMessage() for line in caplog.records if line.levelno >= logging.ERROR]
    assert len([line for line in errors if "ns/bad" in line]) == 2, "once for each of two objects"
    assert f"maps: the operator cannot read ns/bad (data.key must be a text (got {10**30}))." in errors[0]
    assert len([line for line in errors if "an object without a name" in line]) == 1
    assert running.get("bad") is None
    assert ("v", None) in running.changes, "the object was readable before, but no longer is"


async def test_the_version_advances_past_unreadable_objects(
    scripted: ScriptedServer, running: RunningCache
) -> None:
    scripted.watches = [[event("ADDED", stored("bad", 21, 1))], []]
    await until("the next watch", lambda: len(scripted.watched_from) >= 2)
    assert scripted.watched_from[:2] == ["10", "21"]
    assert scripted.lists == 1


MALFORMED = [
    event("ADDED", None),
    event("ADDED", "text"),
    event("ADDED", {"metadata": None}),
    event("ADDED", {"metadata": {"name": "a", "uid": "u"}}),
    event("ADDED", {"metadata": {"name": 1, "uid": "u", "resourceVersion": "11"}}),
    event("BOOKMARK", {}),
    event("BOOKMARK", {"metadata": {"resourceVersion": 12}}),
    event("UNKNOWN", stored("a", 11)),
    {"type": ["ADDED"], "object": stored("a", 11)},
    event("ERROR", None),
    event("ERROR", {"code": "x"}),
    event("ERROR", {"code": 500, "message": "no"}),
    {"type": "ADDED"},
    ["no", "event"],
]


@pytest.mark.parametrize("malformed", MALFORMED, ids=json.dumps)
async def test_a_malformed_event_causes_a_new_list(
    scripted: ScriptedServer, running: RunningCache, malformed: object
) -> None:
    scripted.watches = [[malformed]]
    await until("the first list", running.cache.synced.is_set)
    scripted.items = [stored("after", 12)]
    scripted.version = "12"
    scripted.watches.append([event("ADDED", stored("later", 13))])
    await until("the cache follows", lambda: running.get("later") == "v")
    assert not running.task.done()


@pytest.mark.parametrize("items", [5, [5], ["x"], [None], {"a": 1}], ids=json.dumps)
async def test_a_malformed_list_does_not_stop_the_cache(
    scripted: ScriptedServer, running: RunningCache, items: object
) -> None:
    scripted.items = items  # type: ignore[assignment]  # what no API server should answer
    await until("lists", lambda: scripted.lists >= 1)
    scripted.items = [stored("after", 12)]
    scripted.watches = [[event("ERROR", {"code": 410, "message": "too old"})]]
    await until("the cache follows", lambda: running.get("after") == "v")
    assert not running.task.done()


async def test_changes_are_reported_after_a_logged_exception(
    scripted: ScriptedServer, running: RunningCache, caplog: pytest.LogCaptureFixture
) -> None:
    """A change whose report failed is not lost: the next list reports all objects again."""
    scripted.items = [stored("a", 3, "a"), stored("b", 4, "b")]
    await until("the first list", running.cache.synced.is_set)
    running.changes.clear()
    running.raises = [ZeroDivisionError("a defect")]
    scripted.items = [stored("a", 11, "A"), stored("b", 4, "b")]
    scripted.watches = [[event("MODIFIED", stored("a", 11, "A"))]]
    await until("both are reported", lambda: len(running.changes) == 2)
    assert running.get("a") == "A"
    assert "a defect of the operator" in caplog.text
    assert not running.task.done()


async def test_non_numeric_versions_are_followed(scripted: ScriptedServer, running: RunningCache) -> None:
    """An aggregated API server has no ordered versions; the last event counts."""
    scripted.version = "opaque-a"
    scripted.items = [stored("a", "opaque-a", "first")]
    scripted.watches = [
        [event("MODIFIED", stored("a", "opaque-0", "second")), event("ADDED", stored("b", "x"))]
    ]
    await until("the second watch", lambda: len(scripted.watched_from) == 2)
    assert (running.get("a"), running.get("b")) == ("second", "v")
    assert scripted.watched_from == ["opaque-a", "x"]
    running.cache.store_written({**stored("a", "opaque-z", "written")})
    assert running.get("a") == "second", "the watch will show it"
    assert running.cache.has_seen(NamespacedName(namespace="ns", name="a"), 0)


async def test_an_unreadable_answer_to_a_write_raises_only_declared_errors(running: RunningCache) -> None:
    running.cache.store_written(stored("a", 99, 5))
    assert running.get("a") is None
    with pytest.raises(UnreadableError):
        running.cache.store_written({"kind": "Status"})
