"""Refusals of models of 2026: every reason that no memory can mend, before memory, and what would run."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.nodes.cpu_features import AMX, AVX512
from heteroinfer_operator.planning import Inventory, Planned
from tests.shapes.corpus_2026 import SHAPES_2026
from tests.shapes.profiles import recorded_profiles
from tests.unit.planning.planned_models import cpu, gpu, plan, spec

NODES = Inventory(cpu_features={role: frozenset({AMX, AVX512}) for role in ("cpu", "gpu")})
FEED_FORWARD: dict[str, Any] = {"parallelism": {"mode": "FeedForward"}}
HUGE = "3Ti"


def of_2026(name: str) -> ModelProfile:
    return recorded_profiles("profiles_2026.json")[name]


def beside_gpu(device: str, host: str, **fields: Any) -> dict[str, Any]:
    ranks = {"ranks": 1, "cpu": "56", "memory": host}
    return gpu(deviceMemory=device, feedForward=ranks, **fields)


def feed_forward(name: str, device: str, host: str, **fields: Any) -> Planned:
    return plan(spec(beside_gpu(device, host, **fields), **FEED_FORWARD), of_2026(name), NODES)


def refusal(name: str, *roles: dict[str, Any], inventory: Inventory = NODES, **fields: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(spec(*roles, **fields), of_2026(name), inventory)
    assert caught.value.reason == "UnsupportedModel"
    return caught.value.message.splitlines()


@pytest.mark.parametrize("name", [shape.name for shape in SHAPES_2026])
def test_asks_for_memory_only_if_memory_is_enough(name: str) -> None:
    """Earlier, refusals of 7 of these 20 models asked for more memory, although no amount of memory helps."""
    try:
        feed_forward(name, "24Gi", "224Gi")
    except PlanError as error:
        if error.reason == "InsufficientMemory":
            assert feed_forward(name, "1Ti", HUGE).plan


def test_a_refusal_names_the_mode_that_runs_the_model_with_its_memory() -> None:
    slow = Inventory(cpu_features={"cpu": frozenset({AVX512})})
    reason, ways = refusal("GLM-4.7-Flash", cpu(memory=HUGE, pods=2), inventory=slow)
    assert "AMX is needed on CPUs for multi-head latent attention" in reason
    assert ways == (
        "model: alternatives that can run it, with one request of 8,192 tokens: mode FeedForward, with a "
        "GPU of 6.72 GiB or more and 53.02 GiB of host memory; GPU roles only, with 62.43 GiB of GPU memory "
        "in all"
    )
    assert feed_forward("GLM-4.7-Flash", "6.8Gi", "54Gi").plan


def test_a_refusal_names_the_format_that_runs_the_model_with_its_size() -> None:
    slow = Inventory(cpu_features={"cpu": frozenset()})
    text = {"engine": {"args": ["--language-model-only"]}, "parallelism": {"mode": "Tensor"}}
    *_, ways = refusal("Qwen3.5-397B-A17B-FP8", cpu(memory=HUGE, pods=2), inventory=slow, **text)
    assert "the same model in bf16 (about 727 GiB), with the same roles" in ways


def test_suggests_nothing_for_a_model_that_vllm_cannot_load() -> None:
    (reason,) = refusal("Mistral-Small-4-119B", beside_gpu("80Gi", HUGE), **FEED_FORWARD)
    assert "contains a language model of type mistral4. vLLM 0.32 has no class for this type" in reason


def test_an_inner_class_is_checked_like_the_class_of_the_model() -> None:
    inside = replace(of_2026("Mistral-Small-4-119B"), text_architecture="DeepseekV3ForCausalLM")
    assert plan(spec(gpu(deviceMemory="1Ti")), inside, NODES).plan
    pooling = replace(inside, text_architecture="Qwen3ForSequenceClassification")
    with pytest.raises(PlanError, match="for embeddings or scores"):
        plan(spec(gpu(deviceMemory="1Ti")), pooling, NODES)
    of_gpus = replace(inside, text_architecture="MiniMaxM3SparseForCausalLM")
    with pytest.raises(
        PlanError, match="MiniMaxM3SparseForCausalLM: vLLM's classes for this model are for GPUs only"
    ):
        plan(spec(gpu(), cpu(memory=HUGE)), of_gpus, NODES)


def test_a_model_with_silently_dropped_weights_is_refused_on_all_devices() -> None:
    (reason,) = refusal("Laguna-XS.2", gpu(deviceMemory="141Gi"))
    assert "silently drops the routers' bias (e_score_correction_bias)" in reason


def test_files_that_contradict_the_config_are_refused_with_both() -> None:
    reason, *_ = refusal("MiMo-V2.6-Flash", gpu(deviceMemory="1Ti"))
    assert reason == (
        "model: config.json names FP8 in blocks, but the files store the experts in MXFP4, groups of 32 "
        "weights. Use a copy whose config.json and files agree"
    )


def test_layers_with_an_index_do_not_count_as_full_attention() -> None:
    for name in ("Qwen3.8-Flash-Next", "GLM-5.3-Flash", "MiniMax-M3"):
        assert any("with sparse attention" in line for line in refusal(name, gpu(), cpu(memory=HUGE)))


def test_tables_of_n_grams_are_in_the_host_s_memory() -> None:
    memory = {"limits": {"memory": "64Gi"}}
    with pytest.raises(
        PlanError, match=r"role gpu: 33\.37 GiB of host memory is missing.*n-grams \(95\.37 GiB\)"
    ):
        plan(spec(gpu(deviceMemory="1Ti", resources=memory)), of_2026("Qwen3.8-Flash-Next"), NODES)
    planned = plan(spec(gpu(deviceMemory="300Gi")), of_2026("Qwen3.8-Flash-Next"), NODES)
    assert any("keeps the model's tables of n-grams (95.37 GiB)" in note for note in planned.notes)
    assert sum(rank.weight_bytes for rank in planned.plan.ranks) < 250 * 2**30
