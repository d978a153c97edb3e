"""Defines configurations of published models without weights, because benchmarks use dummy weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.models import Recipe, cached_model

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "tiny-moe": {  # to try a benchmark without a GPU
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "gemma-vocabulary": {  # a dense model's layers, with a vocabulary as large as in published models
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
}
_FP8_BLOCK = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}


def make_shape(folder: Path, shape: str, layers: int, *, fp8: bool = False) -> Path:
    """Returns a folder with the configuration of a shape with this number of layers. It has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in cached_model(Recipe()).glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = {
        **SHAPES[shape],
        **(_FP8_BLOCK if fp8 else {}),
        "num_hidden_layers": layers,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
