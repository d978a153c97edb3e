"""Formats and activations that CPU kernels support, our own and vLLM's, and the checks of a model. Pure.

tests/integration/models compares the tables with vLLM's own kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.column_shares import KERNEL_BLOCK
from heteroinfer_contract.model import Routing, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.nodes.cpu_features import AMX, AVX512
from heteroinfer_operator.vllm_support.architectures import EXPERT_ACTIVATIONS, STEP_LIMITS, ZERO_EXPERTS
from heteroinfer_operator.vllm_support.engine_options import EngineOptions
from heteroinfer_operator.vllm_support.quantization import describe_in_bf16

_SOFTMAX: Final = frozenset({Routing.SOFTMAX, Routing.TOP_K_SOFTMAX, Routing.SOFTMAX_NORMALIZED})
NO_KERNEL: Final = "HeteroInfer has no CPU kernel for this format"
_FORMATS_WITH_SHARED_SCALES: Final = frozenset(
    {SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4, SchemeName.FP8_BLOCK}
)
"""Formats in which a group of intermediate columns shares a scale that ranks cannot divide."""
_SUPPORTED_GROUPS: Final = "the kernel requires groups of a multiple of 32 weights, and in FP8 blocks of 128"
_FP8_BLOCK: Final = 128
"""Number of columns, and of inputs, in a block of experts in FP8."""
_SILU_ONLY: Final = frozenset({"silu"})
_GATED_ACTIVATIONS: Final = _SILU_ONLY | {"swigluoai", "gelu", "gelu_tanh"}
_FOUR_BITS_ONLY: Final = frozenset({4})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKernel:
    """vLLM's kernel for routed experts in one format, on CPU ranks that share the layers of their stage.

    Attributes:
        routing: supported routers; None if all are.
        group: required number of weights that share a scale; 0 if any is supported.
        dtypes: supported types of activations; empty if all are.
        activations: supported activation functions, by vLLM's names.
        instructions: AMX or AVX512 if the kernel requires these instructions, or "".
    """

    routing: frozenset[Routing] | None
    group: int = 0
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    activations: frozenset[str] = _SILU_ONLY
    instructions: str = AMX


CODED_BITS: Final[Mapping[SchemeName, frozenset[int]]] = MappingProxyType(
    {
        SchemeName.AWQ: _FOUR_BITS_ONLY,
        SchemeName.GPTQ: _FOUR_BITS_ONLY,
        SchemeName.INT4: frozenset({4, 8}),
        SchemeName.INT8: frozenset({8}),
        SchemeName.FP8_BLOCK: frozenset({8}),
        SchemeName.FP8_CHANNEL: frozenset({8}),
        SchemeName.FP8_TENSOR: frozenset({8}),
        SchemeName.MXFP4: _FOUR_BITS_ONLY,
        SchemeName.MXFP8: frozenset({8}),
        SchemeName.NVFP4: _FOUR_BITS_ONLY,
    }
)
"""Formats that our own kernels compute on any CPU with AVX2, and the supported bits of each. These kernels
compute linear layers of stages (patches/cpu_coded.py), experts of stages whose ranks hold whole layers
(patches/cpu_coded_experts.py), and MLPs and experts of feed-forward ranks (feed_forward/expert_formats.py).
Experts in int4 must have 4 bits."""
CPU_EXPERTS: Final[Mapping[SchemeName, ExpertsKernel]] = MappingProxyType(
    {
        SchemeName.NONE: ExpertsKernel(
            routing=None,
            dtypes=frozenset(),
            activations=_GATED_ACTIVATIONS,
            instructions="",
        ),
        SchemeName.FP8_BLOCK: ExpertsKernel(
            routing=_SOFTMAX | {Routing.DEEPSEEK_V3},
            group=128,
            dtypes=frozenset({"bfloat16"}),
            instructions=AVX512,
        ),
        SchemeName.MXFP4: ExpertsKernel(routing=_SOFTMAX, activations=_SILU_ONLY | {"swigluoai"}),
        SchemeName.AWQ: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.GPTQ: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.INT4: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.INT8: ExpertsKernel(routing=_SOFTMAX),
    }
)
"""Kernels for experts of CPU stages whose ranks share each layer, by format
(vllm/model_executor/layers/fused_moe/experts/cpu_moe.py@v0.32.0). vLLM's quantized kernels support 16-bit
activations only, and fail with other types at the first step
(csrc/cpu/sgl-kernels/moe.cpp::fused_experts_cpu). Our own kernels compute FP8 in blocks
(patches/cpu_experts.py)."""
FEED_FORWARD_ACTIVATIONS: Final = frozenset(
    {"silu", "gelu", "gelu_tanh", "relu2", "relu2_no_mul"}
    | {"swigluoai", "swigluoai_uninterleave", "swiglustep"}
)
"""Activation functions of experts that feed-forward ranks support, by vLLM's names
(feed_forward/held_experts.py)."""


def build_cpu_error(
    subject: str, why: str, remedy: str = "Use GPU roles only", *, field: str = "model"
) -> PlanError:
    """Returns the error of a model or an option that CPU ranks do not support.

    Args:
        field: field of the spec that contains the model or the option.
    """
    return PlanError(
        f"{field}: CPU ranks do not support {subject}: {why}. {remedy}", reason=PlanReason.UNSUPPORTED_MODEL
    )


def describe_format(profile: ModelProfile) -> str:
    """Describes the format of the weights; names the quantization method if the format is unknown."""
    unnamed = profile.scheme.name is SchemeName.OTHER and profile.quantization
    return profile.quantization if unnamed else str(profile.scheme)


def check_moe_backend(profile: ModelProfile, engine: EngineSettings) -> None:
    """Raises PlanError if an option makes CPU ranks compute experts with kernels for GPUs."""
    backend = EngineOptions.of(engine.extra_args).moe_backend
    if backend != "auto" and profile.experts:
        raise build_cpu_error(
            f"--moe-backend {backend} with experts",
            "the option selects kernels for GPUs, and vLLM would use these kernels on CPUs, too",
            "Remove the option, so that vLLM chooses kernels for each device",
            field="engine.args",
        )


def name_activation(profile: ModelProfile) -> str:
    """Returns vLLM's name of the experts' activation function."""
    if profile.limited_experts and profile.architecture in STEP_LIMITS:
        return "swiglustep"
    return EXPERT_ACTIVATIONS.get(profile.architecture, "silu")


def _check_activation(profile: ModelProfile, supported: frozenset[str], remedy: str) -> None:
    """Raises PlanError if the kernel does not support the experts' activation function."""
    activation = name_activation(profile)
    if activation not in supported:
        raise build_cpu_error(
            f"{profile.architecture} with the experts' activation {activation}",
            f"the kernel for experts in {_describe_experts_format(profile)} supports "
            f"{', '.join(sorted(supported))} only",
            remedy,
        )


def _describe_experts_format(profile: ModelProfile) -> str:
    """Describes the format of the experts' weights, or their element type if they are not quantized."""
    return str(profile.scheme_of_experts) if _has_quantized_experts(profile) else profile.dtype


def _has_quantized_experts(profile: ModelProfile) -> bool:
    """Reports whether the experts of any layer are quantized."""
    return any(kind.experts_quantized for kind in profile.layers)


def check_feed_forward_experts(profile: ModelProfile) -> None:
    """Raises PlanError if feed-forward ranks do not support a model's experts."""
    if not profile.experts:
        return
    _check_activation(profile, FEED_FORWARD_ACTIVATIONS, "Use GPU roles only")
    _check_coded_experts(profile, f"Use the same model {describe_in_bf16(profile)}, or use GPU roles only")


def _check_coded_experts(profile: ModelProfile, remedy: str) -> None:
    """Raises PlanError if our kernels do not support the format or sizes of a model's quantized experts."""
    scheme = profile.scheme_of_experts
    quantized_layers = [kind for kind in profile.layers if kind.experts_quantized]
    if not quantized_layers:
        return
    is_supported_format = scheme.bits in CODED_BITS.get(scheme.name, ())
    # CODED_BITS also contains 8 bits of INT4, which only linear layers may have.
    is_wide_int4 = scheme.name is SchemeName.INT4 and scheme.bits != 4
    if not is_supported_format or is_wide_int4:
        raise build_cpu_error(f"experts in {describe_format(profile)}", NO_KERNEL, remedy)
    # Ranks divide columns in whole units. 0 if a group is a whole column of weights: then only KERNEL_BLOCK
    # counts.
    unit_columns = scheme.group if scheme.name in _FORMATS_WITH_SHARED_SCALES else KERNEL_BLOCK
    is_fp8 = scheme.name is SchemeName.FP8_BLOCK
    if unit_columns % KERNEL_BLOCK or (is_fp8 and unit_columns != _FP8_BLOCK):
        groups = f", groups of {unit_columns} weights" if is_fp8 else ""
        raise build_cpu_error(f"experts in {scheme}{groups}", _SUPPORTED_GROUPS, remedy)
    multiple = unit_columns or KERNEL_BLOCK
    unsupported_columns = [kind.columns for kind in quantized_layers if kind.columns % multiple]
    if unsupported_columns:
        raise build_cpu_error(
            f"experts in {scheme} with {min(unsupported_columns)} intermediate columns",
            f"the kernel supports multiples of {multiple} only",
            remedy,
        )


def check_stage_experts(profile: ModelProfile, engine: EngineSettings, *, has_whole_layers: bool) -> None:
    """Raises PlanError if CPU ranks in stages do not support a model's experts.

    Our own kernels compute quantized experts of ranks that hold whole layers. vLLM's kernels compute all
    other experts.

    Args:
        has_whole_layers: whether each rank holds whole layers.
    """
    if not profile.experts:
        return
    remedy = "use GPU roles only"  # the end of a sentence; `remedy_sentence` is the same as a sentence
    if name_activation(profile) in FEED_FORWARD_ACTIVATIONS:
        remedy += ", or compute only experts on CPUs (parallelism.mode: FeedForward)"
    remedy_sentence = f"{remedy[0].upper()}{remedy[1:]}"
    if profile.architecture in ZERO_EXPERTS:
        raise build_cpu_error(
            f"{profile.architecture} with zero experts (experts that compute nothing)",
            "vLLM's router for zero experts needs a GPU",
            remedy_sentence,
        )
    if _has_quantized_experts(profile) and has_whole_layers:
        _check_activation(profile, _GATED_ACTIVATIONS, remedy_sentence)
        _check_coded_experts(profile, f"Use the same model {describe_in_bf16(profile)}, {remedy}")
        return
    if profile.limited_experts and profile.architecture not in STEP_LIMITS:
        raise build_cpu_error(
            f"{profile.architecture}, which limits its experts' activations (swiglu_limits)",
            "vLLM's CPU kernels silently ignore the limit, so answers would be wrong",
            remedy_sentence,
        )
    _check_vllm_kernel(profile, engine, remedy)


def _check_vllm_kernel(profile: ModelProfile, engine: EngineSettings, remedy: str) -> None:
    """Raises PlanError if vLLM's kernel for experts of CPU stages does not support the model's experts.

    Args:
        remedy: alternatives to CPU ranks in stages, as the end of a sentence.
    """
    scheme = profile.scheme_of_experts
    vllm_kernel = CPU_EXPERTS.get(scheme.name if _has_quantized_experts(profile) else SchemeName.NONE)
    bf16_remedy = f"Use the same model {describe_in_bf16(profile)}, {remedy}"
    if vllm_kernel is None:
        raise build_cpu_error(
            f"experts in {describe_format(profile)}", "vLLM has no CPU kernel for this format", bf16_remedy
        )
    _check_activation(profile, vllm_kernel.activations, f"{remedy[0].upper()}{remedy[1:]}")
    if vllm_kernel.group and scheme.group != vllm_kernel.group:
        raise build_cpu_error(
            f"experts in {scheme}",
            f"vLLM's expert kernel for CPU stages supports only group size {vllm_kernel.group}",
            f"Use the same model quantized with group size {vllm_kernel.group}, or "
            f"{describe_in_bf16(profile)}, {remedy}",
        )
    if vllm_kernel.dtypes and engine.dtype not in vllm_kernel.dtypes:
        raise build_cpu_error(
            f"experts in {scheme}, with engine.dtype {engine.dtype}",
            f"vLLM's expert kernel for CPU stages supports {' and '.join(sorted(vllm_kernel.dtypes))} only",
            "Set engine.dtype: bfloat16",
        )
    if vllm_kernel.routing is not None and profile.routing not in vllm_kernel.routing:
        raise build_cpu_error(
            f"experts in {scheme} with {profile.routing} routing",
            "vLLM's expert kernel for CPU stages supports "
            f"{', '.join(sorted(vllm_kernel.routing))} routing only",
            bf16_remedy,
        )


def stage_instructions(profile: ModelProfile, *, has_whole_layers: bool) -> str:
    """Returns the instructions (AMX or AVX512) that the experts of CPU stages need; "" if they need none.

    Args:
        has_whole_layers: whether each rank holds whole layers, so that our kernels compute quantized experts.
            Our kernels need AVX2 only.
    """
    kernel = CPU_EXPERTS.get(profile.scheme_of_experts.name)
    uses_vllm_kernel = _has_quantized_experts(profile) and not has_whole_layers
    return kernel.instructions if kernel and uses_vllm_kernel else ""
