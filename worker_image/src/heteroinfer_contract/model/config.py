"""Reads the language model's part of a config.json, with defaults for missing fields. Stdlib only; pure.

The defaults are those of transformers' config classes, which vLLM uses too. A test keeps their table current.
"""

from collections.abc import Mapping
from typing import Any, Final

from heteroinfer_contract.model.config_defaults import DEFAULTS, TEXT_TYPES
from heteroinfer_contract.word_table import word_set

CONFIG_FILE: Final = "config.json"

_TEXT_KEYS: Final = ("text_config", "llm_config", "language_config")
"""Keys of the language model's config in models with an encoder."""
_WRAPPER_KEYS: Final = ("thinker_config",)
"""Keys of the part that vLLM serves, in models with several parts."""
_PART_KEYS: Final = ("attn_config", "ffn_config")
"""Keys of the sizes of attention and feed-forward part, in models that separate them (DBRX)."""
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_key_value_heads": (
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_groups",
        "kv_n_heads",
    ),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"),
}
"""transformers' usual name of a field -> other names in config.json, including those that vLLM accepts
(vllm/transformers_utils/model_arch_config_convertor.py@v0.32.0)."""

_LENGTH_FIELDS: Final = word_set(
    """
    max_position_embeddings n_positions max_seq_len seq_length model_max_length max_target_positions
    max_sequence_length max_seq_length seq_len
    """
)
"""Fields with a limit of tokens; the smallest limit is the longest sequence
(vllm/transformers_utils/model_arch_config_convertor.py::derive_max_model_len_and_key@v0.32.0)."""
_ROPE_TYPES_IN_LENGTH: Final = word_set(
    """
    su longrope llama3 yarn telechat3-yarn deepseek_yarn deepseek_llama_scaling
    """
)
"""Types of rotary embedding whose factor is already part of the length, according to vLLM."""

EXPERT_COUNTS: Final = ("num_experts", *_ALIASES["num_experts"])
"""Names of the field with the number of routed experts of a layer."""


def served_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the model that vLLM serves: of a wrapper such as Qwen-Omni, only one part."""
    for key in _WRAPPER_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return {
                **inner,
                "architectures": config.get("architectures"),
                "dtype": _first_dtype(inner, config),
            }
    return config


def text_class(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the class and the type of the language model inside a model with an encoder.

    Returns:
        Both are "" for a model without an encoder; each is "" if the config does not name it.
    """
    whole = served_config(config)
    nested = _nested_text_config(whole)
    if nested is None:
        return "", ""
    named = nested.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    return architecture, str(nested.get("model_type") or "")


def _nested_text_config(whole: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the language model's config inside the config of a model with an encoder, or None."""
    nested_configs = (whole.get(key) for key in _TEXT_KEYS)
    return next((nested for nested in nested_configs if isinstance(nested, Mapping)), None)


def _first_dtype(*sources: Any) -> Any:
    """Returns the first dtype that the configs name, in their order, or None."""
    named = [
        source.get(key)
        for source in sources
        if isinstance(source, Mapping)
        for key in ("dtype", "torch_dtype")
    ]
    return next((each for each in named if each is not None and each != "auto"), None)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the language model's part with its defaults, under transformers' usual names.

    Fields that only the whole config has (the dtype, whether the head is tied) are included.

    Args:
        config: a parsed config.json, or a params.json converted by `from_params`.
    """
    whole = served_config(config)
    nested = _nested_text_config(whole)
    text_part = whole if nested is None else nested
    defaults = DEFAULTS.get(str(text_part.get("model_type") or _type_of_nested_config(whole)), {})
    parts = [_rename_aliases(text_part[key]) for key in _PART_KEYS if isinstance(text_part.get(key), Mapping)]
    nested_fields = {name: value for part in parts for name, value in part.items()}
    # A default applies only if the field is missing under all its names. A field with null is not missing:
    # `"sliding_window": null` means no sliding window.
    text = {**defaults, **whole, **text_part, **nested_fields, **_rename_aliases(text_part)}
    text["architectures"] = config.get("architectures") or text.get("architectures")
    # vLLM looks for the type in this order (model_arch_config_convertor.py::get_torch_dtype@v0.32.0).
    text["dtype"] = _first_dtype(whole, nested, whole.get("vision_config"), whole.get("encoder_config"))
    text |= _rename_aliases(text)
    text |= _special_fields(text)
    text["max_position_embeddings"] = _max_sequence_tokens(text)
    # Some configs have a list with equal entries, one for each layer.
    for name in ("num_experts", "num_experts_per_tok"):
        if isinstance(text.get(name), list) and text[name]:
            text[name] = max(text[name])
    return {name: value for name, value in text.items() if value is not None}


def _rename_aliases(text: Mapping[str, Any]) -> dict[str, Any]:
    """Renames fields to transformers' usual names; leaves out fields that already have the usual name.

    For example, `n_embd` becomes `hidden_size` if `text` has no `hidden_size`. If `text` has several aliases
    of a field, the first alias in _ALIASES counts.
    """
    given = {name: value for name, value in text.items() if value is not None}
    return {
        usual_name: next(given[alias] for alias in aliases if alias in given)
        for usual_name, aliases in _ALIASES.items()
        if usual_name not in given and not given.keys().isdisjoint(aliases)
    }


def _max_sequence_tokens(text: Mapping[str, Any]) -> Any:
    """Returns the longest sequence that vLLM accepts, in tokens; None if the config has no limit.

    A tokenizer's own limit does not count: vLLM checks it for pooling models only.
    Source: vllm/config/model.py::_get_and_verify_max_len@v0.32.0.
    """
    lengths = [text[name] for name in _LENGTH_FIELDS if text.get(name) is not None]
    # `model_max_length` (Cohere's models) has priority over all other fields.
    longest = text.get("model_max_length") or min(lengths, default=None)
    factor = _rope_factor(text)
    return longest if longest is None or factor == 1 else int(longest * factor)


def _rope_factor(text: Mapping[str, Any]) -> float:
    """Returns the factor by which rotary embeddings extend the model's original length."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping) or "gemma3" in str(text.get("model_type")):
        return 1  # the length in Gemma-3's config contains the factor already, according to vLLM
    by_layer = [each for each in rope.values() if isinstance(each, Mapping)]
    factors = [
        each.get("factor")
        for each in by_layer or [rope]
        if each.get("rope_type", each.get("type")) not in _ROPE_TYPES_IN_LENGTH
    ]
    # Of several factors, vLLM uses the last.
    return next((float(factor) for factor in reversed(factors) if factor), 1)


def _special_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbers that some models store in fields of their own, which vLLM reads before the usual names.

    Source: vllm/transformers_utils/model_arch_config_convertor.py@v0.32.0.
    """
    fields: dict[str, Any] = {}
    if text.get("model_type") == "longcat_flash" and text.get("num_layers"):
        fields["num_hidden_layers"] = text["num_layers"]  # the usual name counts attentions: two per layer
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon, GPTBigCode
        fields["num_key_value_heads"] = 1
    heads = [block_heads(text, index) for index in range(len(text.get("block_configs") or ()))]
    if any(heads):  # Nemotron-NAS: like vLLM, takes the first layer that has attention
        fields["num_key_value_heads"] = next(head for head in heads if head)
    return fields


def block_heads(text: Mapping[str, Any], index: int) -> int | None:
    """Returns the key/value heads of a layer from its entry of `block_configs`; 0 without attention.

    None if the config has no such entry (all models except Nemotron-NAS).
    Source: vllm/model_executor/models/nemotron_nas.py::DeciLMDecoderLayer@v0.32.0.
    """
    attention = _block_part(text, index, "attention")
    if attention is None:
        return None
    if attention.get("no_op"):
        return 0
    return int(text["num_attention_heads"]) // int(attention["n_heads_in_group"])


def is_empty_block(text: Mapping[str, Any], index: int) -> bool:
    """Reports whether a layer has no weights, according to its entry of `block_configs`."""
    parts = [_block_part(text, index, part) for part in ("attention", "ffn")]
    return all(part is not None and part.get("no_op") for part in parts)


def _block_part(text: Mapping[str, Any], index: int, part: str) -> Mapping[str, Any] | None:
    """Returns one part of a layer's entry in `block_configs`; None if the config has no such part.

    Args:
        part: `attention` or `ffn`.
    """
    blocks = text.get("block_configs")
    block = blocks[index] if isinstance(blocks, list) and index < len(blocks) else None
    block_part = block.get(part) if isinstance(block, Mapping) else None
    return block_part if isinstance(block_part, Mapping) else None


def _type_of_nested_config(whole: Mapping[str, Any]) -> str:
    """Returns the type of a nested config that does not name its type."""
    return str(TEXT_TYPES.get(str(whole.get("model_type")), whole.get("model_type", "")))


def from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Converts Mistral's params.json to the content of a config.json.

    Source: vllm/transformers_utils/configs/mistral.py::adapt_config_dict@v0.32.0.
    """
    names = {
        "dim": "hidden_size",
        "norm_eps": "rms_norm_eps",
        "n_kv_heads": "num_key_value_heads",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
    }
    config: dict[str, Any] = {names.get(name, name): value for name, value in params.items()}
    config.setdefault("tie_word_embeddings", config.pop("tied_embeddings", False))
    longest = config.get("max_position_embeddings") or 128_000  # vLLM's default without a config.json
    config["max_position_embeddings"] = min(longest, config.get("max_seq_len") or longest)
    moe = config.pop("moe", None)
    config |= _convert_moe(moe) if isinstance(moe, Mapping) else {"architectures": ["MistralForCausalLM"]}
    quantization = config.pop("quantization", None)
    if isinstance(quantization, Mapping) and quantization:
        config["quantization_config"] = _convert_quantization(quantization)
    multimodal = config.pop("multimodal", None) or {}
    vision = multimodal.get("vision_encoder_args") or config.pop("vision_encoder", None)
    if vision:  # the text config becomes a part of Pixtral's config
        return {
            "model_type": "pixtral",
            "architectures": ["PixtralForConditionalGeneration"],
            "text_config": config,
            "vision_config": vision,
            "quantization_config": config.get("quantization_config"),
        }
    return config


def _convert_moe(moe: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the experts of a params.json to fields of a config.json.

    A model with shared experts gets the type of DeepSeek-V3, as in vLLM.
    """
    fields: dict[str, Any] = {
        "num_experts": moe.get("num_experts"),
        "num_experts_per_tok": moe.get("num_experts_per_tok"),
        "architectures": ["MixtralForCausalLM"],
    }
    if moe.get("num_shared_experts"):
        fields |= {
            "architectures": ["MistralLarge3ForCausalLM"],
            "model_type": "deepseek_v3",
            "scoring_func": moe.get("routing_method", "softmax"),
        }
    return fields


def _convert_quantization(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the quantization of a params.json to a `quantization_config`."""
    if quantization.get("qformat_weight") == "fp8_e4m3":
        return {"quant_method": "fp8"}
    return dict(quantization)
