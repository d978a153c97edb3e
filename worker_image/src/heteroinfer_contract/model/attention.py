"""Derives each layer's attention, KV cache and recurrent state from a model's config. Stdlib only; pure.

The tests compare the result with vLLM's `get_kv_cache_spec` of every layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from heteroinfer_contract.model.config import block_heads
from heteroinfer_contract.model.layer_kind import AttentionKind, LayerKind
from heteroinfer_contract.word_table import word_set

_LATENT_TYPES: Final = word_set(
    """
    axk1 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41 dots3_note
    glm4_moe_lite glm5_next glm5_next_text glm_moe_dsa hy_v4 kimi_k2 kimi_linear longcat_flash
    pangu_ultra_moe
    """
)
"""Model types with latent attention
(vllm/transformers_utils/model_arch_config_convertor.py::is_deepseek_mla@v0.32.0)."""
_KIND_BY_NAME: Final[Mapping[str, AttentionKind]] = {
    "full_attention": AttentionKind.FULL,
    "attention": AttentionKind.FULL,
    "sliding_attention": AttentionKind.WINDOW,
    "chunked_attention": AttentionKind.CHUNKED,
    "linear_attention": AttentionKind.LINEAR,
    "mamba": AttentionKind.LINEAR,
    "mamba2": AttentionKind.LINEAR,
    "conv": AttentionKind.LINEAR,
    "hybrid": AttentionKind.FULL,
    "hybrid_sliding": AttentionKind.WINDOW,
    "indexed_attention": AttentionKind.SPARSE,
    "minimax_m3_sparse": AttentionKind.SPARSE,
    "compressed_sparse_attention": AttentionKind.SPARSE,
    "heavily_compressed_attention": AttentionKind.SPARSE,
    "deepseek_sparse_attention": AttentionKind.SPARSE,
    "qwen_sparse_attention": AttentionKind.SPARSE,
    "moe": AttentionKind.NONE,
    "mlp": AttentionKind.NONE,
}
"""Entry of `layer_types` in config.json -> kind of attention."""
_NEMOTRON_LETTERS: Final = {
    "M": AttentionKind.LINEAR,
    "*": AttentionKind.FULL,
    "-": AttentionKind.NONE,
    "E": AttentionKind.NONE,
}
"""Letter of Nemotron-H's `hybrid_override_pattern` -> kind of attention."""
_EVERY_NTH_IS_FULL: Final[Mapping[str, tuple[str, int, AttentionKind]]] = {
    "gemma2": ("", 2, AttentionKind.WINDOW),
    "gemma3_text": ("sliding_window_pattern", 6, AttentionKind.WINDOW),
    "gemma3": ("sliding_window_pattern", 6, AttentionKind.WINDOW),
    "gemma3n_text": ("", 5, AttentionKind.WINDOW),
    "gemma4_text": ("", 6, AttentionKind.WINDOW),
    "gemma4_unified_text": ("", 6, AttentionKind.WINDOW),
    "cohere2": ("sliding_window_pattern", 4, AttentionKind.WINDOW),
    "exaone4": ("sliding_window_pattern", 4, AttentionKind.WINDOW),
    "gpt_oss": ("", 2, AttentionKind.WINDOW),
    "qwen3_next": ("full_attention_interval", 4, AttentionKind.LINEAR),
    "qwen3_5_text": ("full_attention_interval", 4, AttentionKind.LINEAR),
    "qwen3_5_moe_text": ("full_attention_interval", 4, AttentionKind.LINEAR),
    "olmo3": ("", 4, AttentionKind.WINDOW),
}
"""Model type -> the field with the interval, its default, and the kind of the other layers."""


def unknown_layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the types of layers in a config that this module does not know, sorted."""
    return tuple(sorted({str(name) for name in _layer_types(text) or ()} - set(_KIND_BY_NAME)))


def _layer_types(text: Mapping[str, Any]) -> list[Any] | None:
    """Returns the config's list with a word for each layer; None if it has no complete list."""
    types = text.get("layer_types") or text.get("layers_block_type")
    return types if isinstance(types, list) and len(types) >= int(text["num_hidden_layers"]) else None


def layer_attention(text: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer's attention, with sizes; experts and bytes stay 0.

    Args:
        text: a language model's config, with defaults (`model.config.text_config`).
    """
    kinds = [
        _layer_kind(attention, _config_of_layer(text, i))
        for i, attention in enumerate(_attention_kinds(text))
    ]
    # The config counts the layers that share keys and values. These are the last layers. If the count covers
    # all layers, none shares, because no layer would have keys and values of its own.
    first_sharing = len(kinds) - int(text.get("num_kv_shared_layers") or 0)
    return tuple(replace(kind, shares_kv=0 < first_sharing <= index) for index, kind in enumerate(kinds))


def _config_of_layer(text: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Returns the config with the number of key/value heads of one layer."""
    heads = block_heads(text, index)
    return {**text, "num_key_value_heads": heads} if heads else text


def first_of_shared_kv(layers: Sequence[LayerKind]) -> int:
    """Returns the first of the layers that must be in one stage because layers share their KV cache.

    A sharing layer reads the cache of the last layer of its kind before all sharing layers
    (vllm/model_executor/models/gemma4.py::Gemma4Attention@v0.32.0). The result is the last layer if no layer
    shares.
    """
    sharing_kinds = {kind.attention for kind in layers if kind.shares_kv}
    last_with_cache = {kind.attention: index for index, kind in enumerate(layers) if not kind.shares_kv}
    caches_read = [last_with_cache.get(attention, 0) for attention in sharing_kinds]
    return min(caches_read, default=len(layers) - 1)


def _attention_kinds(text: Mapping[str, Any]) -> Sequence[AttentionKind]:
    """Returns the kind of each layer's attention, from the first reader that knows this form of config."""
    num_layers = int(text["num_hidden_layers"])
    for read in (_kinds_by_block, _kinds_by_list, _latent_kinds, _kinds_by_pattern, _kinds_by_interval):
        kinds = read(text, num_layers)
        if kinds is not None:
            return kinds
    return [_kind_by_window(text, index) for index in range(num_layers)]


def _kinds_by_block(text: Mapping[str, Any], num_layers: int) -> Sequence[AttentionKind] | None:
    """Returns the kinds for a config with a block for each layer; None for another config."""
    heads = [block_heads(text, index) for index in range(num_layers)]
    if all(number_of_heads is None for number_of_heads in heads):
        return None
    return [AttentionKind.NONE if number_of_heads == 0 else AttentionKind.FULL for number_of_heads in heads]


def _kinds_by_list(text: Mapping[str, Any], num_layers: int) -> Sequence[AttentionKind] | None:
    """Returns the kinds for a config with one word for each layer; None for another config."""
    types = _layer_types(text)
    if types is None:
        return None
    # Unknown words count as full attention. `unknown_layer_types` reports them.
    kinds = [
        _full_without_window(_KIND_BY_NAME.get(str(name), AttentionKind.FULL), text)
        for name in types[:num_layers]
    ]
    # Qwen3.8's files call layers with an indexer full (transformers' Qwen4ExpTextConfig.__post_init__).
    full, indexed = AttentionKind.FULL, AttentionKind.SPARSE
    return [indexed if kind is full and text.get("indexer_head_dim") else kind for kind in kinds]


def _latent_kinds(text: Mapping[str, Any], num_layers: int) -> Sequence[AttentionKind] | None:
    """Returns the kinds for a config with latent attention; None for another config."""
    if not is_latent(text):
        return None
    latent = AttentionKind.SPARSE if text.get("index_topk") else AttentionKind.LATENT
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi-Linear counts layers from 1
        full = set(linear.get("full_attn_layers") or ())
        return [latent if i + 1 in full else AttentionKind.LINEAR for i in range(num_layers)]
    return [latent] * num_layers


def _kinds_by_pattern(text: Mapping[str, Any], num_layers: int) -> Sequence[AttentionKind] | None:
    """Returns the kinds for a config with one letter or number for each layer, or a list of layers.

    Returns None for another config.
    """
    full, linear = AttentionKind.FULL, AttentionKind.LINEAR
    match text:
        case {"hybrid_override_pattern": str(pattern)}:  # Nemotron-H
            return [_NEMOTRON_LETTERS.get(letter, full) for letter in pattern[:num_layers]]
        case {"sparse_attention_config": {"sparse_attention_freq": list(marks)}} | {
            "hybrid_layer_pattern": list(marks)  # 1 marks an index (MiniMax-M3) or a window (MiMo-V2)
        }:
            other = AttentionKind.WINDOW if "hybrid_layer_pattern" in text else AttentionKind.SPARSE
            return [other if mark else full for mark in marks[:num_layers]]
        case {"attn_layer_indices": list(indices)} | {"full_attn_idxs": list(indices)}:  # Bamba, LFM2
            return [full if i in indices else linear for i in range(num_layers)]
        case {"attn_layer_period": int(period)}:  # Jamba
            offset = int(text.get("attn_layer_offset") or 0)
            return [full if i % period == offset else linear for i in range(num_layers)]
        case {"model_type": "mamba" | "mamba2" | "falcon_mamba"}:
            return [linear] * num_layers
    return None


def _kinds_by_interval(text: Mapping[str, Any], num_layers: int) -> Sequence[AttentionKind] | None:
    """Returns the kinds for a config in which every nth layer has full attention; None for another config."""
    kind = str(text.get("model_type", ""))
    if kind in ("llama4_text", "llama4"):
        return [_llama4_kind(text, i) for i in range(num_layers)]
    if kind not in _EVERY_NTH_IS_FULL:
        return None
    field, default, other = _EVERY_NTH_IS_FULL[kind]
    every = int(text.get(field) or default) if field else default
    kinds = [AttentionKind.FULL if (i + 1) % every == 0 else other for i in range(num_layers)]
    return [_full_without_window(each, text) for each in kinds]


def _kind_by_window(text: Mapping[str, Any], index: int) -> AttentionKind:
    """Returns the kind of a layer by the window of the config, which has no list or pattern of layers."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return AttentionKind.FULL
    if "use_sliding_window" in text and index < int(text.get("max_window_layers") or 0):
        return AttentionKind.FULL  # in Qwen2 and similar models, the first `max_window_layers` have no window
    return AttentionKind.WINDOW


def _full_without_window(kind: AttentionKind, text: Mapping[str, Any]) -> AttentionKind:
    """Returns the kind, but full attention if the config has no size for a window."""
    return AttentionKind.FULL if kind is AttentionKind.WINDOW and not text.get("sliding_window") else kind


def _llama4_kind(text: Mapping[str, Any], index: int) -> AttentionKind:
    """Returns the kind of a layer of Llama 4: chunks with rotary embeddings, else full attention."""
    marks = text.get("no_rope_layers")  # despite the name, 1 marks a layer with rotary embeddings
    if isinstance(marks, list) and len(marks) > index:
        chunked = bool(marks[index])
    else:
        chunked = (index + 1) % int(text.get("no_rope_layer_interval") or 4) != 0
    return AttentionKind.CHUNKED if chunked and text.get("attention_chunk_size") else AttentionKind.FULL


def is_latent(text: Mapping[str, Any]) -> bool:
    """Reports whether vLLM caches latents instead of keys and values."""
    # DeepSeek-V4 has compress_ratios, and the width of its latents in head_dim.
    width_field = "head_dim" if text.get("compress_ratios") else "kv_lora_rank"
    return text.get("model_type") in _LATENT_TYPES and text.get(width_field) is not None


def _layer_kind(attention: AttentionKind, text: Mapping[str, Any]) -> LayerKind:
    """Returns a layer's attention with the sizes of its caches and states."""
    match attention:
        case AttentionKind.LINEAR:
            return _linear_kind(text)
        case AttentionKind.LATENT | AttentionKind.SPARSE:
            return _latent_layer_kind(attention, text)
        case AttentionKind.WINDOW:
            window = int(text["sliding_window"])
            return replace(_kind_with_cache(text, prefix="swa_"), attention=attention, window=window)
        case AttentionKind.CHUNKED:
            chunk = int(text["attention_chunk_size"])
            return replace(_kind_with_cache(text), attention=attention, window=chunk)
        case AttentionKind.FULL:
            kind, state = _kind_with_cache(text), LayerKind()
            if text.get("model_type") == "falcon_h1":  # attention and a state in each layer
                state = _linear_kind(text)
            return replace(
                kind,
                conv_elements=state.conv_elements,
                state_elements=state.state_elements,
                state_copies=state.state_copies,
            )
    return LayerKind(attention=attention)


def _latent_layer_kind(attention: AttentionKind, text: Mapping[str, Any]) -> LayerKind:
    """Returns a layer with latent or sparse attention, and the sizes of its cache and its index."""
    if not is_latent(text):
        return replace(_kind_with_cache(text), attention=attention, index_bytes=_key_index_bytes(text))
    if text.get("compress_ratios"):
        # DeepSeek-V4's latents contain the position, and most cover several tokens: this is the upper limit.
        width = int(text["head_dim"])
    else:
        width = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    index_bytes = 0
    if attention is AttentionKind.SPARSE:
        # One byte per element and a float32 scale per 128 elements (vllm/models/deepseek_v32@v0.32.0).
        index_width = int(text.get("index_head_dim") or 128)
        index_bytes = index_width + index_width // 128 * 4
    if text.get("model_type") == "longcat_flash":  # two attentions in each layer
        width *= 2
    return LayerKind(attention=attention, kv_heads=1, kv_width=width, index_bytes=index_bytes)


def _key_index_bytes(text: Mapping[str, Any]) -> int:
    """Returns the bytes per token of the index that selects keys; its elements have 16 bits.

    The keys and values themselves do not count. Source: vllm/models/qwen4_exp, minimax_m3@v0.32.0.
    """
    sparse = text.get("sparse_attention_config") or {}
    width = int(text.get("indexer_head_dim") or sparse.get("sparse_index_dim") or 0)
    return 2 * width * int(text.get("indexer_kv_heads") or 1) // int(text.get("indexer_compress_ratio") or 1)


def _gemma4_full_attention_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which Gemma-4's layers with full attention differ from the others.

    Source: transformers' Gemma4TextConfig.__post_init__.
    """
    fields: dict[str, Any] = {"head_dim": text.get("global_head_dim") or 512}
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
        fields["num_key_value_heads"] = text["num_global_key_value_heads"]
    return fields


def _kind_with_cache(text: Mapping[str, Any], prefix: str = "") -> LayerKind:
    """Returns the kind of a layer that caches keys and values.

    Args:
        prefix: "swa_" for a layer with a sliding window, otherwise "". MiMo's config has separate fields with
            this prefix for layers with a window, such as swa_head_dim. Other configs have no such fields.
    """
    has_window = bool(prefix)
    if not has_window and str(text.get("model_type")).startswith("gemma4"):
        text = {**text, **_gemma4_full_attention_fields(text)}
    heads = int(text["num_attention_heads"])
    if text.get("kv_lora_rank") and text.get("qk_nope_head_dim"):
        # vLLM expands these latents to keys and values, and caches those; values are padded to keys' width
        # (vllm/model_executor/models/minicpm3.py::MiniCPM3Attention@v0.32.0).
        key = int(text["qk_nope_head_dim"]) + int(text.get("qk_rope_head_dim") or 0)
        return LayerKind(kv_heads=heads, kv_width=2 * key)
    fields = {
        name: text.get(f"{prefix}{name}") or text.get(name) for name in ("num_key_value_heads", "head_dim")
    }
    head_dim = int(fields["head_dim"] or int(text["hidden_size"]) // heads)
    value_dim = head_dim
    if text.get("model_type") in ("mimo_v2_flash", "mimo_v2"):
        value_dim = int(text.get(f"{prefix}v_head_dim") or text.get("v_head_dim") or head_dim)
    return LayerKind(
        kv_heads=int(fields["num_key_value_heads"] or heads),
        kv_width=head_dim + value_dim,
        value_width=0 if value_dim == head_dim else value_dim,
    )


def _linear_kind(text: Mapping[str, Any]) -> LayerKind:
    """Returns a layer with a state of fixed size.

    Source: vllm/model_executor/layers/mamba/mamba_utils.py::MambaStateShapeCalculator@v0.32.0.
    """
    conv, state = _state_sizes(text)
    # Mamba 2 keeps one more state, from which a prefill continues (vllm/.../mamba/mamba_mixer2.py@v0.32.0).
    is_mamba2 = bool(text.get("mamba_num_heads") or text.get("mamba_n_heads"))
    return LayerKind(
        attention=AttentionKind.LINEAR,
        conv_elements=conv,
        state_elements=state,
        state_copies=3 if is_mamba2 else 2,
    )


def _state_sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the elements of a sequence's convolution state and of its recurrent state."""

    def first_number(*names: str, default: int = 0) -> int:
        """Returns the first of these fields that is set, or the default."""
        return next((int(text[name]) for name in names if text.get(name)), default)

    hidden = int(text["hidden_size"])
    if text.get("linear_num_value_heads"):  # gated delta net
        keys = first_number("linear_num_key_heads") * first_number("linear_key_head_dim")
        values = first_number("linear_num_value_heads") * first_number("linear_value_head_dim")
        kernel = first_number("linear_conv_kernel_dim", default=4)
        return (2 * keys + values) * (kernel - 1), values * first_number("linear_key_head_dim")
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi's delta attention
        width = int(linear["num_heads"]) * int(linear["head_dim"])
        kernel = int(linear.get("short_conv_kernel_size") or 4)
        return 3 * width * (kernel - 1), width * int(linear["head_dim"])
    if text.get("conv_L_cache"):  # LFM2's short convolution
        return hidden * (first_number("conv_L_cache") - 1), 0
    kernel = first_number("conv_kernel", "mamba_d_conv", default=4)  # Mamba
    state = first_number("ssm_state_size", "mamba_d_state", "state_size", default=16)
    heads = first_number("mamba_num_heads", "mamba_n_heads")
    if not heads:  # version 1
        inner = first_number("mamba_expand", "expand", default=2) * hidden
        return inner * (kernel - 1), inner * state
    # Version 2
    inner = heads * first_number("mamba_head_dim", "mamba_d_head", default=64)
    groups = first_number("n_groups", "mamba_n_groups", default=1)
    return (inner + 2 * groups * state) * (kernel - 1), inner * state
