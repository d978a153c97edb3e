"""Tests a GPU rank with feed-forward ranks on CPUs: tokens with CUDA graphs, and ranks killed in replays."""

import json
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.plan import BY_RATE, Device
from tests.gpu.asking import BF16_GAP, BF16_SHARE, bf16_gaps, score, texts_of
from tests.gpu.conftest import REFERENCE_ENV
from tests.gpu.machine import visible_gpus
from tests.gpu.reference import ALL_PROMPTS, MAX_TOKENS, make
from tests.gpu.scrape import scrape
from tests.integration.feed_forward.groups import (
    answers,
    answers_over_freeze,
    check_signal,
    make_model,
    reference,
    serving,
)
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

pytestmark = pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")

ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_SERVER_DEV_MODE": "1",
}
FLOAT32 = ("--attention-backend", "TRITON_ATTN")
BF16_SPREAD = 0.05
"""Standard deviation of the weights. With it, rounding alone moves logprobs by less than the limit."""


@pytest.mark.parametrize("shares", [(BY_RATE,), (BY_RATE, BY_RATE)], ids=["one", "two"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "llama"])
def test_cuda_graphs_give_the_tokens_of_transformers(
    architecture: str, shares: tuple[int, ...], tmp_path: Path
) -> None:
    model = make_model(architecture, tmp_path)
    expected = reference(model)
    with serving(
        architecture,
        model,
        tmp_path,
        shares=shares,
        device=Device.GPU,
        env=ENV,
        eager_gpu=False,
        extra_args=FLOAT32,
    ) as group:
        assert answers(group) == expected
        assert answers(group) == expected  # from the prefix cache
        rows = scrape(group, 1).total(names.FEED_FORWARD_ROWS_TOTAL)
        assert rows > 0
        failure = check_signal(group, len(shares), signal.SIGKILL)
        assert failure.reason is FailureReason.RANK_EXITED


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "llama"])
def test_bf16_logprobs_are_near_those_of_stock_vllm(architecture: str, tmp_path: Path) -> None:
    """Compares the best token at every position of the answer of stock vLLM on the GPU alone."""
    model = make_model(architecture, tmp_path, "bfloat16", BF16_SPREAD)
    out, options = tmp_path / "stock.json", ("--dtype", "bfloat16")
    stock = make("vllm", model, out, *options, env=REFERENCE_ENV, give_up=threading.Event())
    with serving(
        architecture,
        model,
        tmp_path / "group",
        device=Device.GPU,
        env=ENV,
        eager_gpu=False,
        dtype="bfloat16",
    ) as group:
        gaps = bf16_gaps(stock, score(group, texts_of(stock), best=5))
        assert scrape(group, 1).total(names.FEED_FORWARD_ROWS_TOTAL) > 0
    assert len(gaps) >= len(ALL_PROMPTS) * MAX_TOKENS
    within = sum(gap <= BF16_GAP for gap in gaps) / len(gaps)
    print(f"{architecture}: {within:.1%} of {len(gaps)} positions within {BF16_GAP}, most {max(gaps):.3f}")
    assert within >= BF16_SHARE, sorted(gaps)[:: len(gaps) // 20]


def test_sleep_and_wake_keep_the_number_of_asks(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    with serving(
        "qwen3_moe",
        model,
        tmp_path,
        device=Device.GPU,
        env=ENV,
        eager_gpu=False,
        extra_args=(*FLOAT32, "--enable-sleep-mode"),
    ) as group:
        expected = answers(group)
        group.post("/sleep?level=1", {})
        group.post("/wake_up", {})
        assert answers(group) == expected
        time.sleep(random.Random().uniform(0.0, 0.3))
        assert check_signal(group, 0, signal.SIGKILL).reason is FailureReason.RANK_EXITED


def test_a_frozen_pod_continues_after_it_thaws(tmp_path: Path) -> None:
    """The GPU continues while the pod is frozen, so its kernels wait for the frozen feed-forward ranks."""
    model = make_model("qwen3_moe", tmp_path)
    expected = reference(model)
    with serving(
        "qwen3_moe",
        model,
        tmp_path,
        shares=(BY_RATE, BY_RATE),
        device=Device.GPU,
        env=ENV,
        eager_gpu=False,
        extra_args=FLOAT32,
    ) as group:
        assert answers_over_freeze(group, 3.0) == expected
        assert answers(group) == expected
        assert group.status().ready
        assert check_signal(group, 2, signal.SIGKILL).reason is FailureReason.RANK_EXITED


def test_a_kernel_gives_up_after_enough_checks_of_the_watching_thread_and_names_the_lane() -> None:
    command = [str(WORKER_PYTHON), "-m", "tests.bench.feed_forward", "frozen"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for case in ("no watch", "watch"):
        assert (found[case]["gave_up"], found[case]["right"]) == (2, False), found
        assert 1.0 <= found[case]["waited_s"] < 2.0, found
    assert (found["frozen watch"]["gave_up"], found["frozen watch"]["right"]) == (None, True), found
    assert found["frozen watch"]["waited_s"] >= 3.0, found
