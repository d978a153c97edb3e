"""Lists published models: their config.json, written from the architectures' definitions, and their tensors.

This command writes a model without weights, as a sparse file with its header:

    python -m tests.shapes.corpus DIR NAME
"""

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from heteroinfer_contract.model import Scheme, SchemeName
from heteroinfer_contract.model.scheme import read_scheme
from tests.shapes.decoders import Decoder, consolidated_tensors, decoder_tensors
from tests.shapes.encoders import ENCODERS
from tests.shapes.linears import ELEMENT_BITS, TensorShape

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published model.

    Attributes:
        name: the publisher's name.
        config: its config.json, or its params.json.
        prefix: prefix of the decoder's tensors.
        head: name of the output head.
        experts_only: whether only routed experts are quantized.
        params: whether it has Mistral's own file format.
        extra: tensors that vLLM drops.
    """

    name: str
    config: Config
    prefix: str = "model"
    head: str = "lm_head"
    experts_only: bool = False
    params: bool = False
    extra: tuple[TensorShape, ...] = field(default=())

    def tensors(self) -> Iterator[TensorShape]:
        """Yields all tensors of its checkpoint."""
        if self.params:
            yield from consolidated_tensors(self.config)
            return
        text = next(
            (self.config[key] for key in ("text_config", "llm_config") if key in self.config), self.config
        )
        text = {**_FILLED.get(self.name, {}), **text}
        if "vision_config" in self.config and text is not self.config and "model_type" not in text:
            raise ValueError(f"{self.name}: expected a model_type in its text_config")
        if self.config["model_type"] == "qwen2_5_vl":
            text["model_type"] = "qwen2_5_vl_text"
        scheme = read_scheme(self.config, text)
        decoder = Decoder(
            text=text, scheme=scheme, experts_only=self.experts_only, prefix=self.prefix, head=self.head
        )
        yield from decoder_tensors(decoder)
        vision = self.config.get("vision_config")
        if vision:
            yield from ENCODERS[vision["model_type"]](vision, text["hidden_size"])
        yield from self.extra


_FILLED: Mapping[str, Mapping[str, Any]] = {
    "gemma-3-27b-it": {"vocab_size": 262208, "tie_word_embeddings": True},
    "gemma-2-9b-it": {"tie_word_embeddings": True},
}
"""Fields that a published config.json leaves to its class, but that tensors depend on."""


def _base(architecture: str, model_type: str, **fields: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


def _sizes(*sizes: int) -> Config:
    hidden, width, layers, heads, kv, vocab, longest = sizes
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
    }


def _llama(layers: str, **fields: Any) -> Config:
    sizes = {
        "8B": _sizes(4096, 14336, 32, 32, 8, 128256, 131072),
        "70B": _sizes(8192, 28672, 80, 64, 8, 128256, 131072),
    }[layers]
    return _base(
        "LlamaForCausalLM", "llama", **sizes, tie_word_embeddings=False, rope_theta=500000.0, **fields
    )


def _compressed(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> Config:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    weights |= {"group_size": group}
    packed = {4: "pack-quantized", 8: "float-quantized" if kind == "float" else "int-quantized"}[bits]
    return {
        "quant_method": "compressed-tensors",
        "format": more.pop("format", packed),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _activations(bits: int, kind: str, strategy: str, *, dynamic: Any = True, **more: Any) -> Config:
    return {
        "input_activations": {
            "num_bits": bits,
            "type": kind,
            "strategy": strategy,
            "dynamic": dynamic,
            "symmetric": True,
            **more,
        }
    }


FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _deepseek(**fields: Any) -> Config:
    return _base(
        "DeepseekV3ForCausalLM",
        fields.pop("model_type", "deepseek_v3"),
        **_sizes(
            7168,
            18432,
            61,
            fields.pop("heads", 128),
            fields.pop("kv", 128),
            fields.pop("vocab", 129280),
            163840,
        ),
        **{
            "moe_intermediate_size": 2048,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_theta": 10000,
            **fields,
        },
    )


def _k2(**fields: Any) -> Config:
    few = {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return _deepseek(
        model_type="kimi_k2", heads=64, kv=64, vocab=163840, num_nextn_predict_layers=0, **few, **fields
    )


def _qwen3_moe(hidden: int, width: int, layers: int, heads: int, **fields: Any) -> Config:
    return _base(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **_sizes(hidden, 3 * hidden, layers, heads, 4, 151936, 40960),
        head_dim=128,
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        **fields,
    )


def _gpt_oss(layers: int, experts: int) -> Config:
    config = _base(
        "GptOssForCausalLM",
        "gpt_oss",
        **_sizes(2880, 2880, layers, 64, 8, 201088, 131072),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        experts_per_token=4,
        sliding_window=128,
        attention_bias=True,
        attention_out_bias=True,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        tie_word_embeddings=False,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    )
    return {**config, "swiglu_limit": 7.0, "rope_theta": 150000}


_GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}


def _qwen3_vision(out: int, deep: list[int], model_type: str) -> Config:
    return {
        "model_type": model_type,
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": out,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": deep,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
    }


_DENSE = (
    Shape(name="Llama-3.1-8B-Instruct", config=_llama("8B")),
    Shape(name="Llama-3.1-70B-Instruct", config=_llama("70B")),
    Shape(
        name="Qwen3-32B",
        config=_base(
            "Qwen3ForCausalLM",
            "qwen3",
            **_sizes(5120, 25600, 64, 64, 8, 151936, 40960),
            head_dim=128,
            tie_word_embeddings=False,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=64,
        ),
    ),
    Shape(
        name="Qwen3-0.6B",
        config=_base(
            "Qwen3ForCausalLM",
            "qwen3",
            **_sizes(1024, 3072, 28, 16, 8, 151936, 40960),
            head_dim=128,
            tie_word_embeddings=True,
            use_sliding_window=False,
        ),
    ),
    Shape(
        name="Qwen2.5-72B-Instruct",
        config=_base(
            "Qwen2ForCausalLM",
            "qwen2",
            **_sizes(8192, 29568, 80, 64, 8, 152064, 32768),
            tie_word_embeddings=False,
            use_sliding_window=False,
            sliding_window=131072,
            max_window_layers=70,
        ),
    ),
    Shape(
        name="phi-4",
        config=_base(
            "Phi3ForCausalLM",
            "phi3",
            **_sizes(5120, 17920, 40, 40, 10, 100352, 16384),
            tie_word_embeddings=False,
            sliding_window=None,
            original_max_position_embeddings=16384,
            pad_token_id=0,
        ),
    ),
    Shape(
        name="Mistral-7B-Instruct-v0.3 (consolidated)",
        params=True,
        config={
            "dim": 4096,
            "n_layers": 32,
            "head_dim": 128,
            "hidden_dim": 14336,
            "n_heads": 32,
            "n_kv_heads": 8,
            "norm_eps": 1e-05,
            "vocab_size": 32768,
            "rope_theta": 1000000.0,
            "max_seq_len": 32768,
        },
    ),
    Shape(
        name="gemma-2-9b-it",
        config=_base(
            "Gemma2ForCausalLM",
            "gemma2",
            **_sizes(3584, 14336, 42, 16, 8, 256000, 8192),
            head_dim=256,
            sliding_window=4096,
            query_pre_attn_scalar=256,
            hidden_activation="gelu_pytorch_tanh",
        ),
    ),
    Shape(
        name="Olmo-3-32B-Think",
        config=_base(
            "Olmo3ForCausalLM",
            "olmo3",
            **_sizes(5120, 27648, 64, 40, 8, 100278, 65536),
            sliding_window=4096,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
            tie_word_embeddings=False,
        ),
    ),
)

_QUANTIZED = (
    Shape(
        name="Llama-3.3-70B-Instruct-AWQ",
        config={
            **_llama("70B"),
            "torch_dtype": "float16",
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
                "version": "gemm",
            },
        },
    ),
    Shape(
        name="Llama-3.3-70B-Instruct-FP8-dynamic",
        config=_llama(
            "70B", quantization_config=_compressed(8, "float", "channel", **_activations(8, "float", "token"))
        ),
    ),
    Shape(
        name="Llama-3.1-8B-Instruct-FP8",
        config=_llama(
            "8B",
            quantization_config=_compressed(
                8, "float", "tensor", **_activations(8, "float", "tensor", dynamic=False)
            ),
        ),
    ),
    Shape(
        name="Llama-3.1-8B-Instruct-GPTQ-INT4",
        config={
            **_llama("8B"),
            "torch_dtype": "float16",
            "quantization_config": {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 128,
                "desc_act": False,
                "sym": True,
                "checkpoint_format": "gptq",
            },
        },
    ),
    Shape(
        name="Llama-3.1-8B-Instruct-quantized.w4a16",
        config=_llama("8B", quantization_config=_compressed(4, "int", "group", 128)),
    ),
    Shape(
        name="Llama-3.1-8B-Instruct-quantized.w8a8",
        config=_llama(
            "8B", quantization_config=_compressed(8, "int", "channel", **_activations(8, "int", "token"))
        ),
    ),
    Shape(
        name="Llama-3.3-70B-Instruct-NVFP4",
        config=_llama(
            "70B",
            quantization_config=_compressed(
                4,
                "float",
                "tensor_group",
                16,
                format="nvfp4-pack-quantized",
                **_activations(4, "float", "tensor_group", dynamic="local", group_size=16),
            ),
        ),
    ),
)

_MIXTURES = (
    Shape(
        name="Mixtral-8x7B-Instruct-v0.1",
        config=_base(
            "MixtralForCausalLM",
            "mixtral",
            **_sizes(4096, 14336, 32, 32, 8, 32000, 32768),
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
    ),
    Shape(name="Qwen3-30B-A3B", config=_qwen3_moe(2048, 768, 48, 32)),
    Shape(name="Qwen3-235B-A22B", config=_qwen3_moe(4096, 1536, 94, 64)),
    Shape(
        name="Qwen3-235B-A22B-FP8",
        config=_qwen3_moe(4096, 1536, 94, 64, quantization_config=FP8_BLOCKS),
    ),
    Shape(name="gpt-oss-20b", experts_only=True, config=_gpt_oss(24, 32)),
    Shape(name="gpt-oss-120b", experts_only=True, config=_gpt_oss(36, 128)),
    Shape(
        name="GLM-4.5-Air",
        config=_base(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            **_sizes(4096, 10944, 46, 96, 8, 151552, 131072),
            head_dim=128,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            num_nextn_predict_layers=1,
            attention_bias=True,
            use_qk_norm=False,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            partial_rotary_factor=0.5,
            tie_word_embeddings=False,
        ),
    ),
    Shape(
        name="MiniMax-M2",
        config=_base(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            **_sizes(3072, 1536, 62, 48, 8, 200064, 196608),
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            rotary_dim=64,
            rope_theta=5000000,
            attn_type_list=[1] * 62,
            tie_word_embeddings=False,
            quantization_config={
                **FP8_BLOCKS,
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            },
        ),
    ),
)

_LATENT = (
    Shape(
        name="DeepSeek-V2-Lite-Chat",
        config=_base(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            **_sizes(2048, 10944, 27, 16, 16, 102400, 163840),
            moe_intermediate_size=1408,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            topk_method="greedy",
            scoring_func="softmax",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            tie_word_embeddings=False,
        ),
    ),
    Shape(name="DeepSeek-V3", config=_deepseek(quantization_config=FP8_BLOCKS)),
    Shape(
        name="DeepSeek-V3.2",
        config={
            **_deepseek(
                model_type="deepseek_v32",
                quantization_config={**FP8_BLOCKS, "scale_fmt": "ue8m0"},
                index_head_dim=128,
                index_n_heads=64,
                index_topk=2048,
            ),
            "architectures": ["DeepseekV32ForCausalLM"],
        },
    ),
    Shape(name="Kimi-K2-Instruct", config=_k2(quantization_config=FP8_BLOCKS)),
    Shape(
        name="Kimi-K2-Thinking",
        experts_only=True,
        config=_k2(
            quantization_config={
                **_compressed(4, "int", "group", 32),
                "ignore": [
                    "lm_head",
                    "re:.*self_attn.*",
                    "re:.*shared_experts.*",
                    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                ],
            }
        ),
    ),
)

_LINEAR = (
    Shape(
        name="Qwen3-Next-80B-A3B-Instruct",
        config=_base(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            **_sizes(2048, 5120, 48, 16, 2, 151936, 262144),
            **_GDN,
            head_dim=256,
            full_attention_interval=4,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=512,
            num_experts_per_tok=10,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
        ),
        extra=(
            ("mtp.fc.weight", "BF16", (2048, 4096)),
            ("mtp.layers.0.mlp.experts.0.up_proj.weight", "BF16", (512, 2048)),
        ),
    ),
    Shape(
        name="Nemotron-H-8B-Base-8K",
        prefix="backbone",
        config=_base(
            "NemotronHForCausalLM",
            "nemotron_h",
            **_sizes(4096, 21504, 52, 32, 8, 131072, 8192),
            head_dim=128,
            attention_head_dim=128,
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            expand=2,
            chunk_size=128,
            mlp_hidden_act="relu2",
            mamba_hidden_act="silu",
            use_conv_bias=True,
            use_bias=False,
            mlp_bias=False,
            layer_norm_epsilon=1e-5,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            tie_word_embeddings=False,
        ),
    ),
    Shape(
        name="Nemotron-3-Nano-30B-A3B",
        prefix="backbone",
        config=_base(
            "NemotronHForCausalLM",
            "nemotron_h",
            **_sizes(2688, 1856, 52, 32, 2, 131072, 262144),
            head_dim=128,
            mamba_num_heads=64,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            expand=2,
            chunk_size=128,
            mlp_hidden_act="relu2",
            mamba_hidden_act="silu",
            use_conv_bias=True,
            use_bias=False,
            mlp_bias=False,
            layer_norm_epsilon=1e-5,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=6,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            tie_word_embeddings=False,
        ),
    ),
    Shape(
        name="granite-4.0-h-small",
        config=_base(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            **_sizes(4096, 768, 40, 32, 8, 100352, 131072),
            shared_intermediate_size=1536,
            num_local_experts=72,
            num_experts_per_tok=10,
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=256,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            position_embedding_type="nope",
            layer_types=[("attention" if i in (5, 15, 25, 35) else "mamba") for i in range(40)],
            attention_multiplier=0.0078125,
            embedding_multiplier=12,
            residual_multiplier=0.22,
            logits_scaling=16,
            tie_word_embeddings=True,
        ),
    ),
)

_MULTIMODAL = (
    Shape(
        name="gemma-3-27b-it",
        prefix="language_model.model",
        config={
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "text_config": {
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "model_type": "gemma3_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168,
                "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    Shape(
        name="Mistral-Small-3.2-24B-Instruct",
        prefix="language_model.model",
        head="language_model.lm_head",
        config={
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "torch_dtype": "bfloat16",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "text_config": {
                "model_type": "mistral",
                **_sizes(5120, 32768, 40, 32, 8, 131072, 131072),
                "head_dim": 128,
                "sliding_window": None,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "head_dim": 64,
                "image_size": 1540,
                "patch_size": 14,
                "rope_theta": 10000.0,
            },
        },
    ),
    Shape(
        name="Qwen2.5-VL-7B-Instruct",
        config={
            **_base(
                "Qwen2_5_VLForConditionalGeneration",
                "qwen2_5_vl",
                **_sizes(3584, 18944, 28, 28, 4, 152064, 128000),
                use_sliding_window=False,
                sliding_window=32768,
                max_window_layers=28,
                tie_word_embeddings=False,
                rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
                rope_theta=1000000.0,
            ),
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "hidden_act": "silu",
                "in_channels": 3,
            },
        },
    ),
    Shape(
        name="Qwen3-VL-8B-Instruct",
        prefix="model.language_model",
        config={
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "dtype": "bfloat16",
                **_sizes(4096, 12288, 36, 32, 8, 151936, 262144),
                "head_dim": 128,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-6,
                "rope_theta": 5000000,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
            },
            "vision_config": _qwen3_vision(4096, [8, 16, 24], "qwen3_vl"),
        },
    ),
    Shape(
        name="Qwen3.5-35B-A3B",
        prefix="model.language_model",
        config={
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "dtype": "bfloat16",
                **_sizes(2048, 5632, 40, 16, 2, 248320, 262144),
                **_GDN,
                "head_dim": 256,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-6,
                "full_attention_interval": 4,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "mamba_ssm_dtype": "float32",
            },
            "vision_config": _qwen3_vision(2048, [], "qwen3_5_moe"),
        },
    ),
    Shape(
        name="Llama-4-Scout-17B-16E-Instruct",
        prefix="language_model.model",
        head="language_model.lm_head",
        config={
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "boi_token_index": 200080,
            "eoi_token_index": 200081,
            "image_token_index": 200092,
            "text_config": {
                "model_type": "llama4_text",
                **_sizes(5120, 8192, 48, 40, 8, 202048, 10485760),
                "intermediate_size_mlp": 16384,
                "head_dim": 128,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "attention_chunk_size": 8192,
                "no_rope_layers": [],
                "use_qk_norm": True,
                "tie_word_embeddings": False,
                "hidden_act": "silu",
            },
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 1408,
                "intermediate_size": 5632,
                "num_hidden_layers": 34,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
                "projector_input_dim": 4096,
                "projector_output_dim": 4096,
                "vision_output_dim": 4096,
                "pixel_shuffle_ratio": 0.5,
            },
        },
    ),
    Shape(
        name="InternVL3-8B",
        prefix="language_model.model",
        head="language_model.lm_head",
        config={
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "torch_dtype": "bfloat16",
            "downsample_ratio": 0.5,
            "force_image_size": 448,
            "ps_version": "v2",
            "select_layer": -1,
            "use_thumbnail": True,
            "dynamic_image_size": True,
            "max_dynamic_patch": 12,
            "min_dynamic_patch": 1,
            "template": "internvl2_5",
            "llm_config": _base(
                "Qwen2ForCausalLM",
                "qwen2",
                **_sizes(3584, 18944, 28, 28, 4, 151674, 32768),
                use_sliding_window=False,
                tie_word_embeddings=False,
            ),
            "vision_config": {
                "architectures": ["InternVisionModel"],
                "model_type": "intern_vit_6b",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 448,
                "patch_size": 14,
                "qkv_bias": True,
                "qk_normalization": False,
                "norm_type": "layer_norm",
                "layer_norm_eps": 1e-6,
                "hidden_act": "gelu",
                "num_channels": 3,
                "initializer_factor": 0.1,
                "initializer_range": 1e-10,
                "use_flash_attn": True,
            },
        },
    ),
)

SHAPES: tuple[Shape, ...] = (*_DENSE, *_QUANTIZED, *_MIXTURES, *_LATENT, *_LINEAR, *_MULTIMODAL)


def shape(name: str) -> Shape:
    """Returns the shape with this name."""
    return next(found for found in SHAPES if found.name == name)


def write_shape(found: Shape, directory: Path) -> Path:
    """Writes a shape's config, and weights without content but with the right header. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ("params.json" if found.params else "config.json")).write_text(json.dumps(found.config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, sizes in found.tensors():
        begin, end = end, end + prod(sizes) * ELEMENT_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    weights = directory / ("consolidated.safetensors" if found.params else "model.safetensors")
    with weights.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return directory


def is_quantized(found: Shape) -> bool:
    """Returns whether a shape has any quantized weights."""
    return read_scheme(found.config, found.config) != Scheme(name=SchemeName.NONE)


if __name__ == "__main__":
    write_shape(shape(sys.argv[2]), Path(sys.argv[1]))
