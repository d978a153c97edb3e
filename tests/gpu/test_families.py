"""Tests mixtures of many families with experts on CPUs: the logprobs are those of stock vLLM on a GPU."""

import re
import threading
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.plan import Device
from tests.gpu import families
from tests.gpu.asking import BF16_GAP, BF16_SHARE, bf16_gaps, score, texts_of
from tests.gpu.conftest import REFERENCE_ENV
from tests.gpu.machine import visible_gpus
from tests.gpu.reference import ALL_PROMPTS, MAX_TOKENS, make
from tests.gpu.scrape import scrape
from tests.gpu.test_feed_forward import BF16_SPREAD, ENV
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.groups import start_group

pytestmark = pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")


def layers_with_experts(model: Path) -> list[int]:
    """Returns the indices of the layers with routed experts, by the names in the checkpoint."""
    found = set()
    for file in model.glob("*.safetensors"):
        header = file.read_bytes()
        size = int.from_bytes(header[:8], "little")
        names = re.findall(rb"layers\.(\d+)\.[a-z_.]*(?:experts[.\"]|input_linear)", header[8 : 8 + size])
        found |= {int(layer) for layer in names}
    return sorted(found)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logprobs_with_experts_on_cpus_are_those_of_stock_vllm(family: str, tmp_path: Path) -> None:
    model = families.make(family, tmp_path / family, BF16_SPREAD)
    out, options = tmp_path / "stock.json", ("--dtype", "bfloat16")
    stock = make("vllm", model, out, *options, env=REFERENCE_ENV, give_up=threading.Event())
    plan = feed_forward_plan(
        model,
        num_layers=families.LAYERS,
        remote=layers_with_experts(model),
        device=Device.GPU,
        eager_gpu=False,
        dtype="bfloat16",
    )
    with start_group(plan, tmp_path / "group", env=ENV) as group:
        group.wait_ready()
        gaps = bf16_gaps(stock, score(group, texts_of(stock), best=5))
        assert scrape(group, 1).total(names.FEED_FORWARD_ROWS_TOTAL) > 0
    assert len(gaps) >= len(ALL_PROMPTS) * MAX_TOKENS
    within = sum(gap <= BF16_GAP for gap in gaps) / len(gaps)
    print(f"{family}: {within:.1%} of {len(gaps)} positions within {BF16_GAP}, most {max(gaps):.3f}")
    assert within >= BF16_SHARE, sorted(gaps)[:: len(gaps) // 20]
