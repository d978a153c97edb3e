"""Tests that feed-forward ranks read and compute experts of each format.

Ranks read by the recipe that vLLM's own loader produces. The tests replace vLLM's choice of a kernel by its
choice on a GPU; methods, parameters and loaders are vLLM's own.

Two formats are missing, because vLLM 0.32 cannot build them: GPTQ with zero points (AutoGPTQConfig refuses
it), and FP8 blocks of 128 that do not divide the intermediate columns (its loader fails).
"""

from typing import Any

import pytest

from heteroinfer_contract.names import ENV_MAX_INSTRUCTIONS
from tests.integration.kernels.instructions import CODED_SETS, emulated_library, of_this_cpu
from tests.integration.kernels.probe_answers import ask_forked
from vllm_heteroinfer.kernels import build

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(600)]

PROBE = "tests.integration.feed_forward.experts_probe"
FORMATS = {
    "bfloat16": ("UnquantizedFusedMoEMethod", "bfloat16"),
    "float16": ("UnquantizedFusedMoEMethod", "float16"),
    "float32": ("UnquantizedFusedMoEMethod", "float32"),
    "FP8 in blocks": ("Fp8MoEMethod", "FP8 in blocks"),
    "FP8 per tensor": ("Fp8MoEMethod", "FP8 per tensor"),
    "FP8 per channel": ("CompressedTensorsW8A8Fp8MoEMethod", "FP8 per channel"),
    "int8 per channel": ("CompressedTensorsW8A8Int8MoEMethod", "int8"),
    "int4, groups of 32": ("CompressedTensorsWNA16MoEMethod", "int4"),
    "int4, groups of 128": ("CompressedTensorsWNA16MoEMethod", "int4"),
    "int4, zero points": ("CompressedTensorsWNA16MoEMethod", "int4"),
    "AWQ": ("AutoAWQMoEMethod", "int4 (AWQ)"),
    "GPTQ": ("AutoGPTQMoEMethod", "int4 (GPTQ)"),
    "GPTQ, version 2": ("AutoGPTQMoEMethod", "int4 (GPTQ)"),
    "MXFP4": ("Mxfp4MoEMethod", "MXFP4"),
    "MXFP4, compressed-tensors": ("CompressedTensorsW4A4Mxfp4MoEMethod", "MXFP4"),
    "MXFP8": ("ModelOptMxFp8FusedMoE", "MXFP8"),
    "MXFP8, compressed-tensors": ("CompressedTensorsW8A8Mxfp8MoEMethod", "MXFP8"),
    "NVFP4": ("ModelOptNvFp4FusedMoE", "NVFP4"),
    "NVFP4, compressed-tensors": ("CompressedTensorsW4A4Nvfp4MoEMethod", "NVFP4"),
}
"""For each format, vLLM's method and our name."""
ROUNDING = {
    "float16": 2.0**-10,
    "float32": 2.0**-18,
    "AWQ": 2.0**-10,
    "GPTQ": 2.0**-10,
    "GPTQ, version 2": 2.0**-10,
}
"""Largest error as a share of the largest sum. Other formats have 2**-7, the error of bf16."""
CASES = ("one rank", "by columns", "by experts")


@pytest.fixture(scope="module")
def library() -> list[str]:
    """Yields the emulated library if this CPU lacks all supported instructions, or the package's own."""
    build.build()
    return [] if of_this_cpu(CODED_SETS) else [str(emulated_library())]


def check(answer: dict[str, Any], most: float, cases: tuple[str, ...] = CASES) -> None:
    assert answer["differing"] == [], "ranks read the same parameters as vLLM's own loader"
    assert set(answer["gaps"]) == {f"{case}, {rows} rows" for case in cases for rows in (1, 9)}
    assert all(gap <= most for gap in answer["gaps"].values()), answer["gaps"]


@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_each_format_match_the_reference(name: str, library: list[str]) -> None:
    answer = ask_forked(PROBE, name, "silu", *library)
    check(answer, ROUNDING.get(name, 2.0**-7))
    method, held = FORMATS[name]
    assert (answer["method"], answer["held"].rpartition(" (")[0]) == (method, held)


@pytest.mark.parametrize("name", FORMATS)
def test_two_gpus_divide_experts_of_each_format(name: str, library: list[str]) -> None:
    """Each GPU's ranks have the columns of its shard: 128 of 256, which ranks can share in smaller units."""
    answer = ask_forked(PROBE, name, "silu, two GPUs", *library)
    divided = "by columns, 1 rows" in answer["gaps"]
    check(answer, ROUNDING.get(name, 2.0**-7), CASES if divided else ("one rank", "by experts"))
    assert answer["held"].rpartition(" (")[0] == FORMATS[name][1]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("bfloat16", "gpt-oss"), ("MXFP4 of gpt-oss", "gpt-oss"), ("float32", "stacked"), ("float32", "relu2")],
)
def test_two_gpus_divide_experts_of_other_layouts(name: str, layout: str, library: list[str]) -> None:
    """gpt-oss has biases of w2, which only one GPU's ranks may add."""
    check(ask_forked(PROBE, name, f"{layout}, two GPUs", *library), ROUNDING.get(name, 2.0**-7))


@pytest.mark.parametrize("name", ["int4, zero points", "AWQ"])
def test_experts_with_one_zero_point_for_all_inputs_match_the_reference(
    name: str, library: list[str]
) -> None:
    answer = ask_forked(PROBE, name, "one group", *library)
    check(answer, ROUNDING.get(name, 2.0**-7), ("one rank", "by experts"))


@pytest.mark.parametrize("name", ["bfloat16", "FP8 in blocks", "GPTQ", "NVFP4"])
def test_experts_run_on_a_cpu_without_avx512(name: str, library: list[str]) -> None:
    answer = ask_forked(PROBE, name, "silu", *library, env={ENV_MAX_INSTRUCTIONS: "avx2"})
    check(answer, ROUNDING.get(name, 2.0**-7))
    assert answer["held"] == f"{FORMATS[name][1]} (avx2)"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swigluoai", "swiglustep", "relu2", "limit"])
def test_experts_with_each_activation_match_the_reference(activation: str, library: list[str]) -> None:
    check(ask_forked(PROBE, "bfloat16", activation, *library), 2.0**-7)


@pytest.mark.parametrize("layout", ["stacked", "stacked and transposed"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_ranks_read_a_tensor_that_has_all_experts(name: str, layout: str, library: list[str]) -> None:
    check(ask_forked(PROBE, name, layout, *library), ROUNDING.get(name, 2.0**-7))


@pytest.mark.parametrize("name", ["bfloat16", "MXFP4 of gpt-oss"])
def test_experts_of_gpt_oss_match_the_reference(name: str, library: list[str]) -> None:
    """Gates and ups alternate, both projections have biases, and gpt-oss' own loader runs."""
    answer = ask_forked(PROBE, name, "gpt-oss", *library)
    check(answer, 2.0**-7)
    assert answer["held"].startswith(name.partition(" ")[0])


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_experts_of_sizes_that_no_kernel_supports_are_refused(name: str, library: list[str]) -> None:
    """Torch computes 80 columns with biases, which ranks cannot share in blocks of 32."""
    answer = ask_forked(PROBE, name, "odd", *library)
    check(answer, ROUNDING.get(name, 2.0**-7), ("one rank", "by experts"))
    assert answer["held"] == f"{name} (torch)"
