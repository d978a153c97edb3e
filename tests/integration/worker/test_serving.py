"""Groups of real CPU ranks under real supervisors: their tokens, their metrics."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names as names
from tests.integration.worker.conftest import Reference
from tests.integration.worker.groups import Group, build_addresses, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""All pods share this machine: more threads than CPUs would spin against each other."""
LONG = 128
"""Tokens of an answer that takes longer than requests need to arrive."""
HOP_BYTES = 2 * 256 * 4
"""Of a token: hidden states and residual, 256 wide, float32."""


def answer_all(group: Group, reference: Reference) -> None:
    """Asks every prompt at once and compares every token."""
    with ThreadPoolExecutor(len(reference)) as pool:
        prompts = [answer["prompt_token_ids"] for answer in reference.values()]
        got = list(pool.map(group.complete, prompts))
    assert got == [answer["token_ids"] for answer in reference.values()]


def samples(text: str, name: str) -> dict[str, float]:
    """Returns a metric's values by phase or direction (`""` if it has neither)."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
        if match:
            labels: dict[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
            found[labels.get("phase", labels.get("direction", ""))] = float(match[2])
    return found


def test_two_even_stages(model: Path, reference: Reference, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        answer_all(group, reference)
        answer_all(group, reference)  # now from the prefix cache, where it covers a block
        check_staggered(group, reference)
        check_metrics(group)
    # 3 rounds of 4 prompts; the group is stopped, and left no shared memory or process behind
    assert not [path for path in Path("/dev/shm").iterdir() if "cpushm" in path.name]


def check_staggered(group: Group, reference: Reference) -> None:
    """Requests that come one step apart soon go as one batch; stock vLLM keeps two halves for good."""
    before = decode_steps(group)
    with ThreadPoolExecutor(len(reference)) as pool:
        futures = []
        for answer in reference.values():
            steps = group.status().ranks[0].steps
            futures.append(pool.submit(group.complete, answer["prompt_token_ids"], LONG))
            deadline = time.monotonic() + 30
            while group.status().ranks[0].steps == steps and time.monotonic() < deadline:
                time.sleep(0.01)
        got = [future.result()[:32] for future in futures]
    assert got == [answer["token_ids"] for answer in reference.values()]
    # From the first request's first step to the last one's last: two halves would need twice LONG.
    assert LONG - 1 <= decode_steps(group) - before < 1.6 * LONG


def decode_steps(group: Group) -> int:
    """Returns how many decode steps the first rank has run."""
    text = fetch(group.metrics_url(0) + "/metrics")
    assert text is not None
    return int(samples(text, names.STEP_SECONDS + "_count").get(names.PHASE_DECODE, 0))


def check_metrics(group: Group) -> None:
    """Every rank's times and counts add up."""
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
        # The first new token comes of the prompt's last step; 8 answers of 32 tokens, 4 of LONG.
        assert tokens[names.PHASE_DECODE] == 8 * 31 + 4 * (LONG - 1)
        direction = "send" if rank == 0 else "recv"
        sent = samples(text, names.TRANSFER_BYTES_TOTAL)
        assert sent == {direction: sum(tokens.values()) * HOP_BYTES}
        weight_bytes = samples(text, names.WEIGHT_BYTES)[""]
        assert weight_bytes == pytest.approx(4 * 3.15e6 + 512 * 256 * 4, rel=0.05)
        assert samples(text, names.KV_BLOCKS)[""] == 512  # 64 MiB / (4 layers x 32 KiB a block)
        assert samples(text, names.HEARTBEAT_AGE_SECONDS)[""] < 2
        assert fetch(group.metrics_url(rank) + "/healthz") == "ok\n"
    # The last stage waits for the first one; the first waits for nobody but a free buffer.
    waits = [status.wait_s for status in group.status().ranks]
    assert waits[0] < waits[1]


def test_three_uneven_stages_on_pods_of_two_and_one(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    plan = build_plan(model, layers=[2, 5, 1], pods=[2, 1])
    addresses = build_addresses(plan)
    with (
        socket.create_server(("127.0.0.1", addresses[0].metrics_port + 1)) as taken,
        start_group(plan, tmp_path, addresses=addresses, env=ONE_THREAD) as group,
    ):
        group.wait_ready()
        answer_all(group, reference)
        # Rank 1 found its metrics port taken, said so, and serves all the same.
        assert f"metrics port {taken.getsockname()[1]}" in group.children[0].log.read_text()
        assert fetch(group.metrics_url(0) + "/metrics") is not None
        assert fetch(group.metrics_url(2) + "/metrics") is not None


def test_two_stages_of_two_tensor_ranks(model: Path, reference: Reference, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[3, 5], pods=[2, 2], tensor=2)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        answer_all(group, reference)


def test_chat_and_long_prompts(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Prompts longer than a step are read in chunks, which overlap in the pipeline."""
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], max_num_batched_tokens=32)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        answer_all(group, reference)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert group.post("/v1/chat/completions", body)["usage"]["completion_tokens"] > 0
