"""Writes the defaults that config.json files omit, from the config classes of transformers and vLLM.

The first command writes the contract's table; the second one exits 1 if the table is not current:

    .venv-worker/bin/python -m tests.shapes.defaults
    .venv-worker/bin/python -m tests.shapes.defaults --check

Imports transformers inside functions only.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.shapes.architectures import wrapped

TABLE = Path(__file__).parents[2] / "worker_image/src/heteroinfer_contract/model/config_defaults.py"
FIELDS = (
    "attention_chunk_size",
    "attention_k_eq_v",
    "attn_layer_offset",
    "attn_layer_period",
    "conv_L_cache",
    "conv_kernel",
    "full_attention_interval",
    "head_dim",
    "hidden_size",
    "hybrid_override_pattern",
    "index_head_dim",
    "index_topk",
    "kv_lora_rank",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_head_dim",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_num_heads",
    "max_position_embeddings",
    "max_window_layers",
    "n_group",
    "n_groups",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_shared_layers",
    "qk_rope_head_dim",
    "scoring_func",
    "sliding_window",
    "sliding_window_pattern",
    "ssm_state_size",
    "tie_word_embeddings",
    "topk_method",
    "use_sliding_window",
    "vocab_size",
)
"""Fields that `heteroinfer_contract.model` reads."""


def build_table() -> dict[str, Any]:
    """Builds the table: defaults by model type, and the text type of each model with an encoder."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.version import __version__ as vllm_version

    text_types: dict[str, str] = {}
    wanted = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        if model_type not in CONFIG_MAPPING_NAMES:
            continue
        part = (getattr(CONFIG_MAPPING[model_type], "sub_configs", None) or {}).get("text_config")
        name: Any = getattr(part, "model_type", None)
        if name:
            text_types[model_type] = name
            wanted.add(name)
    defaults = {}
    for model_type in sorted(wanted & set(CONFIG_MAPPING_NAMES)):
        found = _defaults(CONFIG_MAPPING[model_type])
        if "num_hidden_layers" in found:
            defaults[model_type] = found
    # If vLLM has a config class for a type, it uses this class (vllm/transformers_utils/config.py@v0.32.0).
    for model_type in sorted(_CONFIG_REGISTRY):
        config_class = _CONFIG_REGISTRY[model_type]
        part = (getattr(config_class, "sub_configs", None) or {}).get("text_config")
        if isinstance(name := getattr(part, "model_type", None), str) and name:
            text_types[model_type] = name
        if "num_hidden_layers" in (found := _defaults(config_class)):
            defaults[model_type] = found
    return {
        "source": f"transformers {transformers.__version__} and vLLM {vllm_version.split('+')[0]}",
        "text_types": dict(sorted(text_types.items())),
        "defaults": dict(sorted(defaults.items())),
    }


def _defaults(config_class: Any) -> dict[str, Any]:
    """Returns a class's own defaults. Those of an instance are computed from each other."""
    renamed = getattr(config_class, "attribute_map", None) or {}
    parameters = inspect.signature(config_class.__init__).parameters
    found: dict[str, Any] = {}
    for field in FIELDS:
        name: str = renamed.get(field, field)
        default: object = parameters[name].default if name in parameters else vars(config_class).get(name)
        # A size of 0 means that the config has none: vLLM and transformers compute it from others.
        if isinstance(default, bool | str) or (isinstance(default, int) and default != 0):
            found[field] = default
    return found


_MODULE = '''\
"""Defaults of fields that config.json files leave out, by {source}. Pure; data.

Written by `python -m tests.shapes.defaults`.
"""

from collections.abc import Mapping
from typing import Final

from heteroinfer_contract.word_table import word_pairs

# fmt: off
TEXT_TYPES: Final = word_pairs(
    """
{text_types}
    """
)
"""Type of the language model in a model with an encoder, by that model's type."""
DEFAULTS: Final[Mapping[str, Mapping[str, bool | int | str]]] = {{
{defaults}
}}
"""By type of model."""
'''


def render(table: dict[str, Any]) -> str:
    """Renders the table as its module has it: names as wrapped words, and a line for each model type."""
    pairs = wrapped(f"{key}\0{value}" for key, value in table["text_types"].items())
    return _MODULE.format(
        source=table["source"],
        text_types=pairs.replace("\0", " "),
        defaults=_lines(table["defaults"]),
    )


def _lines(values: dict[str, Any]) -> str:
    return "\n".join(f"    {literal(name)}: {literal(value)}," for name, value in values.items())


def literal(value: Any) -> str:
    """Returns Python source for a text, a number or a table of them, with double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def main() -> int:
    """Writes or checks the table, and returns the exit code."""
    os.environ.setdefault("VLLM_PLUGINS", "")  # without our own platform
    text = render(build_table())
    if "--check" not in sys.argv:
        TABLE.write_text(text)
        return 0
    if TABLE.read_text() == text:
        return 0
    sys.stderr.write(f"{TABLE}: not what transformers and vLLM say; run python -m tests.shapes.defaults\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
