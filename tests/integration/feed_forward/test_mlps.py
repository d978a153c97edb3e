"""Tests that feed-forward ranks read and compute MLPs of each format by the recipe of vLLM's own loader."""

from typing import Any

import pytest

from heteroinfer_contract.names import ENV_MAX_INSTRUCTIONS
from tests.integration.feed_forward.test_experts import ROUNDING, library
from tests.integration.kernels.probe_answers import ask_forked

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(600)]

__all__ = ["library"]  # the fixture

PROBE = "tests.integration.feed_forward.mlps_probe"
# Without NVFP4 of compressed-tensors, whose linear layers vLLM builds only on GPUs.
FORMATS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "FP8 in blocks": "FP8 in blocks",
    "FP8 per tensor": "FP8 per tensor",
    "FP8 per channel": "FP8 per channel",
    "int8 per channel": "int8",
    "int4, groups of 32": "int4",
    "int4, zero points": "int4",
    "AWQ": "int4 (AWQ)",
    "GPTQ": "int4 (GPTQ)",
    "MXFP4, compressed-tensors": "MXFP4",
    "MXFP8": "MXFP8",
    "NVFP4": "NVFP4",
}
"""Our name of each format of linear layers that vLLM also builds on a CPU."""
KINDS = (
    "float32; merged; silu; no",
    "float32; merged; gelu_tanh; bias",
    "float32; apart; gelu; bias",
    "float32; ungated; relu2; bias",
    "bfloat16; merged; gelu; bias",
    "bfloat16; ungated; gelu_tanh; no",
)


def ask(cases: list[str], library: list[str], **env: str) -> dict[str, Any]:
    answer: dict[str, Any] = ask_forked(PROBE, "".join(library), *cases, env=env)
    return answer


def check(name: str, answer: dict[str, Any]) -> None:
    limit = ROUNDING.get(name.partition(";")[0], 2.0**-7)
    assert answer["replaced"], name
    assert len(answer["gaps"]) == 4
    assert all(gap <= limit for gap in answer["gaps"].values()), (name, answer["gaps"])


def test_mlps_of_each_format_match_the_reference(library: list[str]) -> None:
    answers = ask([f"{name}; merged; silu; no" for name in FORMATS], library)
    for name, answer in answers.items():
        check(name, answer)
        assert answer["held"].rpartition(" (")[0] == FORMATS[name.partition(";")[0]]


def test_two_gpus_divide_mlps_of_each_format_and_structure(library: list[str]) -> None:
    """Each GPU's ranks have the columns of its shard; only one GPU's ranks add the bias of the last layer."""
    names = [f"{name}; merged; silu; no; two GPUs" for name in FORMATS]
    for name, answer in ask([*names, *(f"{kind}; two GPUs" for kind in KINDS)], library).items():
        check(name, answer)


def test_mlps_match_the_reference_on_a_cpu_without_avx512(library: list[str]) -> None:
    names = ["bfloat16; merged; silu; no", "FP8 in blocks; merged; silu; no"]
    for name, answer in ask(names, library, **{ENV_MAX_INSTRUCTIONS: "avx2"}).items():
        check(name, answer)
        assert answer["held"] == f"{name.partition(';')[0]} (avx2)"


def test_mlps_of_each_structure_match_the_reference(library: list[str]) -> None:
    for name, answer in ask(list(KINDS), library).items():
        check(name, answer)


def test_an_mlp_with_another_computation_is_refused_with_the_reason(library: list[str]) -> None:
    answers = ask(["refusals"], library)["refusals"]
    for encoder in ("audio_tower.layers.0.mlp", "whisper_encoder.layers.0.mlp"):
        assert answers.pop(encoder) == "none"
    assert answers.pop("") == "found"
    for changes, words in {
        "input": "must change its input and output only by linear layers",
        "output": "must change its input and output only by linear layers",
        "norm": "must have parameters only in linear layers (has scale)",
        "limit": "must have one of the activations silu, gelu, gelu_tanh, relu2",
        "activation": "must have one of the activations silu, gelu, gelu_tanh, relu2",
    }.items():
        text = answers.pop(changes)
        assert "layer 3: feed-forward ranks need one MLP that computes down(act(gate) * up)" in text
        assert words in text
        assert "Lower feedForward.layers" in text
    assert not answers
