"""Tests experts that a GPU copies from the memory of feed-forward ranks: unpacked weights, and tokens."""

import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names
from heteroinfer_contract.plan import BY_RATE, Device
from tests.gpu.asking import BF16_GAP, BF16_SHARE, bf16_gaps, score, texts_of
from tests.gpu.conftest import REFERENCE_ENV
from tests.gpu.machine import visible_gpus
from tests.gpu.reference import make
from tests.gpu.scrape import scrape
from tests.gpu.test_feed_forward import BF16_SPREAD, ENV, FLOAT32
from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.feed_forward.groups import ONE_THREAD, answers, make_model, reference, serving
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON, fetch, start_group

COUNTED_AFTER_S = 1.0
"""Feed-forward ranks publish their counters four times a second."""

CAPTURED_ROWS = 16
MIXED_PROMPTS = [
    [(7 * length + 13 * place) % 500 + 1 for place in range(length)]
    for length in (6, CAPTURED_ROWS - 1, CAPTURED_ROWS, CAPTURED_ROWS + 1, 26, 50, 58, 90, 122, 250, 280)
]
KV_BLOCKS, KV_BLOCK_BYTES = 19, tiny_models.LAYERS * 32 * 2 * 2 * 32 * 4
"""Fewer blocks than the shorter prompts and their answers need at the same time. A block has 32 tokens of 2
heads of 32 elements in float32."""

pytestmark = pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")


def test_unpacked_weights_equal_those_of_the_checkpoint() -> None:
    command = [str(WORKER_PYTHON), "-m", "tests.gpu.unpacked_weights"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) > 30
    assert not any(errors.values()), errors


def fixed_division(part: str) -> dict[str, str]:
    """Returns the variables with which the GPU computes a fixed part of the experts."""
    folders = [str(Path(__file__).parent / "fixed_division"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "GPU_PART": part}


@pytest.mark.parametrize("shares", [(BY_RATE,), (BY_RATE, BY_RATE)], ids=["one", "two"])
@pytest.mark.parametrize("by_experts", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize("part", ["0.5", "1"])
def test_tokens_equal_those_of_transformers(
    shares: tuple[int, ...], by_experts: bool, part: str, tmp_path: Path
) -> None:
    """In float32. The GPU computes experts in every step, because no CUDA graph is captured."""
    model = make_model("qwen3_moe", tmp_path)
    expected = reference(model)
    with serving(
        "qwen3_moe",
        model,
        tmp_path,
        shares=shares,
        by_experts=by_experts,
        device=Device.GPU,
        env={**ENV, **fixed_division(part)},
        eager_gpu=True,
        ring_bytes=1 << 20,
        extra_args=FLOAT32,
    ) as group:
        assert answers(group) == expected
        assert answers(group) == expected  # from the prefix cache
        total = scrape(group, 0).total
        assert total(metric_names.GPU_EXPERT_ROWS_TOTAL) > 0
        assert total(metric_names.GPU_EXPERT_BYTES_TOTAL) > 0
        time.sleep(COUNTED_AFTER_S)
        computed = scrape(group, 1).total(metric_names.FEED_FORWARD_EXPERTS_TOTAL)
        assert answers(group) == expected
        time.sleep(COUNTED_AFTER_S)
        more = scrape(group, 1).total(metric_names.FEED_FORWARD_EXPERTS_TOTAL) - computed
        assert (more > 0) == (part != "1")


@pytest.mark.parametrize("part", ["0.5", "1"])
def test_bf16_logprobs_are_near_those_of_stock_vllm(part: str, tmp_path: Path) -> None:
    """Compares the best token at every position of the answer of stock vLLM on the GPU alone."""
    model = make_model("qwen3_moe", tmp_path, "bfloat16", BF16_SPREAD)
    out, options = tmp_path / "stock.json", ("--dtype", "bfloat16")
    stock = make("vllm", model, out, *options, env=REFERENCE_ENV, give_up=threading.Event())
    with serving(
        "qwen3_moe",
        model,
        tmp_path / "group",
        device=Device.GPU,
        env={**ENV, **fixed_division(part)},
        eager_gpu=True,
        ring_bytes=1 << 20,
        dtype="bfloat16",
    ) as group:
        gaps = bf16_gaps(stock, score(group, texts_of(stock), best=5))
        assert scrape(group, 0).total(metric_names.GPU_EXPERT_ROWS_TOTAL) > 0
    within = sum(gap <= BF16_GAP for gap in gaps) / len(gaps)
    print(f"part {part}: {within:.1%} of {len(gaps)} positions within {BF16_GAP}, most {max(gaps):.3f}")
    assert within >= BF16_SHARE, sorted(gaps)[:: len(gaps) // 20]


@pytest.mark.parametrize("part", ["0.5", "1"])
def test_mixed_chunked_cached_and_preempted_requests_get_the_right_tokens(part: str, tmp_path: Path) -> None:
    """Only steps with more rows than the captured graphs use the GPU's experts.

    The prompts have fewer and more rows.
    """
    model = make_model("qwen3_moe", tmp_path)
    expected = reference(model, MIXED_PROMPTS)
    captured = json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, CAPTURED_ROWS]})
    plan = feed_forward_plan(
        model,
        num_layers=tiny_models.LAYERS,
        remote=range(tiny_models.LAYERS),
        device=Device.GPU,
        ring_bytes=1 << 20,
        eager_gpu=False,
        max_num_batched_tokens=64,
        extra_args=(*FLOAT32, "--compilation-config", captured),
    )
    asking = replace(plan.ranks[0], kv_cache_bytes=KV_BLOCKS * KV_BLOCK_BYTES)
    plan = replace(plan, ranks=(asking, *plan.ranks[1:]))
    with start_group(plan, tmp_path, env={**ONE_THREAD, **ENV, **fixed_division(part)}) as group:
        group.wait_ready()

        def ask_all() -> list[list[int]]:
            with ThreadPoolExecutor(len(MIXED_PROMPTS)) as pool:
                return list(pool.map(lambda p: group.complete(p, tiny_models.ANSWER_TOKENS), MIXED_PROMPTS))

        def engine_total(name: str) -> float:
            text = fetch(group.url + "/metrics") or ""
            lines = [line for line in text.splitlines() if line.startswith(name + "{")]
            assert lines, name
            return sum(float(line.split()[-1]) for line in lines)

        for _ in range(3):
            assert ask_all() == expected
        for prompt, answer in zip(MIXED_PROMPTS, expected, strict=True):
            for _ in range(2):  # the second time from the prefix cache
                assert group.complete(prompt, tiny_models.ANSWER_TOKENS) == answer
        assert scrape(group, 0).total(metric_names.GPU_EXPERT_ROWS_TOTAL) > 0
        assert engine_total("vllm:num_preemptions_total") > 0
        assert engine_total("vllm:prefix_cache_hits_total") > 0
