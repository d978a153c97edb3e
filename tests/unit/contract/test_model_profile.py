"""Profiles: their JSON, profiles of published models, and the forms of config.json that are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.column_shares import column_unit_of
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from heteroinfer_contract.model import AttentionKind, LayerKind, Routing, Scheme, SchemeName
from heteroinfer_contract.model.attention import layer_attention
from heteroinfer_contract.model.config import from_params, text_config
from heteroinfer_contract.model.scheme import has_limited_experts, read_routing, read_scheme
from heteroinfer_contract.model_fetch import FetchedModel
from heteroinfer_contract.model_file_content import ModelFilesError
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.model_profile import ModelProfile
from tests.shapes.corpus import SHAPES, Shape, shape
from tests.shapes.profiles import read_shape, recorded_profiles
from tests.unit.contract.test_model_files import CONFIG, LAYERS, TENSORS, write_model, write_safetensors

OF_0_1_0: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "layer_bytes": [1000, 1000],
    "embedding_bytes": 65536,
    "head_bytes": 65536,
    "tied_head": False,
    "other_bytes": 128,
    "quantization": "",
}
"""What version 0.1.0 writes."""


@pytest.mark.parametrize("name", [found.name for found in SHAPES])
def test_every_profile_fits_a_termination_message(name: str) -> None:
    profile = recorded_profiles()[name]
    fetched = FetchedModel(commit="a" * 40, size_bytes=2**50, profile=profile)
    assert len(fetched.to_json().encode()) <= MAX_TERMINATION_MESSAGE_BYTES
    assert FetchedModel.from_json(fetched.to_json()) == fetched


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.1-8B-Instruct",
        "gemma-3-27b-it",
        "gpt-oss-20b",
        "DeepSeek-V2-Lite-Chat",
        "Nemotron-H-8B-Base-8K",
        "Mistral-7B-Instruct-v0.3 (consolidated)",
        "Qwen2.5-VL-7B-Instruct",
        "Qwen3-VL-8B-Instruct",
        "InternVL3-8B",
        "Llama-4-Scout-17B-16E-Instruct",
        "Llama-3.3-70B-Instruct-AWQ",
    ],
)
def test_recorded_profiles_equal_the_read_profiles(name: str) -> None:
    assert read_shape(shape(name)) == recorded_profiles()[name]


def test_a_profile_of_the_released_version_has_full_attention_in_every_layer() -> None:
    profile = ModelProfile.from_json(json.dumps(OF_0_1_0))
    assert profile.layers == (LayerKind(kv_heads=2, kv_width=32),) * 2
    assert not profile.has_state
    assert not profile.is_latent


def test_columns_are_unknown_in_a_profile_of_an_earlier_version() -> None:
    now = json.loads(recorded_profiles()["Qwen3-30B-A3B"].to_json())
    before = {name: value for name, value in now.items() if name != "column_unit"}
    before["kinds"] = [
        {name: value for name, value in kind.items() if name != "columns"} for kind in now["kinds"]
    ]
    profile = ModelProfile.from_json(json.dumps(before))
    assert (profile.column_unit, profile.layer(0).columns) == (0, 0)
    assert profile.layer(0).experts == 128


@pytest.mark.parametrize(
    "field",
    [
        {"of_a_later_version": {"a": [1]}},
        {"routing": "by telepathy"},
        {"scheme": {"name": "qubits", "bits": 2}},
        {"encoder_bytes": "much"},
        {"kinds": [{"attention": "Psychic"}], "kind_of_layer": [0, 0]},
        {"kind_of_layer": [7, 7]},
    ],
)
def test_an_invalid_field_of_a_profile_does_not_affect_other_fields(field: dict[str, Any]) -> None:
    known = {**OF_0_1_0, "dropped_bytes": 77}
    profile = ModelProfile.from_json(json.dumps({**known, **field}))
    assert profile.dropped_bytes == 77
    assert profile.layer_bytes == (1000, 1000)
    assert profile.layer(0).attention is AttentionKind.FULL


def test_values_narrower_than_keys_are_read() -> None:
    config = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 192,
        "sliding_window": 128,
        "hybrid_layer_pattern": [0, 1],
    }
    full, window = layer_attention(config)
    assert (full.kv_width, full.head_sizes) == (320, (192, 128))
    assert (window.kv_width, window.head_sizes) == (384, (192, 192))
    assert LayerKind(kv_width=256).head_sizes == (128, 128)


def test_recognizes_the_layers_of_published_models() -> None:
    profiles = recorded_profiles()
    deepseek = profiles["DeepSeek-V3"].layer(3)
    assert (deepseek.attention, deepseek.kv_heads, deepseek.kv_width) == (AttentionKind.LATENT, 1, 576)
    assert (deepseek.experts, deepseek.experts_per_token, deepseek.experts_quantized) == (256, 8, True)
    assert profiles["DeepSeek-V3"].layer(0).experts == deepseek.mlp_bytes == 0
    assert profiles["Llama-3.1-8B-Instruct"].layer(0).mlp_bytes == 3 * 4096 * 14336 * 2
    assert profiles["Mistral-7B-Instruct-v0.3 (consolidated)"].layer(0).mlp_bytes == 3 * 4096 * 14336 * 2
    assert profiles["phi-4"].layer(0).mlp_bytes == 3 * 5120 * 17920 * 2
    assert profiles["DeepSeek-V3"].scheme == Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=128)
    assert profiles["DeepSeek-V3"].routing is Routing.DEEPSEEK_V3
    gemma = [kind.attention for kind in profiles["gemma-3-27b-it"].layers[:7]]
    assert gemma == [*[AttentionKind.WINDOW] * 5, AttentionKind.FULL, AttentionKind.WINDOW]
    assert profiles["gemma-3-27b-it"].layer(0).window == 1024
    scout = profiles["Llama-4-Scout-17B-16E-Instruct"]
    assert [scout.layer(i).attention for i in (0, 3)] == [AttentionKind.CHUNKED, AttentionKind.FULL]
    state = profiles["Qwen3-Next-80B-A3B-Instruct"].layer(0)
    assert (state.conv_elements, state.state_elements) == (8192 * 3, 32 * 128 * 128)
    assert profiles["DeepSeek-V3.2"].layer(0).index_bytes == 132
    assert profiles["Qwen3-VL-8B-Instruct"].first_stage_layers == 3
    assert profiles["Qwen2.5-VL-7B-Instruct"].encoder == "images"


@pytest.mark.parametrize(
    ("fields", "zeros"), [({"symmetric": False}, True), ({"symmetric": True}, False), ({}, False)]
)
def test_packed_integers_have_zero_points_if_they_are_not_symmetric(
    fields: dict[str, bool], zeros: bool
) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **fields}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    }
    assert read_scheme(config, config) == Scheme(name=SchemeName.INT4, bits=4, group=32, zeros=zeros)


@pytest.mark.parametrize("found", SHAPES, ids=lambda found: found.name)
def test_columns_of_published_models_are_those_of_their_configs(found: Shape) -> None:
    text = text_config(from_params(found.config) if found.params else found.config)
    profile = recorded_profiles()[found.name]
    dense = text.get("intermediate_size")
    of_experts = text.get("moe_intermediate_size", dense)
    for kind in profile.layers:
        expected = of_experts if kind.experts else dense if kind.mlp_bytes else 0
        assert kind.columns == expected
    assert profile.column_unit == column_unit_of(found.config.get("quantization_config"))


def test_the_experts_that_a_step_reads_grow_with_its_tokens() -> None:
    kind = recorded_profiles()["Qwen3-30B-A3B"].layer(0)
    assert kind.expected_experts(1) == pytest.approx(8)
    assert kind.expected_experts(16) == pytest.approx(128 * (1 - (120 / 128) ** 16))
    assert kind.expected_experts(10_000) == pytest.approx(128)


def _nested(tmp_path: Path, outer: dict[str, Any], key: str, prefix: str) -> ModelProfile:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"}
    tensors = {f"{prefix}{name}": sizes for name, sizes in TENSORS.items()}
    return read_profile(write_model(tmp_path, config={**outer, key: text}, tensors=tensors))


@pytest.mark.parametrize(
    ("key", "prefix"),
    [("text_config", "language_model."), ("llm_config", "llm."), ("language_config", "language.")],
)
def test_reads_nested_configs_and_prefixes(tmp_path: Path, key: str, prefix: str) -> None:
    profile = _nested(tmp_path, {"architectures": ["Some"]}, key, prefix)
    plain = read_profile(write_model(tmp_path / "plain"))
    assert replace(profile, architecture=plain.architecture) == plain


def test_the_thinker_of_an_omni_model_is_served_and_its_talker_dropped(tmp_path: Path) -> None:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"}
    config = {
        "architectures": ["Qwen2_5OmniModel"],
        "thinker_config": {"text_config": text},
        "talker_config": {},
    }
    tensors = {f"thinker.{name}": sizes for name, sizes in TENSORS.items()}
    tensors |= {
        "talker.model.layers.0.mlp.up_proj.weight": [100],
        "thinker.audio_tower.layers.0.fc1.weight": [10],
    }
    profile = read_profile(write_model(tmp_path, config=config, tensors=tensors))
    assert profile.num_layers == 3
    assert (profile.encoder, profile.encoder_bytes, profile.dropped_bytes) == ("audio", 20, 200)


def test_consolidated_files_are_used_if_both_formats_exist(tmp_path: Path) -> None:
    write_model(tmp_path)
    params = {"dim": 8, "n_layers": 1, "head_dim": 4, "hidden_dim": 8, "n_heads": 2, "n_kv_heads": 1}
    (tmp_path / "params.json").write_text(json.dumps({**params, "vocab_size": 16, "max_seq_len": 64}))
    tensors = {
        "layers.0.attention.wq.weight": [8, 8],
        "output.weight": [16, 8],
        "tok_embeddings.weight": [16, 8],
    }
    write_safetensors(tmp_path / "consolidated.safetensors", tensors)
    profile = read_profile(tmp_path)
    assert (profile.architecture, profile.num_layers, profile.layer_bytes) == (
        "MistralForCausalLM",
        1,
        (128,),
    )
    assert (profile.head_bytes, profile.embedding_bytes, profile.max_position_embeddings) == (256, 256, 64)


def test_recognizes_a_head_called_output_layer(tmp_path: Path) -> None:
    tensors = {name.replace("lm_head", "transformer.output_layer"): size for name, size in TENSORS.items()}
    profile = read_profile(write_model(tmp_path, tensors=tensors))
    assert (profile.head_bytes, profile.tied_head, profile.other_bytes) == (256, False, 16)


def test_layers_for_speculation_are_dropped(tmp_path: Path) -> None:
    tensors = {**TENSORS, "mtp.layers.0.mlp.up_proj.weight": [50], "model.layers.3.eh_proj.weight": [50]}
    tensors["model.mtp_layers.0.mlp.up_proj.weight"] = [50]
    profile = read_profile(write_model(tmp_path, tensors=tensors))
    assert profile.dropped_bytes == 300
    assert profile.total_bytes == read_profile(write_model(tmp_path / "without")).total_bytes


@pytest.mark.parametrize(
    ("decoder", "encoder", "layers"),
    [
        ("llm.", "apm.", 3),
        ("language_model.", "encoder.", 3),
        ("", "model.sam_model.blocks.", 3),
        ("", "mm_whisper_embeddings.whisper_encoder.transformer.", 9),
        ("language_model.", "", 2),
    ],
)
def test_layers_of_an_encoder_do_not_count_as_decoder_layers(
    tmp_path: Path, decoder: str, encoder: str, layers: int
) -> None:
    stack = encoder if encoder.endswith("blocks.") else f"{encoder}layers."
    tensors = {f"{decoder}{name}": sizes for name, sizes in TENSORS.items()}
    tensors |= {f"{stack}{i}.fc1.weight": [10] for i in range(layers)}
    tensors |= {f"{encoder}conv1.weight": [5]} if encoder and not encoder.endswith("blocks.") else {}
    profile = read_profile(write_model(tmp_path, config={**CONFIG, "audio_token_id": 7}, tensors=tensors))
    plain = read_profile(write_model(tmp_path / "plain"))
    assert profile.layer_bytes == plain.layer_bytes
    assert (profile.total_bytes, profile.dropped_bytes) == (plain.total_bytes, 0)
    assert profile.encoder_bytes == sum(
        2 * sizes[0] for name, sizes in tensors.items() if len(sizes) == 1 and sizes[0] in (5, 10)
    )
    assert profile.encoder == "audio"


def test_finds_the_decoders_embedding_in_a_model_with_an_encoder(tmp_path: Path) -> None:
    tensors = {name: sizes for name, sizes in TENSORS.items() if "embed_tokens" not in name}
    tensors |= {"mm_whisper_embeddings.tok_embeddings.weight": TENSORS["model.embed_tokens.weight"]}
    tensors |= {f"mm_whisper_embeddings.whisper_encoder.layers.{i}.w1.weight": [10] for i in range(4)}
    profile = read_profile(write_model(tmp_path, tensors=tensors))
    assert (profile.embedding_bytes, profile.encoder_bytes, profile.encoder) == (256, 80, "audio")


def test_speech_that_is_not_served_is_dropped(tmp_path: Path) -> None:
    tensors = {**TENSORS, **{f"tts.model.layers.{i}.mlp.up_proj.weight": [50] for i in range(3)}}
    assert read_profile(write_model(tmp_path, tensors=tensors)).dropped_bytes == 300


def test_null_is_a_value_and_not_a_missing_field(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "mistral", "max_position_embeddings": 128}
    windows = read_profile(write_model(tmp_path / "left out", config=config))
    assert windows.layer(0).attention is AttentionKind.WINDOW, (
        "MistralConfig of transformers has a window by default"
    )
    full = read_profile(write_model(tmp_path / "null", config={**config, "sliding_window": None}))
    assert full.layer(0).attention is AttentionKind.FULL


GPT_2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 14,
    "n_embd": 1600,
    "n_head": 25,
    "n_positions": 2048,
}
"""Whose class's defaults are 12, 768, 12 and 1024."""


def test_an_alternative_name_of_a_field_takes_precedence_over_its_default(tmp_path: Path) -> None:
    tensors = {"wte.weight": [50257, 1600], **{f"h.{i}.attn.c_attn.weight": [1600] for i in range(14)}}
    profile = read_profile(write_model(tmp_path, config=GPT_2, tensors=tensors))
    assert (profile.num_layers, profile.hidden_size, profile.num_attention_heads) == (14, 1600, 25)
    assert (profile.head_dim, profile.max_position_embeddings, profile.vocab_size) == (64, 2048, 50257)
    assert profile.dropped_bytes == 0


def test_a_nested_config_takes_precedence_over_the_outer_config(tmp_path: Path) -> None:
    text = {name: value for name, value in GPT_2.items() if name != "architectures"}
    config = {"architectures": ["Some"], "num_hidden_layers": 2, "hidden_size": 8, "text_config": text}
    tensors = {"wte.weight": [50257, 1600], **{f"h.{i}.attn.c_attn.weight": [1600] for i in range(14)}}
    profile = read_profile(write_model(tmp_path, config=config, tensors=tensors))
    assert (profile.num_layers, profile.hidden_size) == (14, 1600)


def _kinds(directory: Path, **fields: Any) -> tuple[LayerKind, ...]:
    return read_profile(write_model(directory, config={**CONFIG, **fields})).layers


def _block(heads_in_group: int | None) -> dict[str, Any]:
    return {"attention": {"no_op": heads_in_group is None, "n_heads_in_group": heads_in_group}, "ffn": {}}


def test_reads_the_heads_of_each_block(tmp_path: Path) -> None:
    blocks = [_block(None), _block(2), _block(4)]
    fields = {"model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": blocks}
    profile = read_profile(write_model(tmp_path, config={**CONFIG, **fields}))
    assert [kind.attention for kind in profile.layers] == [AttentionKind.NONE, *[AttentionKind.FULL] * 2]
    assert [(kind.kv_heads, kind.kv_width) for kind in profile.layers] == [(0, 0), (2, 4), (1, 4)]
    assert profile.num_kv_heads == 2


def test_a_block_without_weights_has_no_bytes(tmp_path: Path) -> None:
    empty = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    fields = {"model_type": "nemotron-nas", "block_configs": [_block(2), empty, _block(4)]}
    tensors = {name: sizes for name, sizes in TENSORS.items() if ".layers.1." not in name}
    profile = read_profile(write_model(tmp_path, config={**CONFIG, **fields}, tensors=tensors))
    assert (profile.layer_bytes[1], profile.layer(1)) == (0, LayerKind(attention=AttentionKind.NONE))
    broken = {**CONFIG, **fields, "block_configs": [_block(2)] * 3}
    with pytest.raises(ModelFilesError, match=r"weights of layers 1 are missing"):
        read_profile(write_model(tmp_path, config=broken, tensors=tensors))


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": False}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True}, 2),
        ({"model_type": "falcon", "multi_query": False}, 2),
        ({"model_type": "dbrx", "num_key_value_heads": None, "attn_config": {"kv_n_heads": 1}}, 1),
    ],
)
def test_reads_key_and_value_heads_under_other_names(
    tmp_path: Path, fields: dict[str, Any], heads: int
) -> None:
    assert {kind.kv_heads for kind in _kinds(tmp_path, **fields)} == {heads}


def test_counts_two_attentions_per_layer(tmp_path: Path) -> None:
    fields = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_layers": LAYERS}
    kinds = _kinds(tmp_path, model_type="longcat_flash", **fields, num_hidden_layers=2 * LAYERS)
    assert [(kind.attention, kind.kv_width) for kind in kinds] == [(AttentionKind.LATENT, 1152)] * LAYERS


def test_counts_latents_that_are_stored_as_keys_and_values(tmp_path: Path) -> None:
    fields = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
    assert set(_kinds(tmp_path, model_type="minicpm3", **fields)) == {
        LayerKind(kv_heads=4, kv_width=192, mlp_bytes=kind.mlp_bytes, columns=kind.columns)
        for kind in _kinds(tmp_path / "plain")
    }


def test_finds_layers_with_full_attention_by_their_numbers(tmp_path: Path) -> None:
    kinds = _kinds(tmp_path, model_type="lfm2", full_attn_idxs=[1], conv_L_cache=3)
    full, linear = AttentionKind.FULL, AttentionKind.LINEAR
    assert [kind.attention for kind in kinds] == [linear, full, linear]
    assert [kind.conv_elements for kind in kinds] == [16, 0, 16]


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"max_position_embeddings": None, "max_sequence_length": 64}, 64),
        ({"seq_length": 64}, 64),
        ({"seq_length": 256}, 128),
        ({"model_max_length": 64}, 64),
        ({"model_max_length": 512}, 512),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 256),
        ({"rope_scaling": {"type": "dynamic", "factor": None}}, 128),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 128),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 128),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            256,
        ),
    ],
)
def test_the_longest_sequence_is_that_of_vllm(tmp_path: Path, fields: dict[str, Any], longest: int) -> None:
    profile = read_profile(write_model(tmp_path, config={**CONFIG, **fields}))
    assert profile.max_position_embeddings == longest


GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 5,
    "vocab_size": 16,
    "max_position_embeddings": 131072,
}


def _gemma_4(directory: Path, **fields: Any) -> ModelProfile:
    tensors = {"model.embed_tokens.weight": [16, 64], "model.norm.weight": [64]}
    tensors |= {
        "model.embed_tokens_per_layer.weight": [16, 48],
        "model.per_layer_model_projection.weight": [64],
    }
    for i in range(12):
        parts = ("q_proj", "k_proj", "v_proj", "k_norm", "o_proj")
        tensors |= {f"model.layers.{i}.self_attn.{part}.weight": [10] for part in parts}
    return read_profile(write_model(directory, config={**GEMMA_4, **fields}, tensors=tensors))


def test_layers_that_share_keys_and_values_have_none_of_their_own(tmp_path: Path) -> None:
    profile = _gemma_4(tmp_path)
    full = [index for index, kind in enumerate(profile.layers) if kind.attention is AttentionKind.FULL]
    assert full == [5, 11], "every sixth layer, as in transformers' config class"
    assert [kind.shares_kv for kind in profile.layers] == [False] * 7 + [True] * 5
    # Layers with a window read the cache of layer 6, layers with full attention the cache of layer 5.
    assert profile.last_stage_layers == 7
    assert (profile.layer(5).kv_heads, profile.layer(5).kv_width) == (2, 1024)
    assert (profile.layer(6).kv_heads, profile.layer(6).kv_width) == (2, 512)
    # vLLM does not load stored keys and values of these layers. Embeddings of layers count separately.
    assert set(profile.layer_bytes[:7]) == {100}
    assert set(profile.layer_bytes[7:]) == {40}
    assert profile.dropped_bytes == 5 * 60
    assert (profile.layer_table_bytes, profile.other_bytes) == (2 * 16 * 48 + 128, 128)
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_without_shared_layers_the_last_stage_may_have_one_layer(tmp_path: Path) -> None:
    profile = _gemma_4(
        tmp_path,
        num_kv_shared_layers=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        global_head_dim=256,
    )
    assert profile.last_stage_layers == 1
    assert not any(kind.shares_kv for kind in profile.layers)
    assert (profile.layer(5).kv_heads, profile.layer(5).kv_width) == (1, 512)
    assert set(profile.layer_bytes) == {100}


def test_gemma_3n_shares_keys_and_values_by_default(tmp_path: Path) -> None:
    left = {name: value for name, value in GEMMA_4.items() if name != "num_kv_shared_layers"}
    config = {**left, "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}
    config["num_hidden_layers"] = 20
    tensors = {"model.embed_tokens.weight": [16, 64]}
    tensors |= {f"model.layers.{i}.self_attn.q_proj.weight": [10] for i in range(20)}
    profile = read_profile(write_model(tmp_path, config=config, tensors=tensors))
    assert [kind.shares_kv for kind in profile.layers] == [False] * 5 + [True] * 15
    assert [profile.layer(i).attention for i in (3, 4)] == [AttentionKind.WINDOW, AttentionKind.FULL]
    assert {(kind.kv_heads, kind.kv_width) for kind in profile.layers} == {(2, 512)}
    assert profile.last_stage_layers == 17


@pytest.mark.parametrize(
    ("architecture", "text", "expected"),
    [
        ("ExaoneMoEForCausalLM", {"n_group": 1}, Routing.DEEPSEEK_V3),
        ("Lfm2MoeForCausalLM", {}, Routing.DEEPSEEK_V3),
        ("LagunaForCausalLM", {}, Routing.MINIMAX),
        ("Step3p5ForCausalLM", {"moe_router_activation": "sigmoid"}, Routing.MINIMAX),
        ("AfmoeForCausalLM", {"score_func": "softmax", "n_group": 1}, Routing.UNKNOWN),
        ("LongcatFlashForCausalLM", {}, Routing.UNKNOWN),
        (
            "BailingMoeV2ForCausalLM",
            {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "n_group": 8},
            Routing.DEEPSEEK_V3,
        ),
        ("BailingMoeForCausalLM", {}, Routing.SOFTMAX_NORMALIZED),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, Routing.SOFTMAX),
    ],
)
def test_routing_comes_from_the_architecture_if_the_config_does_not_name_it(
    architecture: str, text: dict[str, Any], expected: Routing
) -> None:
    """The expected routing is that of vLLM's class (vllm/model_executor/models@v0.32.0)."""
    assert read_routing(architecture, text) is expected


@pytest.mark.parametrize(
    ("text", "limited"),
    [
        ({"swiglu_limits": [0.0, 0, 7.0]}, True),
        ({"expert_swiglu_limit_list": [10]}, True),
        ({"swiglu_limits": [0.0, 0.0]}, False),
        ({"swiglu_limits": None, "swiglu_limit": 7.0}, False),
    ],
)
def test_reads_the_limits_of_the_experts_activations(text: dict[str, Any], limited: bool) -> None:
    assert has_limited_experts(text) is limited
