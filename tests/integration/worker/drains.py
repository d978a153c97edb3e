"""Stops a real group: running requests must get all of their tokens, and new ones must be refused.

Tests of several groups end with it.
"""

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from heteroinfer_contract import names
from tests.integration.worker.groups import ANSWER_TIMEOUT_S, Group, fetch

LONG = 1000
"""Number of tokens that take longer than the seconds in which requests are still accepted."""
STOP_LIMIT_S = 15.0


def ask(group: Group, prompt: list[int], max_tokens: int) -> Any:
    """Sends a streaming request, and returns the open answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    stream = {"stream": True, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        group.url + "/v1/completions",
        json.dumps({**body, **stream}).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S)


def read(answer: Any) -> Iterator[tuple[list[int], str | None]]:
    """Yields the tokens of each event of a stream, and finally the finish reason, or "error" for an error."""
    with answer:
        for line in answer:
            text = line.decode().removeprefix("data: ").strip()
            if text and text != "[DONE]":
                event = json.loads(text)
                choice = event.get("choices", [{"token_ids": [], "finish_reason": "error"}])[0]
                yield choice["token_ids"] or [], choice["finish_reason"]


def refusal(group: Group, prompt: list[int]) -> tuple[int, str]:
    """Sends a short request, and returns status and text of the answer."""
    try:
        with ask(group, prompt, 1) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def check_drain(group: Group, prompt: list[int], tokens: list[int]) -> None:
    """Stops a group during a stream. The stream must get all of its tokens, and new requests must be refused.

    A request whose body never arrives must be refused, too, and must not delay the end.

    Args:
        group: group with space for LONG tokens beside the prompt.
        prompt: token ids of the stream's prompt.
        tokens: first expected tokens after it.
    """
    with ThreadPoolExecutor(1) as pool, half_a_request(group) as half:
        stream = read(ask(group, prompt, LONG))
        first, _ = next(stream)
        rest = pool.submit(list, stream)
        group.terminate()
        check_refused(group, prompt)
        assert not rest.done(), "the request ended too early for this test"
        parts = rest.result(timeout=240)
        assert half.recv(65536).startswith(b"HTTP/1.1 503 ")
    got = first + [token for part, _ in parts for token in part]
    assert parts[-1][1] == "length", f"{parts[-1]} after {len(got)} tokens\n{group.logs()}"
    assert len(got) == LONG
    assert got[: len(tokens)] == tokens
    stopped = [child.process.wait(STOP_LIMIT_S) for child in group.children]
    assert stopped == [names.EXIT_OK] * len(group.children), group.logs()


def half_a_request(group: Group) -> socket.socket:
    """Returns the connection of a client that sends one byte of a body of 1000."""
    url = urlsplit(group.url)
    client = socket.create_connection((url.hostname or "", url.port or 0), timeout=ANSWER_TIMEOUT_S)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000"
    )
    client.sendall(f"{head}\r\n\r\n{{".encode())
    return client


def check_refused(group: Group, prompt: list[int]) -> None:
    """Checks that pods become unready immediately, and refuse requests a moment later."""
    deadline = time.monotonic() + 5
    ready = group.health_url(names.PATH_READYZ)
    while fetch(ready) is not None:
        assert time.monotonic() < deadline, group.logs()
    while (answer := refusal(group, prompt))[0] == 200:
        assert time.monotonic() < deadline, group.logs()
    assert answer[0] == 503
    assert "takes no more requests" in answer[1]


def check_drain_timeout(group: Group, prompt: list[int], drain_s: float) -> None:
    """Stops a group during a stream that takes longer than the drain timeout.

    The group must end at the timeout.
    """
    stream = read(ask(group, prompt, LONG))
    next(stream)
    group.terminate()
    asked = time.monotonic()
    reasons: list[str | None] = []
    with contextlib.suppress(OSError, ValueError):  # it may be cut off in the middle of an event
        reasons += (reason for _, reason in stream)
    assert "length" not in reasons, "the group ended before its drain timeout"
    stopped = [child.process.wait(STOP_LIMIT_S) for child in group.children]
    assert time.monotonic() - asked < drain_s + STOP_LIMIT_S
    assert stopped == [names.EXIT_OK] * len(group.children), group.logs()
