"""A real group that is asked to stop: what runs gets all of its tokens, what comes is refused."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from tests.integration.worker.conftest import Reference
from tests.integration.worker.groups import Group, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)

LONG = 1000
"""Tokens that take longer than the seconds in which requests are still taken."""
STOP_LIMIT_S = 15.0
DRAIN_S = 1.5


def ask(group: Group, prompt: list[int], max_tokens: int) -> Any:
    """Returns the open answer to a streaming request."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    stream = {"stream": True, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        group.url + "/v1/completions",
        json.dumps({**body, **stream}).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=120)


def read(answer: Any) -> Iterator[tuple[list[int], str | None]]:
    """Yields the tokens of each event of a stream, and why it ended in the last; "error" for an error."""
    with answer:
        for line in answer:
            text = line.decode().removeprefix("data: ").strip()
            if text and text != "[DONE]":
                event = json.loads(text)
                choice = event.get("choices", [{"token_ids": [], "finish_reason": "error"}])[0]
                yield choice["token_ids"] or [], choice["finish_reason"]


def refusal(group: Group, prompt: list[int]) -> tuple[int, str]:
    """Returns status and text of the answer to a short request."""
    try:
        with ask(group, prompt, 1) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_stream_under_way_gets_all_of_its_tokens(model: Path, reference: Reference, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], max_model_len=2048)
    with start_group(plan, tmp_path, env={"OMP_NUM_THREADS": "1"}) as group, ThreadPoolExecutor(1) as pool:
        group.wait_ready()
        expected = next(iter(reference.values()))
        prompt = expected["prompt_token_ids"]
        stream = read(ask(group, prompt, LONG))
        first, _ = next(stream)
        rest = pool.submit(list, stream)
        group.terminate()
        check_refused(group, prompt)
        assert not rest.done(), "the request was too short to tell"
        parts = rest.result(timeout=120)
        tokens = first + [token for part, _ in parts for token in part]
        assert parts[-1][1] == "length"
        assert len(tokens) == LONG
        assert tokens[:32] == expected["token_ids"]
        stopped = [child.process.wait(STOP_LIMIT_S) for child in group.children]
    assert stopped == [names.EXIT_STOPPED] * 2, group.logs()


def check_refused(group: Group, prompt: list[int]) -> None:
    """The pods are not ready at once, and refuse requests a moment later."""
    deadline = time.monotonic() + 5
    ready = f"http://127.0.0.1:{group.addresses[0].health_port}{names.PATH_READYZ}"
    while fetch(ready) is not None:
        assert time.monotonic() < deadline, group.logs()
    while (answer := refusal(group, prompt))[0] == 200:
        assert time.monotonic() < deadline, group.logs()
    assert answer[0] == 503
    assert "takes no more requests" in answer[1]


def test_past_the_drain_timeout_the_group_ends_anyway(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], max_model_len=2048)
    env = {"OMP_NUM_THREADS": "1", names.ENV_DRAIN_TIMEOUT: str(DRAIN_S)}
    with start_group(plan, tmp_path, env=env) as group:
        group.wait_ready()
        stream = read(ask(group, next(iter(reference.values()))["prompt_token_ids"], LONG))
        next(stream)
        group.terminate()
        asked = time.monotonic()
        reasons: list[str | None] = []
        with contextlib.suppress(OSError, ValueError):  # it may be cut off in the middle of an event
            reasons += (reason for _, reason in stream)
        assert "length" not in reasons, "it ended before the time was up"
        stopped = [child.process.wait(STOP_LIMIT_S) for child in group.children]
        assert time.monotonic() - asked < DRAIN_S + STOP_LIMIT_S
    assert stopped == [names.EXIT_STOPPED] * 2, group.logs()
