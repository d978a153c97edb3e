"""Makes tiny models of many architectures with random weights, and their expected tokens.

Run it with the worker's Python, which has torch and transformers. The first command makes a model; the second
one prints transformers' greedy tokens as JSON:

    python -m tests.integration.feed_forward.tiny_models ARCHITECTURE DIR [--dtype D] [--spread S]
    python -m tests.integration.feed_forward.tiny_models reference DIR

Imports torch and transformers inside functions only.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.model.config import EXPERT_COUNTS

LAYERS: Final = 3
EXPERTS: Final = 8
SPREAD: Final = 0.15
"""Standard deviation of the weights, so large that rounding does not change greedy tokens."""
PROMPTS: Final = ((3, 17, 42, 5, 99, 7), tuple(range(10, 130, 3)))
ANSWER_TOKENS: Final = 16

_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": SPREAD,
    }
)
_WIDE: Final = {"intermediate_size": 256}
_MOE: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, **_WIDE}
_GROUPED: Final = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
_LATENT: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
"""Latents of 512 + 64 elements, because CPU kernels support no others (vllm/…/mla/cpu_mla.py@v0.32.0)."""

ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # Mixtures of experts
        "qwen3_moe": {**_MOE, "num_experts": EXPERTS, "head_dim": 32, "norm_topk_prob": True},
        "qwen2_moe": {
            **_MOE,
            "num_experts": EXPERTS,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": False,
        },
        "mixtral": {**_WIDE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        "deepseek_v2": {
            **_MOE,
            **_LATENT,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        "deepseek_v3": {
            **_MOE,
            **_LATENT,
            **_GROUPED,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        "glm4_moe": {
            **_MOE,
            "n_routed_experts": EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "head_dim": 32,
            "use_qk_norm": True,
        },
        "gpt_oss": {
            **_WIDE,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 64,
        },
        "olmoe": {**_WIDE, "num_experts": EXPERTS, "num_experts_per_tok": 2},
        "granitemoe": {**_WIDE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        "ernie4_5_moe": {
            **_MOE,
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        "minimax_m2": {
            "intermediate_size": 64,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        # Dense
        "llama": {**_WIDE},
        "qwen2": {**_WIDE},
        "qwen3": {**_WIDE, "head_dim": 32},
        "mistral": {**_WIDE, "head_dim": 32, "sliding_window": None},
        "gemma2": {
            **_WIDE,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            # vLLM's class has no head of its own, and no published model has one
            "tie_word_embeddings": True,
        },
        "gemma3_text": {**_WIDE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128},
        "glm4": {**_WIDE, "head_dim": 32},
        "phi3": {**_WIDE},
        "olmo2": {**_WIDE},
        "granite": {**_WIDE},
    }
)
"""For each model type, the fields of its configuration besides the common sizes."""


ENGINE: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # These kernels support any CPU and type. The kernels that vLLM chooses with AMX support only bf16.
        architecture: {"extra_args": ("--attention-backend", "CPU_MLA"), "block_size": 16}
        for architecture in ("deepseek_v2", "deepseek_v3")
    }
)
"""For each model type, the fields of EngineSettings that a rank with attention on a CPU needs."""


def has_experts(architecture: str) -> bool:
    """Returns whether the architecture is a mixture of experts."""
    return any(ARCHITECTURES[architecture].get(name) == EXPERTS for name in EXPERT_COUNTS)


def first_remote_layer(architecture: str) -> int:
    """Returns the first layer whose experts or MLP feed-forward ranks can compute."""
    config = ARCHITECTURES[architecture]
    return int(config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0)))


def make(architecture: str, directory: Path, dtype: str = "float32", spread: float = SPREAD) -> Path:
    """Writes a model of this architecture into `directory` if needed, and returns `directory`."""
    import torch

    from tests.models import Recipe, _write_tokenizer

    if (directory / "done").exists():
        return directory
    model = build(architecture, ARCHITECTURES[architecture], spread)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    _write_tokenizer(directory, Recipe())
    (directory / "done").touch()
    return directory


def build(architecture: str, settings: Mapping[str, Any], spread: float = SPREAD) -> Any:
    """Builds transformers' model of this type with random weights in float32, equal in each call.

    Args:
        architecture: model type.
        settings: fields of its configuration, which replace the common ones.
        spread: standard deviation of the weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**_COMMON, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
            elif name.endswith("bias"):
                parameter.normal_(0.0, spread / 2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    return model


def reference(directory: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Returns the greedy tokens of transformers in float32 after each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    for prompt in prompts:
        token_ids = list(prompt)
        with torch.inference_mode():
            for _ in range(ANSWER_TOKENS):
                token_ids.append(
                    int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax())
                )
        answers.append(token_ids[len(prompt) :])
    return answers


def main(argv: Sequence[str]) -> int:
    """Makes a model, or prints its expected tokens."""
    if argv[:1] == ["reference"]:
        print(json.dumps(reference(Path(argv[1]), *map(json.loads, argv[2:]))))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.integration.feed_forward.tiny_models")
    parser.add_argument("architecture", choices=sorted(ARCHITECTURES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--spread", type=float, default=SPREAD)
    args = parser.parse_args(argv)
    print(make(args.architecture, args.directory, args.dtype, args.spread))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
