"""Contradictions between config.json and headers, and other facts that the reader of a model finds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.model import AttentionKind, Scheme, SchemeName
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.model_profile import ModelProfile
from tests.shapes.corpus import shape, write_shape
from tests.shapes.corpus_2026 import SHAPES_2026
from tests.shapes.profiles import read_shape, recorded_profiles

MXFP4 = Scheme(name=SchemeName.MXFP4, bits=4, group=32)
SMALL = ("Gemma-4-31B-it", "Laguna-XS.2", "MiMo-V2.6-Flash", "Qwen3.8-Flash-Next", "DeepSeek-V4-Flash")


def read(directory: Path, name: str, **changed: Any) -> ModelProfile:
    """Returns the profile of a published model after changes of its config.json only."""
    found = shape(name)
    write_shape(found, directory)
    (directory / "config.json").write_text(json.dumps({**found.config, **changed}))
    return read_profile(directory)


def of_2026(name: str) -> ModelProfile:
    return recorded_profiles("profiles_2026.json")[name]


@pytest.mark.parametrize("name", SMALL)
def test_recorded_profiles_agree_with_the_files_of_the_models(name: str) -> None:
    found = next(each for each in SHAPES_2026 if each.name == name)
    assert read_shape(found) == of_2026(name)


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 256), ("hidden_size", 512)])
def test_names_a_size_of_the_config_that_the_embedding_contradicts(
    tmp_path: Path, field: str, value: int
) -> None:
    found = read(tmp_path, "Qwen3-0.6B", **{field: value})
    size = {"vocab_size": 151936, "hidden_size": 1024}[field]
    assert found.faults == (
        f"config.json has {field} {value}, but model.embed_tokens.weight has {size} in the files",
    )


def test_a_model_whose_config_and_files_agree_has_no_faults() -> None:
    assert not [name for name, found in recorded_profiles().items() if found.faults]


def test_names_unknown_layer_types(tmp_path: Path) -> None:
    types = ["full_attention"] * 27 + ["quantum_attention"]
    found = read(tmp_path, "Qwen3-0.6B", layer_types=types)
    assert found.faults == (
        "config.json has layer_types quantum_attention, whose memory the planner cannot compute",
    )


def test_reports_fp8_weights_that_the_config_does_not_name(tmp_path: Path) -> None:
    found = read(tmp_path, "Llama-3.1-8B-Instruct-FP8", quantization_config=None)
    assert len(found.faults) == 1
    assert "has no quantization_config, but the files store model.layers.0" in found.faults[0]


def test_reports_experts_in_a_format_that_the_config_does_not_name() -> None:
    found = of_2026("MiMo-V2.6-Flash")
    assert found.expert_scheme == MXFP4
    assert found.faults == (
        "config.json names FP8 in blocks, but the files store the experts in MXFP4, groups of 32 weights",
    )


def test_experts_of_deepseek_v4_have_a_format_of_their_own() -> None:
    found = of_2026("DeepSeek-V4-Flash")
    assert (found.scheme.name, found.scheme_of_experts, found.faults) == (SchemeName.FP8_BLOCK, MXFP4, ())


def test_refuses_a_size_of_zero() -> None:
    """GLM-5.3-Flash names no head_dim, and the default of its config class is 0."""
    found = of_2026("GLM-5.3-Flash")
    assert found.head_dim == 64
    assert [kind.attention for kind in found.layers].count(AttentionKind.SPARSE) == 11
    assert found.is_latent


def test_a_layer_with_an_index_and_keys_and_values_is_not_latent() -> None:
    for name, layers in (("Qwen3.8-Flash-Next", 12), ("MiniMax-M3", 57)):
        found = of_2026(name)
        assert [kind.attention for kind in found.layers].count(AttentionKind.SPARSE) == layers
        assert not found.is_latent


def test_the_table_of_n_grams_is_not_a_layer() -> None:
    found = of_2026("Qwen3.8-Flash-Next")
    assert found.host_table_bytes == 102_401_310_720
    assert sum(found.layer_bytes) < 260e9


def test_finds_the_class_of_the_language_model() -> None:
    assert of_2026("Kimi-K2.5").text_architecture == "DeepseekV3ForCausalLM"
    assert of_2026("Mistral-Small-4-119B").text_type == "mistral4"
    assert of_2026("Hy3-preview").text_type == ""


def test_profiles_of_earlier_versions_get_defaults_for_new_fields() -> None:
    stored = json.loads(of_2026("Hy3-preview").to_json())
    for name in ("expert_scheme", "text_architecture", "text_type", "host_table_bytes", "faults"):
        del stored[name]
    assert ModelProfile.from_json(json.dumps(stored)) == replace(of_2026("Hy3-preview"))
