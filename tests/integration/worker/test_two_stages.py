"""Tests two equal stages in one group: tokens, batches, metrics, vLLM's features, a stop during a request.

Each feature of vLLM works here, or is refused with a message (tests/unit/worker).
"""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.names import ENV_DRAIN_TIMEOUT
from tests.integration.worker.answers import ONE_THREAD, answer_all, samples, shared_memory
from tests.integration.worker.conftest import Reference
from tests.integration.worker.drains import check_drain
from tests.integration.worker.groups import Group, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)

LONG = 512
"""Number of tokens of an answer that takes longer than requests need to arrive."""
HOP_BYTES = 2 * 256 * 4
"""Bytes of a token: hidden states and residual, 256 wide, float32."""
SCHEMA = {
    "type": "object",
    "properties": {
        "device": {"enum": ["CPU", "GPU"]},
        "ready": {"type": "boolean"},
        "ranks": {"type": "array", "items": {"enum": [0, 1, 2, 3]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["device", "ready", "ranks"],
    "additionalProperties": False,
}
KEEP_ALIVE = ("--sse-keep-alive-interval", "1")
"""The operator sets this for plans with slow first tokens. Here, the interval is a second."""
CHOICES = ["pipeline", "tensor", "one rank after another"]


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    # The schema is compact, so that random weights end the object within the limit of tokens.
    compact = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    args = (*compact, *KEEP_ALIVE)
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], extra_args=args, max_model_len=2048)
    env = {**ONE_THREAD, ENV_DRAIN_TIMEOUT: "240"}  # on a busy machine, a stream may take minutes
    with start_group(plan, tmp_path_factory.mktemp("group"), env=env) as group:
        group.wait_ready()
        yield group


def test_tokens_batches_and_metrics_are_right(group: Group, reference: Reference) -> None:
    """The group has answered no request before."""
    answer_all(group, reference)
    answer_all(group, reference)  # now from the prefix cache, if it covers a block
    check_staggered(group, reference)
    check_metrics(group)


def check_staggered(group: Group, reference: Reference) -> None:
    """Checks that requests that arrive one step apart soon run as one batch.

    test_scheduler.py shows this step by step.
    """
    with ThreadPoolExecutor(len(reference)) as pool:
        futures = []
        for answer in reference.values():
            before, steps = decode_steps(group), group.status().ranks[0].steps
            futures.append(pool.submit(group.complete, answer["prompt_token_ids"], LONG))
            deadline = time.monotonic() + 30
            while group.status().ranks[0].steps == steps and time.monotonic() < deadline:
                time.sleep(0.01)
        got = [future.result()[:32] for future in futures]
    assert got == [answer["token_ids"] for answer in reference.values()]
    # Since the last request was sent. Two separate halves would need twice LONG steps.
    assert LONG - 1 <= decode_steps(group) - before < 1.6 * LONG


def decode_steps(group: Group) -> int:
    """Returns the number of decode steps of the first rank."""
    text = fetch(group.metrics_url(0) + "/metrics")
    assert text is not None
    return int(samples(text, names.STEP_SECONDS + "_count").get(names.PHASE_DECODE, 0))


def check_metrics(group: Group) -> None:
    """Checks that every rank's times and counts add up."""
    for rank in (0, 1):
        text = fetch(group.metrics_url(rank) + "/metrics")
        assert text is not None
        step = samples(text, names.STEP_SECONDS + "_sum")
        compute = samples(text, names.COMPUTE_SECONDS + "_sum")
        wait = samples(text, names.WAIT_SECONDS + "_sum")
        transfer = samples(text, names.TRANSFER_SECONDS + "_sum")
        assert set(step) == {names.PHASE_PREFILL, names.PHASE_DECODE}
        total = sum(compute.values()) + sum(wait.values()) + sum(transfer.values())
        assert total == pytest.approx(sum(step.values()), rel=1e-6)
        assert all(value > 0 for value in compute.values())
        tokens = samples(text, names.TOKENS_TOTAL)
        # The prompt's last step gives the first new token. There are 8 answers of 32 tokens, and 4 of LONG.
        assert tokens[names.PHASE_DECODE] == 8 * 31 + 4 * (LONG - 1)
        direction = "send" if rank == 0 else "recv"
        sent = samples(text, names.TRANSFER_BYTES_TOTAL)
        assert sent == {direction: sum(tokens.values()) * HOP_BYTES}
        weight_bytes = samples(text, names.WEIGHT_BYTES)[""]
        assert weight_bytes == pytest.approx(4 * 3.15e6 + 512 * 256 * 4, rel=0.05)
        assert samples(text, names.KV_BLOCKS)[""] == 512  # 64 MiB / (4 layers x 32 KiB for a block)
        assert samples(text, names.HEARTBEAT_AGE_SECONDS)[""] < 2
        assert fetch(group.metrics_url(rank) + "/healthz") == "ok\n"
    # The last stage waits for the first one. The first one waits only for a free buffer.
    waits = [status.wait_s for status in group.status().ranks]
    assert waits[0] < waits[1]


def test_structured_output_works_over_stages(group: Group) -> None:
    """Requests for JSON of a schema and for a choice of a list run together, greedy and sampled.

    The last stage masks tokens.
    """
    questions = [(kind, sampling) for kind in ("json", "choice") for sampling in (0, 1, 2, 3)]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: ask(group, *question), questions))
    for (kind, _), answer in zip(questions, answers, strict=True):
        if kind == "choice":
            assert answer in CHOICES
            continue
        value = json.loads(answer)
        assert set(value) == {"device", "ready", "ranks"}
        assert value["device"] in {"CPU", "GPU"}
        assert isinstance(value["ready"], bool)
        assert 2 <= len(value["ranks"]) <= 3
        assert set(value["ranks"]) <= {0, 1, 2, 3}
    assert ask(group, "json", 0) == answers[0]  # greedy tokens do not depend on other requests
    assert ask(group, "json", 1) == answers[1]  # and neither do tokens with a seed


def ask(group: Group, kind: str, seed: int) -> str:
    """Returns an answer: greedy for seed 0, otherwise at temperature 1 with that seed."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which rank is it?"}],
        "max_tokens": 100,
        "temperature": 1 if seed else 0,
        "seed": seed,
    }
    if kind == "json":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "rank", "schema": SCHEMA, "strict": True},
        }
    else:
        body["structured_outputs"] = {"choice": CHOICES}
    text: str = group.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


def test_prefix_caching_works_over_stages(group: Group) -> None:
    """For a prompt that was computed before, every stage uses its KV cache, and the tokens are the same."""
    prompt = [3 + i * 7 % 500 for i in range(200)]
    first = group.complete(prompt)
    before, tokens = cached_tokens(group), [prompt_tokens(group, rank) for rank in (0, 1)]
    assert group.complete(prompt) == first
    assert cached_tokens(group) - before == 192  # six whole blocks of 32
    assert [prompt_tokens(group, rank) - old for rank, old in zip((0, 1), tokens, strict=True)] == [8, 8]


def cached_tokens(group: Group) -> float:
    """Returns the number of prompt tokens that the engine found in its cache."""
    text = fetch(group.url + "/metrics")
    assert text is not None
    (value,) = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def prompt_tokens(group: Group, rank: int) -> float:
    """Returns the number of prompt tokens that passed through a rank."""
    text = fetch(group.metrics_url(rank) + "/metrics")
    assert text is not None
    return samples(text, names.TOKENS_TOTAL).get(names.PHASE_PREFILL, 0.0)


def test_a_stream_that_waits_for_its_first_token_is_kept_alive(group: Group) -> None:
    """All slots for requests are in use, so the stream waits for its first token as with a long prompt."""
    seats = group.plan.engine.max_num_seqs
    with ThreadPoolExecutor(seats) as pool:
        others = [pool.submit(group.complete, [3 + i], 600) for i in range(seats)]
        deadline = time.monotonic() + 60
        while running(group) < seats and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = [line for line in stream(group, [400, 7], 4) if line]
        assert all(len(other.result()) == 600 for other in others)
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert first >= 1, lines
    assert set(lines[:first]) == {": keep-alive"}
    assert lines[-1] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in line for line in lines) == 1


def running(group: Group) -> float:
    """Returns the number of requests that the engine runs."""
    text = fetch(group.url + "/metrics")
    assert text is not None
    (value,) = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def stream(group: Group, prompt: list[int], max_tokens: int) -> Iterator[str]:
    """Yields the lines of an answer as they arrive."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        group.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            yield line.decode().strip()


def test_a_running_stream_gets_all_its_tokens(group: Group, reference: Reference) -> None:
    """This is the last test of the group. The group stops and leaves no shared memory."""
    expected = next(iter(reference.values()))
    before = shared_memory()
    check_drain(group, expected["prompt_token_ids"], expected["token_ids"])
    assert not shared_memory() - before
