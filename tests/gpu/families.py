"""Makes tiny mixtures of many families for GPUs, whose attention or routing vLLM's CPU backend lacks.

Imports torch and transformers inside functions only.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

EXPERTS: Final = 8
LAYERS: Final = 4
_MOE: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 256}
_LATENT: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_GROUPED: Final = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # Attention that vLLM's CPU backend lacks
        "lfm2_moe": {
            **_MOE,
            "num_experts": EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
            "norm_eps": 1e-5,
        },
        "jamba": {
            "intermediate_size": 64,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
        },
        "nemotron_h": {
            "intermediate_size": 256,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "hybrid_override_pattern": "MEM*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "head_dim": 64,
        },
        # Attention that CPUs have
        "glm4_moe_lite": {**_MOE, **_LATENT, **_GROUPED},
        "dots1": {**_MOE, **_GROUPED, "head_dim": 64},
        "minimax_m2": {
            "intermediate_size": 64,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    }
)
"""For each model type, the fields of its configuration besides the common sizes."""


def make(family: str, directory: Path, spread: float) -> Path:
    """Makes a model of a family in bf16, and returns its folder."""
    import torch

    from tests.integration.feed_forward.tiny_models import build
    from tests.models import Recipe, _write_tokenizer

    settings = {"hidden_size": 256, "num_hidden_layers": LAYERS, **FAMILIES[family]}
    model = build(family, settings, spread)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory, Recipe())
    return directory
