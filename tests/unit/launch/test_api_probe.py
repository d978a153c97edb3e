"""The health check of vLLM's API server: no answer, a late answer, and a leader that was not scheduled."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import pytest

from vllm_heteroinfer.launch import api_probe


async def results(
    answer: bytes | None, awake_s: Callable[[], float], count: int, *, address: str = "127.0.0.1"
) -> tuple[list[bool], int]:
    """Returns the results of `count` checks, and the number of requests that the server got."""
    said: list[bool] = []
    asked = open_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, open_connections
        asked, open_connections = asked + 1, open_connections + 1
        if answer is not None:
            writer.write(answer)
        else:
            await reader.read()  # until the check ends the connection
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        open_connections -= 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    own = asyncio.get_running_loop().create_future()
    own.set_result(address)
    probe = asyncio.ensure_future(api_probe.probe_api(own, port, said.append, awake_s))
    async with asyncio.timeout(10):
        while len(said) < count:
            await asyncio.sleep(0.01)
        probe.cancel()
        while open_connections or not probe.done():
            await asyncio.sleep(0.01)
    server.close()
    return said[:count], asked


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_probe, "PROBE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(api_probe, "PROBE_INTERVAL_S", 0.01)


@pytest.mark.parametrize(
    ("answer", "healthy"), [(b"HTTP/1.1 200 OK\r\n", True), (b"HTTP/1.1 500 No\r\n", False), (b"", False)]
)
async def test_an_answer_counts_even_if_the_process_was_not_scheduled(answer: bytes, healthy: bool) -> None:
    said, asked = await results(answer, lambda: 0.0, 2)
    assert said == [healthy] * 2
    assert asked <= 3


async def test_a_server_that_answers_only_on_loopback_is_not_healthy() -> None:
    """A pod without IPv4 whose server listens on 0.0.0.0 refuses every client of its Service."""
    said, asked = await results(b"HTTP/1.1 200 OK\r\n", lambda: 0.0, 2, address="::1")
    assert said == [False] * 2
    assert asked == 0


async def test_a_late_answer_counts_as_missing() -> None:
    loop = asyncio.get_running_loop()
    said, asked = await results(None, loop.time, 2)
    assert said == [False] * 2
    assert asked <= 3


async def test_repeats_an_unscheduled_attempt_a_limited_number_of_times() -> None:
    said, asked = await results(None, lambda: 0.0, 1)
    assert said == [False]
    assert asked == api_probe.MAX_TRIES

    turns = itertools.chain([0.0, 0.0], itertools.count(1.0, 1.0))  # not scheduled in the first attempt
    said, asked = await results(None, lambda: next(turns), 1)
    assert said == [False]
    assert asked == 2
