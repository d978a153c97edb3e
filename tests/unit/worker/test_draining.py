"""A server that drains counts and answers running requests, and refuses new requests."""

import asyncio
import json
from typing import Any

import pytest

from vllm_heteroinfer.engine import draining
from vllm_heteroinfer.engine.draining import BODY_TIMEOUT_S, STILL_ACCEPTED_S, Drain, DrainMiddleware


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(draining, "DRAIN", Drain(clock=clock))
    return clock


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers a request. Waits first if the scope has a gate."""
    if "gate" in scope:
        await scope["gate"].wait()
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def get(path: str = "/v1/completions", **scope: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await DrainMiddleware(app)({"type": "http", "path": path, **scope}, app, send)  # type: ignore[arg-type]
    return sent


def test_a_drain_waits_for_running_requests(clock: Clock) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        request = asyncio.ensure_future(get(gate=gate))
        await asyncio.sleep(0)
        draining.DRAIN.begin()
        clock.now_s += STILL_ACCEPTED_S + 5
        assert not draining.DRAIN.is_done()
        gate.set()
        assert (await request)[0]["status"] == 200
        assert draining.DRAIN.is_done()

    asyncio.run(scenario())


def test_a_drain_accepts_requests_for_a_moment_and_then_refuses_them_with_a_message(clock: Clock) -> None:
    draining.DRAIN.begin()
    assert asyncio.run(get())[0]["status"] == 200
    assert not draining.DRAIN.is_done(), "more requests may arrive"
    clock.now_s += STILL_ACCEPTED_S
    draining.DRAIN.begin()
    start, body = asyncio.run(get())
    assert start["status"] == 503
    assert (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == 503
    assert draining.DRAIN.is_done()


def test_health_requests_are_answered_until_the_end_of_the_drain(clock: Clock) -> None:
    draining.DRAIN.begin()
    clock.now_s += STILL_ACCEPTED_S
    assert asyncio.run(get("/health"))[0]["status"] == 200


def test_a_server_without_a_drain_request_never_drains(clock: Clock) -> None:
    clock.now_s += 1e6
    assert asyncio.run(get())[0]["status"] == 200
    assert not draining.DRAIN.is_done()


def test_a_realtime_connection_is_closed(clock: Clock) -> None:
    draining.DRAIN.begin()
    clock.now_s += STILL_ACCEPTED_S
    assert asyncio.run(get(type="websocket")) == [{"type": "websocket.close", "code": 1001}]


class Posted:
    """A request whose body has begun, and an app that reads the body and then answers."""

    def __init__(self) -> None:
        self.body: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        self.read: list[Any] = []
        self.body.put_nowait({"type": "http.request", "body": b"{", "more_body": True})

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers 400 to a client that leaves before the end of its body, as FastAPI does."""
        while True:
            self.read.append(await receive())
            if self.read[-1]["type"] == "http.disconnect" or not self.read[-1]["more_body"]:
                break
        status = 400 if self.read[-1]["type"] == "http.disconnect" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self) -> None:
        await DrainMiddleware(self.app)({"type": "http", "path": "/v1/completions"}, self.body.get, self.send)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if message["type"] == "http.response.start"]


def test_a_missing_request_body_does_not_delay_a_drain(clock: Clock) -> None:
    """The client gets an answer and its connection is closed.

    Clients that send the body in time are served.
    """

    async def scenario() -> None:
        slow, never = Posted(), Posted()
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            for request in (slow, never):
                group.create_task(request.run())
            await asyncio.sleep(0)
            draining.DRAIN.begin()
            clock.now_s += STILL_ACCEPTED_S + BODY_TIMEOUT_S - 0.1
            draining.DRAIN.refuse_late_bodies()
            slow.body.put_nowait({"type": "http.request", "body": b"}", "more_body": False})
            while not slow.sent:
                await asyncio.sleep(0)
            assert not never.sent
            assert not draining.DRAIN.is_done()
            clock.now_s += 0.1
            while not draining.DRAIN.is_done():
                draining.DRAIN.refuse_late_bodies()
                await asyncio.sleep(0)
        assert (slow.statuses, never.statuses) == ([200], [503])
        assert (b"connection", b"close") in never.sent[0]["headers"]

    asyncio.run(scenario())


def test_an_answer_that_began_before_the_request_body_ended_is_complete(clock: Clock) -> None:
    """An app may stream its answer while it still reads the request."""

    async def scenario() -> None:
        posted = Posted()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["more_body"]:
                pass
            await send({"type": "http.response.body", "body": b"all"})

        posted.app = app  # type: ignore[method-assign]
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(posted.run())
            await asyncio.sleep(0)
            draining.DRAIN.begin()
            clock.now_s += STILL_ACCEPTED_S + BODY_TIMEOUT_S
            draining.DRAIN.refuse_late_bodies()
            await asyncio.sleep(0.01)
            assert not draining.DRAIN.is_done()
            posted.body.put_nowait({"type": "http.request", "body": b"}", "more_body": False})
        assert posted.sent[-1] == {"type": "http.response.body", "body": b"all"}
        assert posted.statuses == [200]

    asyncio.run(scenario())
