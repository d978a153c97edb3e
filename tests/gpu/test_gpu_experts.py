"""Experts that a GPU copies from the memory of feed-forward ranks: unpacked weights, and right tokens."""

import json
import subprocess
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names
from heteroinfer_contract.names import ENV_GPU_PART
from heteroinfer_contract.plan import BY_RATE, Device
from tests.gpu.machine import visible_gpus
from tests.gpu.scrape import scrape
from tests.gpu.test_feed_forward import ENV, FLOAT32
from tests.integration.feed_forward.groups import answers, make_model, reference, serving
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

pytestmark = pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")


def test_unpacked_weights_are_those_of_the_checkpoint() -> None:
    command = [str(WORKER_PYTHON), "-m", "tests.gpu.unpacked_weights"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) > 30
    assert not any(errors.values()), errors


@pytest.mark.parametrize("shares", [(BY_RATE,), (BY_RATE, BY_RATE)], ids=["one", "two"])
@pytest.mark.parametrize("by_experts", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize("part", ["0.5", "1"])
def test_tokens_are_those_of_transformers(
    shares: tuple[int, ...], by_experts: bool, part: str, tmp_path: Path
) -> None:
    """In float32, in every step, since nothing is captured."""
    model = make_model("qwen3_moe", tmp_path)
    expected = reference(model)
    with serving(
        "qwen3_moe",
        model,
        tmp_path,
        shares=shares,
        by_experts=by_experts,
        device=Device.GPU,
        env={**ENV, ENV_GPU_PART: part},
        eager_gpu=True,
        ring_bytes=1 << 20,
        extra_args=FLOAT32,
    ) as group:
        assert answers(group) == expected
        assert answers(group) == expected  # from the prefix cache
        total = scrape(group, 0).total
        assert total(metric_names.GPU_EXPERT_ROWS_TOTAL) > 0
        assert total(metric_names.GPU_EXPERT_BYTES_TOTAL) > 0
        computed = scrape(group, 1).total(metric_names.FEED_FORWARD_EXPERTS_TOTAL)
        assert answers(group) == expected
        more = scrape(group, 1).total(metric_names.FEED_FORWARD_EXPERTS_TOTAL) - computed
        assert (more > 0) == (part != "1")
