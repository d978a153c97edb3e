"""Formats and activations that our CPU kernels and vLLM's support: linear layers and routed experts. Pure.

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
from heteroinfer_operator.vllm_support.quantization import in_bf16

_SOFTMAX: Final = frozenset({Routing.SOFTMAX, Routing.TOP_K_SOFTMAX, Routing.SOFTMAX_NORMALIZED})
NO_KERNEL: Final = "HeteroInfer has no CPU kernel for this format"
_SHARED_COLUMNS: Final = frozenset({SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4, SchemeName.FP8_BLOCK})
"""Formats in which a group of intermediate columns shares a scale that ranks cannot divide."""
_GROUPS: Final = "the kernel supports groups of a multiple of 32, and in FP8 blocks of 128, only"
_FP8_BLOCK: Final = 128
"""Columns and inputs of a block of experts in FP8."""
_SILU: Final = frozenset({"silu"})
_GATED: Final = _SILU | {"swigluoai", "gelu", "gelu_tanh"}
_FOUR: Final = frozenset({4})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKernel:
    """vLLM's kernel for the routed experts of a stage on CPUs, in one format.

    Attributes:
        routing: supported routers; None for any.
        group: required number of weights that share a scale; 0 for any.
        dtypes: supported types of activations; empty for any.
        activations: supported functions of a gate, by vLLM's names.
        needs: AMX or AVX512 if the kernel requires these instructions, or "".
    """

    routing: frozenset[Routing] | None
    group: int = 0
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    activations: frozenset[str] = _SILU
    needs: str = AMX


CODED: Final[Mapping[SchemeName, frozenset[int]]] = MappingProxyType(
    {
        SchemeName.AWQ: _FOUR,
        SchemeName.GPTQ: _FOUR,
        SchemeName.INT4: frozenset({4, 8}),
        SchemeName.INT8: frozenset({8}),
        SchemeName.FP8_BLOCK: frozenset({8}),
        SchemeName.FP8_CHANNEL: frozenset({8}),
        SchemeName.FP8_TENSOR: frozenset({8}),
        SchemeName.MXFP4: _FOUR,
        SchemeName.MXFP8: frozenset({8}),
        SchemeName.NVFP4: _FOUR,
    }
)
"""Formats that our own kernels compute on any CPU with AVX2, with their bits: linear layers of stages
(patches/cpu_coded.py), experts of stages that hold whole layers (patches/cpu_coded_experts.py), and MLPs and
experts of feed-forward ranks (feed_forward/expert_formats.py, whose experts in int4 have 4 bits)."""
CPU_EXPERTS: Final[Mapping[SchemeName, ExpertsKernel]] = MappingProxyType(
    {
        SchemeName.NONE: ExpertsKernel(
            routing=None,
            dtypes=frozenset(),
            activations=_GATED,
            needs="",
        ),
        SchemeName.FP8_BLOCK: ExpertsKernel(
            routing=_SOFTMAX | {Routing.DEEPSEEK_V3}, group=128, dtypes=frozenset({"bfloat16"}), needs=AVX512
        ),
        SchemeName.MXFP4: ExpertsKernel(routing=_SOFTMAX, activations=_SILU | {"swigluoai"}),
        SchemeName.AWQ: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.GPTQ: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.INT4: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.INT8: ExpertsKernel(routing=_SOFTMAX),
    }
)
"""Kernels for experts of stages whose ranks do not hold whole layers
(vllm/model_executor/layers/fused_moe/experts/cpu_moe.py@v0.32.0). They compute 16-bit types only, and fail
with others at the first step (csrc/cpu/sgl-kernels/moe.cpp::fused_experts_cpu). FP8 in blocks is computed by
our kernels (patches/cpu_experts.py)."""
REMOTE_ACTIVATIONS: Final = frozenset(
    {"silu", "gelu", "gelu_tanh", "relu2", "relu2_no_mul", "swigluoai", "swigluoai_uninterleave"}
)
"""Activations of experts that feed-forward ranks compute (feed_forward/held_experts.py)."""


def refuse(what: str, why: str, remedy: str = "Use GPU roles only") -> PlanError:
    """Returns the error of CPU ranks that do not support a model or an option."""
    return PlanError(
        f"model: CPU ranks do not support {what}: {why}. {remedy}", reason=PlanReason.UNSUPPORTED_MODEL
    )


def format_of(profile: ModelProfile) -> str:
    """Describes the format of the weights; an unknown format by the method's own name."""
    unnamed = profile.scheme.name is SchemeName.OTHER and profile.quantization
    return profile.quantization if unnamed else str(profile.scheme)


def check_backend(profile: ModelProfile, engine: EngineSettings) -> None:
    """Checks that no option chooses kernels of GPUs for experts of CPU ranks; raises PlanError."""
    chosen = EngineOptions.of(engine.extra_args).moe_backend
    if chosen != "auto" and profile.experts:
        raise refuse(
            f"engine.args --moe-backend {chosen} with experts",
            "these kernels are for GPUs, and vLLM would use them on all devices",
            "Remove the option, so that vLLM chooses kernels for each device",
        )


def _activation(profile: ModelProfile) -> str:
    """Returns vLLM's name of the experts' activation."""
    if profile.limited_experts and profile.architecture in STEP_LIMITS:
        return "swiglustep"
    return EXPERT_ACTIVATIONS.get(profile.architecture, "silu")


def _check_activation(profile: ModelProfile, known: frozenset[str], remedy: str) -> None:
    if (activation := _activation(profile)) not in known:
        raise refuse(
            f"{profile.architecture} with the experts' activation {activation}",
            f"the kernel for experts in {_experts_format(profile)} supports {', '.join(sorted(known))} only",
            remedy,
        )


def _experts_format(profile: ModelProfile) -> str:
    quantized = any(kind.experts_quantized for kind in profile.layers)
    return str(profile.scheme_of_experts) if quantized else profile.dtype


def check_remote_experts(profile: ModelProfile) -> None:
    """Checks that feed-forward ranks support a model's experts; raises PlanError."""
    if not profile.experts:
        return
    _check_activation(profile, REMOTE_ACTIVATIONS, "Use GPU roles only")
    _check_coded(profile, f"Use the same model {in_bf16(profile)}, or use GPU roles only")


def _check_coded(profile: ModelProfile, plain: str) -> None:
    """Checks that our kernels for coded weights support the format and sizes of a model's experts."""
    scheme = profile.scheme_of_experts
    quantized = [kind for kind in profile.layers if kind.experts_quantized]
    if not quantized:
        return
    if scheme.bits not in CODED.get(scheme.name, ()) or (scheme.name is SchemeName.INT4 and scheme.bits != 4):
        raise refuse(f"experts in {format_of(profile)}", NO_KERNEL, plain)
    unit = scheme.group if scheme.name in _SHARED_COLUMNS else KERNEL_BLOCK
    if unit % KERNEL_BLOCK or (scheme.name is SchemeName.FP8_BLOCK and unit != _FP8_BLOCK):
        raise refuse(f"experts in {scheme} of {unit}", _GROUPS, plain)
    for columns in sorted({kind.columns for kind in quantized if kind.columns % (unit or KERNEL_BLOCK)}):
        raise refuse(
            f"experts in {scheme} with {columns} intermediate columns",
            f"the kernel supports multiples of {unit or KERNEL_BLOCK} only",
            plain,
        )


def check_experts(profile: ModelProfile, engine: EngineSettings, *, whole: bool) -> None:
    """Checks that CPU ranks of stages support a model's experts; raises PlanError.

    Args:
        whole: whether a rank holds whole layers, so that our kernels compute quantized experts.
    """
    if not profile.experts:
        return
    remote = "use GPU roles only, or let only experts run on CPUs (parallelism.mode: FeedForward)"
    in_turn = f"{remote[0].upper()}{remote[1:]}"
    if profile.limited_experts:
        raise refuse(
            f"{profile.architecture} with a limit of its experts' activations (swiglu_limits)",
            "vLLM's CPU kernels silently ignore the limit",
            in_turn,
        )
    if profile.architecture in ZERO_EXPERTS:
        raise refuse(
            f"{profile.architecture} with zero experts", "vLLM's router for them is for GPUs only", in_turn
        )
    quantized = any(kind.experts_quantized for kind in profile.layers)
    scheme = profile.scheme_of_experts
    kernel = CPU_EXPERTS.get(scheme.name if quantized else SchemeName.NONE)
    plain = f"Use the same model {in_bf16(profile)}, {remote}"
    if quantized and whole:
        _check_activation(profile, _GATED, in_turn)
        _check_coded(profile, plain)
        return
    if kernel is None:
        raise refuse(f"experts in {format_of(profile)}", "vLLM has no CPU kernel for this format", plain)
    _check_activation(profile, kernel.activations, in_turn)
    if kernel.group and scheme.group != kernel.group:
        raise refuse(
            f"experts in {scheme}",
            f"the kernel of stages supports groups of {kernel.group} only",
            f"Use the model in groups of {kernel.group} or {in_bf16(profile)}, {remote}",
        )
    if kernel.dtypes and engine.dtype not in kernel.dtypes:
        raise refuse(
            f"experts in {scheme}, with engine.dtype {engine.dtype}",
            f"the kernel of stages supports {' and '.join(sorted(kernel.dtypes))} only",
            "Set engine.dtype: bfloat16",
        )
    if kernel.routing is not None and profile.routing not in kernel.routing:
        raise refuse(
            f"experts in {scheme} with {profile.routing} routing",
            f"the kernel of stages supports {', '.join(sorted(kernel.routing))} only",
            plain,
        )


def stage_needs(profile: ModelProfile, *, whole: bool) -> str:
    """Returns AMX or AVX512 if the kernel for a model's experts in stages needs it, or "".

    Args:
        whole: whether a rank holds whole layers.
    """
    kernel = CPU_EXPERTS.get(profile.scheme_of_experts.name)
    quantized = any(kind.experts_quantized for kind in profile.layers)
    return kernel.needs if kernel and quantized and not whole else ""
