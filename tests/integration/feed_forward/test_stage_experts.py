"""Tests that CPU stages compute quantized experts with our kernels, for any instruction set of the CPU.

vLLM's own methods, parameters, loaders and choice of kernels run. Only the chosen kernel is ours.
"""

import pytest

from heteroinfer_contract.names import ENV_MAX_INSTRUCTIONS
from tests.integration.feed_forward.test_experts import FORMATS, ROUNDING, library
from tests.integration.kernels.probe_answers import ask_forked

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(600)]

PROBE = "tests.integration.feed_forward.stage_experts_probe"
_library = library
QUANTIZED = [name for name, (_, held) in FORMATS.items() if held not in {"bfloat16", "float16", "float32"}]


@pytest.mark.parametrize("name", QUANTIZED)
def test_experts_of_each_format_match_the_reference(name: str, library: list[str]) -> None:
    answer = ask_forked(PROBE, name, "silu", *library, env={ENV_MAX_INSTRUCTIONS: "avx2"})
    method, held = FORMATS[name]
    assert (answer["method"], answer["held"]) == (method, f"{held} (avx2)")
    assert answer["bytes"] <= 1.1
    assert set(answer["gaps"]) == {"one rank, 1 rows", "one rank, 9 rows"}
    assert max(answer["gaps"].values()) <= ROUNDING.get(name, 2.0**-7), answer["gaps"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("MXFP4", "swigluoai"), ("MXFP4", "limit"), ("FP8 in blocks", "limit"), ("int4, zero points", "gelu")],
)
def test_experts_with_each_activation_and_bias_match_the_reference(
    name: str, layout: str, library: list[str]
) -> None:
    answer = ask_forked(PROBE, name, layout, *library, env={ENV_MAX_INSTRUCTIONS: "avx2"})
    assert max(answer["gaps"].values()) <= 2.0**-7, answer["gaps"]


def test_experts_of_gpt_oss_in_a_stage_match_the_reference(library: list[str]) -> None:
    """Gates and ups alternate, both projections have biases, and gpt-oss' own loader runs."""
    answer = ask_forked(PROBE, "MXFP4 of gpt-oss", "gpt-oss", *library, env={ENV_MAX_INSTRUCTIONS: "avx2"})
    assert max(answer["gaps"].values()) <= 2.0**-7, answer["gaps"]
