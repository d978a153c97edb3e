"""Requests of an API server that ends: counted, answered, refused."""

import asyncio
import json
from typing import Any

import pytest

from vllm_heteroinfer.engine import draining
from vllm_heteroinfer.engine.draining import STILL_TAKEN_S, Drain, DrainMiddleware


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
    """Answers once it is let go on."""
    if "gate" in scope:
        await scope["gate"].wait()
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def get(path: str = "/v1/completions", **scope: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await DrainMiddleware(app)({"type": "http", "path": path, **scope}, app, send)  # type: ignore[arg-type]
    return sent


def test_a_request_under_way_is_waited_for_to_its_end(clock: Clock) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        request = asyncio.ensure_future(get(gate=gate))
        await asyncio.sleep(0)
        draining.DRAIN.begin()
        clock.now_s += STILL_TAKEN_S + 5
        assert not draining.DRAIN.is_done()
        gate.set()
        assert (await request)[0]["status"] == 200
        assert draining.DRAIN.is_done()

    asyncio.run(scenario())


def test_requests_are_taken_for_a_moment_and_then_refused_in_words(clock: Clock) -> None:
    draining.DRAIN.begin()
    assert asyncio.run(get())[0]["status"] == 200
    assert not draining.DRAIN.is_done(), "more may be on their way"
    clock.now_s += STILL_TAKEN_S
    draining.DRAIN.begin()
    start, body = asyncio.run(get())
    assert start["status"] == 503
    assert (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == 503
    assert draining.DRAIN.is_done()


def test_health_is_answered_to_the_end(clock: Clock) -> None:
    draining.DRAIN.begin()
    clock.now_s += STILL_TAKEN_S
    assert asyncio.run(get("/health"))[0]["status"] == 200


def test_a_server_that_is_not_asked_to_drain_is_never_done(clock: Clock) -> None:
    clock.now_s += 1e6
    assert asyncio.run(get())[0]["status"] == 200
    assert not draining.DRAIN.is_done()


def test_a_realtime_connection_is_closed(clock: Clock) -> None:
    draining.DRAIN.begin()
    clock.now_s += STILL_TAKEN_S
    assert asyncio.run(get(type="websocket")) == [{"type": "websocket.close", "code": 1001}]
