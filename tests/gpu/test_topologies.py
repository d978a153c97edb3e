"""Tests that every topology gives the tokens of one GPU, reports its times, and names a killed rank."""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_contract import names as contract
from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.plan import Device, Mode
from tests.bench.leftovers import observe, wait_gone
from tests.gpu.asking import BF16_GAP, BF16_SHARE, bf16_gaps, generate, score, texts_of
from tests.gpu.conftest import References
from tests.gpu.reference import ALL_PROMPTS, MAX_TOKENS
from tests.gpu.report import Report
from tests.gpu.scrape import Scrape, scrape
from tests.gpu.started_groups import Served
from tests.gpu.topologies import SLEEPERS_KV_BYTES, TOPOLOGIES, Topology
from tests.integration.worker import deaths as death
from tests.integration.worker.groups import Group, fetch

FLOAT32_GAP = 0.01
"""Largest difference of logprobs from stock vLLM's. Another order of float32 sums causes 5e-5 (CPU,
2026-11-21); a wrong token in a rank's history caused up to 14.5 (facts: Sampling in mixed TP)."""
HOP_VALUES = 2 * 256
"""Bytes of a token: hidden states and residual, 256 wide."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def topologies(choose: Callable[[Topology], bool]) -> pytest.MarkDecorator:
    """Returns the parametrization of a test with the topologies that `choose` accepts."""
    return pytest.mark.parametrize(
        "topology",
        [
            pytest.param(topology, id=topology.name, marks=[pytest.mark.gpus2] if topology.gpus > 1 else [])
            for topology in TOPOLOGIES
            if choose(topology)
        ],
    )


@topologies(lambda topology: topology.dtype == "float32")
def test_greedy_tokens_equal_those_of_transformers_and_stock_vllm(
    served: Served, references: References, report: Report
) -> None:
    """The group gets all prompts at the same time, and then again, so that its prefix cache answers."""
    exact = references["transformers"].result()
    stock = references["float32"].result()
    row = report.row(served.topology)
    for _ in range(2):
        got = generate(served.group, [answer.prompt for answer in exact])
        equal = sum(
            a == b for g, e in zip(got, exact, strict=True) for a, b in zip(g.tokens, e.tokens, strict=True)
        )
        row.equal_tokens = min(equal, row.equal_tokens or equal)
        row.all_tokens = len(ALL_PROMPTS) * MAX_TOKENS
        assert [g.tokens for g in got] == [e.tokens for e in exact]
        row.largest_gap = max(
            abs(a - b)
            for g, s in zip(got, stock, strict=True)
            for a, b in zip(g.logprobs, s.logprobs, strict=True)
        )
        assert row.largest_gap < FLOAT32_GAP
    assert [answer.tokens for answer in stock] == [answer.tokens for answer in exact]


@topologies(lambda topology: topology.mode is Mode.TENSOR)
def test_metrics_and_log_show_the_transport_of_the_bridge(served: Served) -> None:
    """Metrics and log show the transport between the ranks of a stage: shared memory by default."""
    way = dict(served.topology.env).get(contract.ENV_BRIDGE, "shared_memory")
    plan = served.group.plan
    for stage in range(plan.pipeline_parallel_size):
        ranks = plan.stage(stage)
        line = f"(ranks {[rank.rank for rank in ranks]}): the bridge uses {way}, because"
        for rank in ranks:
            assert line in served.group.children[rank.pod].log.read_text(), served.group.logs()
            seen = scrape(served.group, rank.rank)
            assert seen.total(names.TRANSPORT_INFO, between="ranks", path=way) == 1, seen.text


@topologies(lambda topology: topology.mode is Mode.PIPELINE and topology.tensor > 1)
def test_metrics_show_the_transport_of_nccl_on_gpus_only(
    served: Served, request: pytest.FixtureRequest
) -> None:
    """Metrics and the group's report show the transport of NCCL for GPUs that share a stage.

    Other ranks have no such transport.
    """
    as_cpu = request.config.getoption("--devices-as-cpu")
    reported = {rank.rank: rank.transports for rank in served.group.status().ranks}
    for rank in served.group.plan.ranks:
        seen = scrape(served.group, rank.rank)
        found = [labels["path"] for labels, _ in seen.samples(names.TRANSPORT_INFO, between="ranks")]
        ways = [path for path in found if path.startswith("nccl_")]
        assert bool(ways) == (rank.device is Device.GPU and not as_cpu), seen.text
        of_nccl = [each for each in reported[rank.rank] if each.startswith("ranks:nccl_")]
        assert of_nccl == [f"ranks:{path}" for path in sorted(ways)], "in the report to the operator"
        assert seen.total(names.LOCKED_MEMORY_LIMIT_BYTES) > 0, seen.text


@topologies(lambda topology: topology.dtype == "bfloat16")
def test_bf16_logprobs_are_near_those_of_stock_vllm(
    served: Served, references: References, report: Report
) -> None:
    """Compares the best token at every position of the answer of stock vLLM on one GPU."""
    stock = references["bfloat16"].result()
    got = score(served.group, texts_of(stock), best=5)
    gaps = bf16_gaps(stock, got)
    assert len(gaps) >= len(ALL_PROMPTS) * MAX_TOKENS
    row = report.row(served.topology)
    row.within_bar = sum(gap <= BF16_GAP for gap in gaps) / len(gaps)
    assert row.within_bar >= BF16_SHARE, sorted(gaps)[:: len(gaps) // 20]


@topologies(lambda topology: topology.mode is Mode.TENSOR and topology.dtype == "float32")
def test_ranks_agree_on_sampled_tokens(served: Served, references: References) -> None:
    """Temperature 1 with a seed gives the same answer twice.

    If a rank had continued with a token of its own, its later logprobs would belong to another text. So the
    test computes the logprobs again from the text of the answer, and compares them.
    """
    prompts = [answer.prompt for answer in references["transformers"].result()]
    first = generate(served.group, prompts, temperature=1.0, seed=7)
    again = generate(served.group, prompts, temperature=1.0, seed=7)
    other = generate(served.group, prompts, temperature=1.0, seed=8)
    assert [g.tokens for g in first] == [g.tokens for g in again]
    assert [g.tokens for g in first] != [g.tokens for g in other]
    texts = [[*prompt, *g.tokens] for prompt, g in zip(prompts, first, strict=True)]
    for text, positions, sampled in zip(texts, score(served.group, texts), first, strict=True):
        start = len(text) - MAX_TOKENS
        forced = [positions[i - 1][text[i]] for i in range(start, len(text))]
        assert max(abs(a - b) for a, b in zip(forced, sampled.logprobs, strict=True)) < FLOAT32_GAP


@topologies(lambda topology: True)
def test_times_and_bytes_of_every_rank_add_up(served: Served, references: References) -> None:
    """On every rank, the parts of a step add up to its time. Each hop receives as many bytes as were sent."""
    prompts = [answer.prompt for answer in references[served.topology.dtype].result()]
    generate(served.group, prompts)
    plan = served.group.plan
    found = [scrape(served.group, rank.rank) for rank in plan.ranks]
    for rank, seen in zip(plan.ranks, found, strict=True):
        step, compute, wait = (
            {
                phase: seen.total(name + "_sum", phase=phase, device=rank.device.value)
                for phase in (names.PHASE_PREFILL, names.PHASE_DECODE)
            }
            for name in (names.STEP_SECONDS, names.COMPUTE_SECONDS, names.WAIT_SECONDS)
        )
        transfer = seen.total(names.TRANSFER_SECONDS + "_sum")
        assert min(*step.values(), *compute.values()) > 0, seen.text
        spent = sum(compute.values()) + sum(wait.values()) + transfer
        # In tensor mode, the first step includes the time of the warm-up's last collective.
        exact = 1e-6 if served.topology.mode is Mode.PIPELINE else 0.02
        assert spent == pytest.approx(sum(step.values()), rel=exact), seen.text
        timed = seen.total(names.DEVICE_SECONDS + "_count")
        assert (timed > 0) == (rank.device is Device.GPU), seen.text
        assert seen.total(names.WEIGHT_BYTES) > 0
        stages = plan.pipeline_parallel_size > 1
        assert seen.total(names.TRANSPORT_INFO, between="stages") == stages, seen.text
    if plan.tensor_parallel_size == 1:
        check_hops(served, found)


def check_hops(served: Served, found: list[Scrape]) -> None:
    """Checks that each token's hidden states went from each stage to the next, and no other bytes."""
    tokens = found[0].total(names.TOKENS_TOTAL)
    hop_bytes = tokens * HOP_VALUES * ITEM_BYTES[served.topology.dtype]
    for rank, seen in enumerate(found):
        sent, received = (seen.total(names.TRANSFER_BYTES_TOTAL, direction=way) for way in ("send", "recv"))
        assert sent == (hop_bytes if rank + 1 < len(found) else 0)
        assert received == (hop_bytes if rank else 0)


@topologies(lambda topology: topology.sleeps)
def test_a_sleeping_group_frees_memory_and_wakes_with_the_same_tokens(
    served: Served, references: References
) -> None:
    """While the group sleeps, no pod is ready and the GPU frees its KV cache.

    After waking, the tokens are the same as before.
    """
    group = served.group
    exact = references["transformers"].result()
    group.post("/sleep?level=1", {})
    wait_until(group, lambda: {rank.phase for rank in group.status().ranks} == {RankPhase.SLEEPING})
    wait_until(group, lambda: not any(is_ready(group, pod.index) for pod in group.plan.pods))
    for rank in group.plan.ranks:
        if rank.device is Device.GPU:
            # As the allocator counts it, because other groups use the same GPU at the same time.
            log = group.children[rank.pod].log.read_text()
            freed = re.findall(r"CuMemAllocator: sleep freed ([\d.]+) GiB", log)
            assert freed, log[-6000:]
            assert float(freed[-1]) > 0.9 * SLEEPERS_KV_BYTES / 2**30
    group.post("/wake_up", {})
    wait_until(group, lambda: all(is_ready(group, pod.index) for pod in group.plan.pods))
    got = generate(group, [answer.prompt for answer in exact])
    assert [g.tokens for g in got] == [e.tokens for e in exact]


def is_ready(group: Group, pod: int) -> bool:
    return fetch(group.health_url(contract.PATH_READYZ, pod)) is not None


def wait_until(group: Group, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{group.logs()}"
        time.sleep(0.05)


@topologies(lambda topology: topology.kill is not None)
def test_a_killed_rank_is_reported(served: Served, references: References, report: Report) -> None:
    """The rank is killed while it decodes. Every pod names it within 2 s, and no process remains."""
    group, rank = served.group, served.topology.kill
    assert rank is not None
    pod = group.plan.ranks[rank].pod
    asked = {
        str(i): {"prompt_token_ids": list(a.prompt), "token_ids": list(a.tokens)}
        for i, a in enumerate(references[served.topology.dtype].result())
    }
    with ThreadPoolExecutor(len(asked)) as pool:
        requests = death.start_clients(group, asked, pool)
        held = observe([child.process.pid for child in group.children], group.log_dir)
        killed_at = time.time()
        os.kill(group.rank_pid(rank), signal.SIGKILL)
        death.wait_not_ready(group, killed_at)
        report.row(served.topology).ended_s = time.time() - killed_at
        for index, child in enumerate(group.children):
            code = child.process.wait(death.ENDED_WITHIN_S)
            failure = group.failure(index)
            assert failure is not None, group.logs()
            death.check_failure(failure, rank, killed_at)
            assert code == (contract.EXIT_RANK_FAILED if index == pod else contract.EXIT_PEER_FAILED)
        death.check_cut_off(requests)
    left = wait_gone(held, group.log_dir, group.scratch, time.monotonic() + death.ENDED_WITHIN_S)
    assert not left
