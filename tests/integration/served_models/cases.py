"""Defines the cases of served and refused models: two models of each attention kind, and one of each format.

Data; stdlib only. Sizes are tiny, except where a CPU kernel supports only one size, which is then that of
published models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.model import AttentionKind, SchemeName
from tests.integration.feed_forward.tiny_models import SPREAD

LAYERS: Final = 4
"""Layers: two for each of two stages."""
LONGEST: Final = 256
"""Tokens of the longest sequence."""
WINDOW: Final = 16
"""Tokens of a window: less than a prompt, and less than a KV block."""
CHUNK: Final = 32
"""Tokens of a chunk: less than a prompt. vLLM requires whole KV blocks."""
PROMPTS: Final = ((3, 17, 42, 5, 99, 7), tuple(range(10, 130, 3)))
ANSWER_TOKENS: Final = 12
AMX: Final = "AMX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny model, and how two CPU pods must serve or refuse it.

    Attributes:
        name: of the case.
        architecture: transformers' model type.
        kinds: attention kinds that this model tests. Its profile must have them.
        settings: fields of its configuration besides the common ones.
        scheme: format of its weights.
        drawn: another format of that scheme, from quantized.py.
        dtype: dtype of the checkpoint, and of the engine unless the planner chooses another one.
        needs: instruction set that a CPU needs for it, or "".
        refused: words of the refusal on CPUs without `needs`. Without `needs`, all CPUs refuse it.
        afterwards: fields that are written into config.json after the model is made.
        always: whether `make test` also serves it.
        rotary_by_torch: whether stock vLLM must rotate positions with torch in 16 bits, too: its own
            operation is wrong for this model, or ends the process.
        widened: whether our kernels serve its linear layers, and stock vLLM serves the same weights in
            float32. vLLM's own kernels round inputs to 8 bits, or need AMX.
        spread: standard deviation of the model's weights, except drawn ones.
        prompts: token ids that stock vLLM and the group answer.
    """

    name: str
    architecture: str
    kinds: frozenset[AttentionKind] = frozenset({AttentionKind.FULL})
    settings: Mapping[str, Any] = field(default_factory=dict)
    scheme: SchemeName = SchemeName.NONE
    drawn: str = ""
    dtype: str = "float32"
    needs: str = ""
    refused: str = ""
    afterwards: Mapping[str, Any] = field(default_factory=dict)
    always: bool = False
    rotary_by_torch: bool = False
    widened: bool = False
    spread: float = SPREAD
    prompts: Sequence[Sequence[int]] = PROMPTS

    def is_served(self, cpu: frozenset[str]) -> bool:
        """Returns whether two pods serve it on a CPU with these instruction sets."""
        return not self.refused or (bool(self.needs) and self.needs in cpu)


_WIDE: Final = {"intermediate_size": 256}
_HEADS: Final = {"head_dim": 64, **_WIDE}
"""Heads so wide that q, k and v each have whole blocks of 128."""
_EXPERTS: Final = 8
_MIXTURE: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LATENTS: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    **_WIDE,
}
"""Latents of 512 + 64 elements, because AMX's kernels support no others."""
_MAMBA2: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_LLAMA4: Final = {
    "head_dim": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": CHUNK,
    "no_rope_layers": [1, 0, 1, 0],
}
_FULL, _WINDOWED, _CHUNKED = AttentionKind.FULL, AttentionKind.WINDOW, AttentionKind.CHUNKED
_LATENT, _LINEAR, _SPARSE = AttentionKind.LATENT, AttentionKind.LINEAR, AttentionKind.SPARSE
_LATENT_WORDS: Final = "AMX is needed on CPUs for multi-head latent attention"
_SPARSE_WORDS: Final = "with sparse attention: vLLM supports it on GPUs only"
_INDEXER: Final = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}

ATTENTION: Final = (
    Case(name="llama", architecture="llama", settings=_WIDE),
    Case(name="qwen3", architecture="qwen3", settings={**_WIDE, "head_dim": 32}, always=True),
    Case(
        name="mistral",
        architecture="mistral",
        kinds=frozenset({_WINDOWED}),
        settings={**_WIDE, "head_dim": 32, "sliding_window": WINDOW},
        always=True,
    ),
    Case(
        name="gemma3",
        architecture="gemma3_text",
        kinds=frozenset({_WINDOWED, _FULL}),
        settings={
            **_WIDE,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        },
    ),
    Case(
        name="stablelm",
        architecture="stablelm",
        # 10 pairs of each head's 80 elements are rotated.
        settings={**_WIDE, "hidden_size": 320, "num_key_value_heads": 4, "partial_rotary_factor": 0.25},
        dtype="bfloat16",
        rotary_by_torch=True,
    ),
    Case(
        name="llama4",
        architecture="llama4_text",
        kinds=frozenset({_CHUNKED, _FULL}),
        settings={**_LLAMA4, "interleave_moe_layer_step": 1},
    ),
    Case(
        name="llama4-dense-every-other",
        architecture="llama4_text",
        kinds=frozenset({_CHUNKED, _FULL}),
        settings={**_LLAMA4, "interleave_moe_layer_step": 2},
    ),
    Case(
        name="deepseek_v2",
        architecture="deepseek_v2",
        kinds=frozenset({_LATENT}),
        settings={
            **_LATENTS,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
        dtype="bfloat16",
        needs=AMX,
        rotary_by_torch=True,
        refused=_LATENT_WORDS,
    ),
    Case(
        name="deepseek_v3",
        architecture="deepseek_v3",
        kinds=frozenset({_LATENT}),
        settings={
            **_LATENTS,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
        },
        dtype="bfloat16",
        needs=AMX,
        rotary_by_torch=True,
        refused=_LATENT_WORDS,
    ),
    Case(
        name="nemotron_h",
        architecture="nemotron_h",
        kinds=frozenset({_LINEAR, _FULL}),
        settings={
            **_WIDE,
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
            "layers_block_type": ["linear_attention", "full_attention"] * (LAYERS // 2),
        },
        # As in published files.
        afterwards={"num_hidden_layers": LAYERS, "hybrid_override_pattern": "M*" * (LAYERS // 2)},
        always=True,
    ),
    Case(
        name="falcon_h1",
        architecture="falcon_h1",  # attention and a state in each layer
        settings={**_WIDE, **_MAMBA2, "head_dim": 32, "mamba_d_ssm": 256},
    ),
    Case(
        name="qwen3_next",
        architecture="qwen3_next",
        kinds=frozenset({_LINEAR, _FULL}),
        settings={
            **_HEADS,
            **_MIXTURE,
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        },
        dtype="bfloat16",
    ),
    Case(
        name="granitemoehybrid",
        architecture="granitemoehybrid",
        kinds=frozenset({_LINEAR, _FULL}),
        settings={
            **_WIDE,
            **_MAMBA2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "layer_types": ["mamba", "attention"] * (LAYERS // 2),
        },
        refused="GraniteMoeHybridForCausalLM cannot run in 2 stages: vLLM's class of this model fails",
    ),
    Case(
        name="jamba",
        architecture="jamba",
        kinds=frozenset({_LINEAR, _FULL}),
        settings={**_WIDE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
        refused="CPU ranks do not support JambaForCausalLM with recurrent states",
    ),
    Case(
        name="deepseek_v32",
        architecture="deepseek_v3",
        kinds=frozenset({_SPARSE}),
        settings=_LATENTS,
        dtype="bfloat16",
        refused=f"DeepseekV32ForCausalLM {_SPARSE_WORDS}",
        afterwards={"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_INDEXER},
    ),
    Case(
        name="glm_moe_dsa",
        architecture="deepseek_v3",
        kinds=frozenset({_SPARSE}),
        settings=_LATENTS,
        dtype="bfloat16",
        refused=f"GlmMoeDsaForCausalLM {_SPARSE_WORDS}",
        afterwards={"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **_INDEXER},
    ),
)
"""Two models of each attention kind."""


def _prompts(short: int, long: int) -> Sequence[Sequence[int]]:
    """Returns a prompt of 6 tokens and one of 40 tokens, which begin with these tokens."""
    return tuple(range(short, short + 30, 5)), tuple(range(long, long + 120, 3))


def _format(name: str, scheme: SchemeName, dtype: str = "float32", **fields: Any) -> Case:
    """Builds the case of a dense model."""
    settings = {**_HEADS, **fields.pop("settings", {})}
    return Case(
        name=name,
        architecture="llama",
        settings=settings,
        scheme=scheme,
        dtype=dtype,
        widened=True,
        **fields,
    )


FORMATS: Final = (
    _format("int8", SchemeName.INT8, always=True),
    _format("fp8-per-channel", SchemeName.FP8_CHANNEL),
    _format("int4", SchemeName.INT4),
    _format("int4-zero-points", SchemeName.INT4, drawn="int4 with zero points"),
    _format("int8-weights-alone", SchemeName.INT4, drawn="int8 weights alone"),
    _format("mxfp4-layers", SchemeName.MXFP4, drawn="MXFP4"),
    _format("mxfp8", SchemeName.MXFP8, drawn="MXFP8"),
    _format("nvfp4", SchemeName.NVFP4, drawn="NVFP4"),
    # vLLM supports these methods only in 16 bits. With these prompts, rounding changes no token.
    _format("fp8-per-tensor", SchemeName.FP8_TENSOR, "float16", always=True, prompts=_prompts(23, 37)),
    _format(
        "fp8-modelopt", SchemeName.FP8_TENSOR, "float16", drawn="FP8 of ModelOpt", prompts=_prompts(25, 7)
    ),
    _format("awq", SchemeName.AWQ, "float16", prompts=_prompts(41, 3)),
    _format("gptq", SchemeName.GPTQ, "float16", prompts=_prompts(21, 5)),
    _format(
        "nvfp4-modelopt", SchemeName.NVFP4, "float16", drawn="NVFP4 of ModelOpt", prompts=_prompts(9, 37)
    ),
    _format(
        "fp8-in-blocks",
        SchemeName.FP8_BLOCK,
        "float16",
        settings={"intermediate_size": 512},
        prompts=_prompts(33, 33),
    ),
    Case(
        name="mxfp4",
        architecture="gpt_oss",
        kinds=frozenset({_WINDOWED, _FULL}),
        settings={
            **_HEADS,
            "num_local_experts": 8,
            # A token uses all experts, because rounding to bf16 would exchange two experts with close scores.
            "num_experts_per_tok": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        },
        scheme=SchemeName.MXFP4,
        dtype="bfloat16",
        widened=True,
        # vLLM supports this method only in bf16, and rounding changes fewer tokens with narrow weights.
        spread=0.05,
        prompts=((57, 369, 95, 389, 286, 281), tuple(range(17, 457, 11))),
    ),
)
"""The cases above have unquantized weights."""


def _mixture(name: str, scheme: SchemeName, drawn: str = "", dtype: str = "float32", **fields: Any) -> Case:
    """Builds the case of a mixture.

    In 16 bits, a token uses all experts, because rounding would exchange two experts with close scores.
    """
    return Case(
        name=f"mixture-{name}",
        architecture="qwen3_moe",
        settings={
            **_HEADS,
            **_MIXTURE,
            "moe_intermediate_size": 256,
            "num_experts": _EXPERTS,
            "num_experts_per_tok": 2 if dtype == "float32" else _EXPERTS,
        },
        scheme=scheme,
        drawn=drawn,
        dtype=dtype,
        widened=True,
        **fields,
    )


MIXTURES: Final = (
    # vLLM supports the methods with float16 only in 16 bits. With these prompts, rounding changes no token.
    _mixture("awq", SchemeName.AWQ, dtype="float16", prompts=_prompts(13, 7)),
    _mixture("gptq", SchemeName.GPTQ, dtype="float16", prompts=_prompts(5, 13)),
    _mixture("int4", SchemeName.INT4),
    _mixture("int4-zero-points", SchemeName.INT4, "int4 with zero points"),
    _mixture("int8", SchemeName.INT8),
    _mixture("fp8-in-blocks", SchemeName.FP8_BLOCK, dtype="float16", prompts=_prompts(31, 21)),
    _mixture("fp8-per-channel", SchemeName.FP8_CHANNEL),
    _mixture("fp8-per-tensor", SchemeName.FP8_TENSOR, dtype="float16", prompts=_prompts(9, 19)),
    _mixture("mxfp4", SchemeName.MXFP4, "MXFP4"),
    _mixture("mxfp8", SchemeName.MXFP8, "MXFP8"),
    _mixture("nvfp4", SchemeName.NVFP4, "NVFP4"),
)
"""Experts in each format that our kernels compute."""

FEED_FORWARD: Final = (
    _mixture("fp8-in-float16", SchemeName.FP8_BLOCK, dtype="float16", prompts=_prompts(31, 21)),
)
"""Experts of a feed-forward rank. feed_forward/test_experts.py has all formats."""

CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {case.name: case for case in (*ATTENTION, *FORMATS, *MIXTURES, *FEED_FORWARD)}
)
