"""Tests models of every attention kind and format on two CPU pods: stock vLLM's tokens, or a refusal.

The plan comes from the model's files, as `heteroinfer plan` makes it for nodes like this machine.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names as names_of_metrics
from heteroinfer_contract import names
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS
from tests.gpu.scrape import scrape
from tests.integration import forked_script
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.forked_python import Ended, forks
from tests.integration.served_models import stock
from tests.integration.served_models.cases import (
    ANSWER_TOKENS,
    CASES,
    FEED_FORWARD,
    LAYERS,
    LONGEST,
    Case,
)
from tests.integration.served_models.planning import plan, this_cpu
from tests.integration.worker.answers import ONE_THREAD
from tests.integration.worker.groups import WORKER_PYTHON, Group, start_group

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

MAX_SHARE_OF_STORED = 1.06
"""Bytes of packed experts as a share of their bytes in the checkpoint."""
SMALL_TABLES = 0.02
"""Tolerance for a rank's weights: padding of small layers, and the shapes and scales that vLLM keeps after
packing."""
LEAST_MARGIN_IN_16_BITS = 0.05
"""Smallest margin of the reference's tokens in float32, if the group computes in 16 bits, which rounds
logits. In float16, the difference of the two largest logits had an error of up to 0.027 (24 tokens of each
dense model in AWQ, FP8 per tensor and NVFP4, against float64; 2 cores of an EPYC with AVX512-BF16,
2026-11-28)."""
VLLMS_KERNELS = {names.ENV_CPU_LINEAR: "onednn"}
"""Our kernels for bf16 round differently, so stock vLLM's are replaced by torch. tests/integration/kernels
tests ours."""


def _forked(module: str, argument: Any, **env: str) -> Ended:
    """Runs `module.main` in a process of the worker's Python that has imported torch and transformers."""
    parent = forks(WORKER_PYTHON, forked_script.__name__, *forked_script.OTHERS)
    return parent.run(f"tests.integration.served_models.{module}", json.dumps(argument), env=env)


def make(case: Case, folder: Path) -> Path:
    """Makes a case's model, and checks its profile. Returns the folder."""
    model = folder / "model"
    made = _forked("tiny_models", [case.name, str(model)])
    assert (model / "config.json").exists(), made.errors[-4000:]
    profile = read_profile(model)
    assert {kind.attention for kind in profile.layers} >= case.kinds
    assert profile.scheme.name is case.scheme
    return model


def torchs_operations(dtype: str, *, rotary: bool) -> list[str]:
    """Returns the operations of stock vLLM on CPUs that torch replaces.

    In float32, torch replaces all of them, so that groups are not compared with themselves. In 16 bits, torch
    would round differently. So it replaces only the rotation of positions (`rotary`), where vLLM's own is
    wrong (patches/cpu_rope.py).
    """
    if dtype == "float32":
        return ["none"]
    return ["all", "-rotary_embedding"] if rotary else ["all"]


def ask_stock(
    engine: EngineSettings, prompts: Sequence[Sequence[int]], *, at_once: bool, rotary: bool
) -> tuple[list[list[int]], float]:
    """Returns the tokens of stock vLLM with a plan's dtype and lengths, and their smallest margin.

    Args:
        engine: engine settings of the plan.
        prompts: token ids.
        at_once: whether all prompts are sent at the same time.
        rotary: whether torch rotates positions in 16 bits, too.
    """
    options: dict[str, Any] = {
        "model": engine.model,
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "block_size": engine.block_size,
        "seed": engine.seed,
        "kv_cache_memory_bytes": 256 << 20,
        "compilation_config": {"custom_ops": torchs_operations(engine.dtype, rotary=rotary)},
    }
    question = {"options": options, "prompts": prompts, "tokens": ANSWER_TOKENS, "at_once": at_once}
    ended = _forked("stock", question, **stock.ENV)
    assert ended.lines, ended.errors[-4000:]
    assert ended.lines[-1].startswith("[[["), "\n".join([*ended.lines[-20:], ended.errors[-4000:]])
    tokens, margin = ended.answer()
    return tokens, margin


def ask_group(group: Group, prompts: Sequence[Sequence[int]], *, at_once: bool) -> list[list[int]]:
    """Returns the group's greedy tokens after each prompt."""
    with ThreadPoolExecutor(len(prompts) if at_once else 1) as pool:
        return list(pool.map(lambda prompt: group.complete(prompt, ANSWER_TOKENS), prompts))


def check_served(case: Case, folder: Path) -> None:
    """Checks that two pods, with the planner's layers, have the same answers as stock vLLM."""
    # With weights in float32, bf16 would round too much.
    answer = plan(make(case, folder), case.dtype if case.widened else "auto")
    planned = answer.plan
    assert [(rank.pod, rank.device, rank.num_layers) for rank in planned.ranks] == [
        (pod, Device.CPU, LAYERS // 2) for pod in (0, 1)
    ]
    # Sums in float32 may be in any order. In 16 bits, each step must have the same rows.
    at_once = planned.engine.dtype == "float32"
    stocks = planned.engine
    if case.widened:
        stocks = replace(stocks, model=f"{folder}/model-widened", dtype="float32")
    expected, margin = ask_stock(stocks, case.prompts, at_once=at_once, rotary=case.rotary_by_torch)
    check_answers_test_the_model(expected)
    if case.widened:
        check_margin(case, margin)
    kernels = {} if case.widened else VLLMS_KERNELS
    with start_group(planned, folder / "group", env={**ONE_THREAD, **kernels}) as group:
        group.wait_ready()
        assert ask_group(group, case.prompts, at_once=at_once) == expected
        stored = [scrape(group, rank.rank).total(names_of_metrics.WEIGHT_BYTES) for rank in planned.ranks]
    if case.scheme in FOUR_BITS:
        assert stored == pytest.approx(expected_bytes(answer, folder / "model"), rel=SMALL_TABLES)


def expected_bytes(planned: Planned, model: Path) -> list[int]:
    """Returns the bytes of each rank's tensors by the plan, as the metric counts them.

    The metric does not count the second copy of embedding and head, which the plan counts. It counts the
    table of positions, which no plan counts.
    """
    config = json.loads((model / "config.json").read_text())
    element_bytes = ELEMENT_BYTES[planned.plan.engine.dtype]
    positions = config["max_position_embeddings"] * config["head_dim"] * element_bytes
    stages = planned.plan.pipeline_parallel_size

    def second_copies(stage: int) -> int:
        on_cpu, on_gpu = (planned.sizes.table_bytes(stage, stages, each) for each in (Device.CPU, Device.GPU))
        return on_cpu - on_gpu

    return [rank.weight_bytes - second_copies(rank.stage) + positions for rank in planned.plan.ranks]


def check_served_with_feed_forward(case: Case, folder: Path) -> None:
    """Checks a rank with attention and a rank with all experts against stock vLLM in float32."""
    planned = feed_forward_plan(
        make(case, folder), num_layers=LAYERS, remote=range(LAYERS), dtype=case.dtype, max_model_len=LONGEST
    )
    stocks = replace(planned.engine, model=f"{folder}/model-widened", dtype="float32")
    expected, margin = ask_stock(stocks, case.prompts, at_once=False, rotary=False)
    check_answers_test_the_model(expected)
    check_margin(case, margin)
    with start_group(planned, folder / "group", env=ONE_THREAD) as group:
        group.wait_ready()
        assert ask_group(group, case.prompts, at_once=False) == expected
        rank = scrape(group, 1)
    stored = sum(kind.routed_bytes for kind in read_profile(folder / "model").layers)
    assert rank.total(names_of_metrics.FEED_FORWARD_ROWS_TOTAL) > 0
    assert rank.total(names_of_metrics.WEIGHT_BYTES) <= MAX_SHARE_OF_STORED * stored


def check_answers_test_the_model(answers: Sequence[Sequence[int]]) -> None:
    """Checks that no answer is a repeated token and that all answers differ, so that they test the model."""
    assert all(len(set(tokens)) > ANSWER_TOKENS // 3 for tokens in answers), answers
    assert len({tuple(tokens) for tokens in answers}) == len(answers)


def check_margin(case: Case, margin: float) -> None:
    """Checks that rounding to the group's type cannot change a token of the reference in float32."""
    assert case.dtype == "float32" or margin >= LEAST_MARGIN_IN_16_BITS, (
        f"rounding may change a token of the reference (margin {margin:.4f}). Choose other prompts"
    )


def check_refused(case: Case, folder: Path) -> None:
    """Checks that the planner reports why these CPUs cannot run the model, and a fix."""
    with pytest.raises(PlanError) as refused:
        plan(make(case, folder))
    assert refused.value.reason == "UnsupportedModel"
    assert case.refused in refused.value.message
    remedies = ("GPU roles only", "the GPUs of one pod")
    assert any(remedy in refused.value.message for remedy in remedies)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if case.always else pytest.mark.served_models_matrix)
        for name, case in CASES.items()
        if case not in FEED_FORWARD
    ],
)
def test_two_pods_answer_as_stock_vllm_or_are_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    check = check_served if case.is_served(this_cpu()) else check_refused
    check(case, tmp_path)


@pytest.mark.parametrize("case", FEED_FORWARD, ids=lambda case: case.name)
def test_experts_of_feed_forward_ranks_answer_as_stock_vllm(case: Case, tmp_path: Path) -> None:
    check_served_with_feed_forward(case, tmp_path)
