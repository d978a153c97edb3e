"""Tests two GPU ranks of one pod, each with feed-forward ranks: tokens, and a rank killed during replays."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.plan import BY_RATE, Device
from tests.gpu.machine import visible_gpus
from tests.gpu.scrape import scrape
from tests.gpu.test_feed_forward import ENV, FLOAT32
from tests.gpu.test_gpu_experts import COUNTED_AFTER_S, fixed_division
from tests.integration.feed_forward.groups import answers, check_signal, make_model, reference, serving

pytestmark = [pytest.mark.gpus2, pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")]

ONE, TWO = (BY_RATE,), (BY_RATE, BY_RATE)
RING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A group of two GPU ranks.

    Attributes:
        shares: shares of the feed-forward ranks of each stage.
        tensor: number of GPU ranks of each stage.
        stages: number of layers of each stage.
        ring_bytes: part of each GPU's memory for experts that the GPU computes itself.
        kill: rank that is killed while the group decodes.
    """

    architecture: str
    shares: tuple[int, ...]
    tensor: int = 2
    stages: tuple[int, ...] = (3,)
    ring_bytes: int = 0
    kill: int = 2


PAIRS = {
    "tp2-experts": Pair(architecture="qwen3_moe", shares=TWO, kill=3),
    "tp2-shared-experts": Pair(architecture="qwen2_moe", shares=TWO, kill=2),
    "tp2-mlps": Pair(architecture="llama", shares=TWO + TWO, kill=1),
    "tp2-ring": Pair(architecture="qwen3_moe", shares=TWO, ring_bytes=RING_BYTES, kill=2),
    "pp2-experts": Pair(architecture="qwen3_moe", shares=ONE, tensor=1, stages=(1, 2), kill=3),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tokens_are_those_of_transformers_and_a_killed_rank_is_reported(name: str, tmp_path: Path) -> None:
    """In float32, with CUDA graphs, or without them if the GPUs copy half of the experts."""
    pair = PAIRS[name]
    model = make_model(pair.architecture, tmp_path)
    expected = reference(model)
    with serving(
        pair.architecture,
        model,
        tmp_path,
        shares=pair.shares,
        tensor=pair.tensor,
        stages=pair.stages,
        device=Device.GPU,
        env={**ENV, **(fixed_division("0.5") if pair.ring_bytes else {})},
        eager_gpu=pair.ring_bytes > 0,
        ring_bytes=pair.ring_bytes,
        extra_args=FLOAT32,
    ) as group:
        assert answers(group) == expected
        assert answers(group) == expected  # from the prefix cache
        time.sleep(COUNTED_AFTER_S)
        for rank in group.plan.ranks:
            if rank.feed_forward is not None:
                assert scrape(group, rank.rank).total(metric_names.FEED_FORWARD_ROWS_TOTAL) > 0, rank
            elif pair.ring_bytes:
                assert scrape(group, rank.rank).total(metric_names.GPU_EXPERT_BYTES_TOTAL) > 0, rank
        failure = check_signal(group, pair.kill, signal.SIGKILL)
        assert failure.reason is FailureReason.RANK_EXITED
