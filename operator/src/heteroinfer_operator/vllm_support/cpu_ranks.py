"""What CPU ranks, and stages, can run, as data: format x routing x attention x type x instructions. Pure.

tests/integration/models asks vLLM's own kernels for it, so that it stays true. What vLLM would refuse at
load, or serve wrong, is refused here, with what to do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from heteroinfer_contract.load_formats import OF_GPUS, SAFETENSORS
from heteroinfer_contract.model import AttentionKind, Routing, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_contract.refused_args import MULTIMODAL_CPU_FIRST
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.nodes.cpu_features import AMX, AVX512, CPUID_LABEL, CPUID_OF
from heteroinfer_operator.vllm_support.architectures import (
    BROKEN_PIPELINE,
    IMAGES_ATTEND_BOTH_WAYS,
    OWN_CPU_BLOCKS,
    UNGATED_EXPERTS,
    ZERO_EXPERTS,
)
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, EngineOptions
from heteroinfer_operator.vllm_support.listed_architectures import (
    GATED_DELTA_NETS,
    GPU_CLASSES,
    GPU_STATES,
    NO_PIPELINE,
)
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS, in_bf16

_WHO_HAS_IT: Final = MappingProxyType(
    {
        AMX: "Intel Xeon of the 4th generation or later",
        AVX512: "Intel Xeon Scalable; AMD EPYC of the 4th generation or later",
    }
)
_SOFTMAX: Final = frozenset({Routing.SOFTMAX, Routing.TOP_K_SOFTMAX, Routing.SOFTMAX_NORMALIZED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernel:
    """A kernel of CPUs for linear layers in one format.

    Attributes:
        bits: of a weight that it takes; empty for any.
        dtypes: of activations that it takes; empty for any.
        needs: AMX or AVX512 if it runs on no other CPUs, or "".
    """

    bits: frozenset[int] = frozenset()
    dtypes: frozenset[str] = frozenset()
    needs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKernel:
    """A kernel of CPUs for routed experts in one format.

    Attributes:
        routing: what routers it is written for; None for any.
        group: weights that share a scale; 0 for any.
        dtypes: of activations that it takes; empty for any.
        needs_amx: whether it runs on no other CPUs.
    """

    routing: frozenset[Routing] | None
    group: int = 0
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    needs_amx: bool = True


CPU_LINEAR: Final[Mapping[SchemeName, LinearKernel]] = MappingProxyType(
    {
        SchemeName.NONE: LinearKernel(),
        SchemeName.AWQ: LinearKernel(bits=frozenset({4}), needs=AVX512),
        SchemeName.GPTQ: LinearKernel(bits=frozenset({4}), needs=AVX512),
        SchemeName.INT4: LinearKernel(
            dtypes=frozenset({"bfloat16", "float16"}), bits=frozenset({4}), needs=AVX512
        ),
        SchemeName.INT8: LinearKernel(),
        SchemeName.FP8_BLOCK: LinearKernel(needs=AVX512),
        SchemeName.FP8_CHANNEL: LinearKernel(needs=AVX512),
        SchemeName.FP8_TENSOR: LinearKernel(needs=AVX512),
    }
)
"""What is not here fails at load (vllm/model_executor/kernels/linear@v0.32.0). FP8 is computed by our kernels
(patches/cpu_coded.py), which need AVX-512. vLLM's kernel of 4 bits (cpu_gemm_wna16) is in its libraries for
AVX-512 alone: on other CPUs vLLM chooses that kernel, and its first step fails."""
CPU_EXPERTS: Final[Mapping[SchemeName, ExpertsKernel]] = MappingProxyType(
    {
        SchemeName.NONE: ExpertsKernel(routing=None, dtypes=frozenset(), needs_amx=False),
        SchemeName.FP8_BLOCK: ExpertsKernel(
            routing=_SOFTMAX | {Routing.DEEPSEEK_V3}, group=128, dtypes=frozenset({"bfloat16"})
        ),
        SchemeName.MXFP4: ExpertsKernel(routing=_SOFTMAX),
        SchemeName.AWQ: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.GPTQ: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.INT4: ExpertsKernel(routing=_SOFTMAX, group=128),
        SchemeName.INT8: ExpertsKernel(routing=_SOFTMAX),
    }
)
"""vllm/model_executor/layers/fused_moe/experts/cpu_moe.py@v0.32.0, whose kernels compute types of 16 bits
alone, and else fail at their first step (csrc/cpu/sgl-kernels/moe.cpp::fused_experts_cpu); ours for FP8
blocks compute bf16."""
CPU_HEAD_SIZES: Final = frozenset({32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Elements of an attention head that kernels of CPUs are compiled for; with others vLLM ends at its first
step (csrc/cpu/cpu_attn.cpp::cpu_attn_get_scheduler_metadata@v0.32.0)."""
CPU_FP8_HEAD_MULTIPLE: Final = 32
"""What elements of an attention head must be divisible by for a cache of keys and values in FP8
(vllm/v1/attention/backends/cpu_attn.py::_get_attn_isa@v0.32.0)."""
CPU_LATENT_SIZE: Final = 576
"""Elements of a latent that kernels of CPUs are written for, with AMX and without: 512 and 64 of position
(vllm/v1/attention/backends/mla/amx_mla.py, cpu_mla.py::get_supported_head_sizes@v0.32.0). Nobody asks it."""
CPU_LATENT_DTYPE: Final = "bfloat16"
"""Of latent attention with AMX, its cache too (vllm/v1/attention/backends/mla/amx_mla.py@v0.32.0). The engine
asks nobody: in float16 its decoding of 512 + 64 elements gave NaN 30 times of 30 (AMX, 2026-11-22)."""
CPU_DELTA_NET_DTYPE: Final = "bfloat16"
"""Of linear attention by gated delta nets: with another one vLLM ends at its first step
(vllm/.../mamba/ops/cpu/gdn_attention.py::cpu_gdn_attention_core@v0.32.0)."""
CpuFeatures: TypeAlias = Mapping[str, frozenset[str] | None]
"""By role with ranks on CPUs: what the CPUs of all its nodes can do, or None if that is unknown."""
_KEYS_AND_VALUES: Final = (AttentionKind.FULL, AttentionKind.WINDOW, AttentionKind.CHUNKED)


def check_support(
    profile: ModelProfile, engine: EngineSettings, cpus: CpuFeatures, *, stages: int, first: Device
) -> tuple[str, ...]:
    """Returns what users should know of a model on CPU ranks, one line each.

    Args:
        cpus: of the group's CPU ranks; empty without any.
        first: what the first rank computes on.

    Raises:
        PlanError: vLLM cannot run it in stages, or CPU ranks not at all, or not here; the message says what
            can be done.
    """
    if stages > 1:
        _check_pipeline(profile, stages)
    if not cpus:
        return ()
    _check_classes(profile)
    warnings = _every_reason(
        lambda: _check_attention(profile),
        lambda: _check_latent(profile, engine),
        lambda: _check_states(profile, engine),
        lambda: _check_kv_cache(profile, engine),
        lambda: _check_encoder(profile, engine, first),
        lambda: _check_linear(profile, engine),
        lambda: _check_experts(profile, engine),
    )
    return (*warnings, *_check_instructions(_needs(profile, engine), cpus))


def _every_reason(*checks: Callable[[], tuple[str, ...] | None]) -> tuple[str, ...]:
    """Runs all checks; returns what users should know.

    Raises:
        PlanError: one or more of them failed; the message has a line for each, so that users fix all at once.
    """
    warnings: list[str] = []
    errors: list[PlanError] = []
    for check in checks:
        try:
            warnings += check() or ()
        except PlanError as error:
            errors.append(error)
    if errors:
        messages = dict.fromkeys(error.message for error in errors)
        raise PlanError("\n".join(messages), reason=errors[0].reason)
    return tuple(warnings)


def check_load_format(engine: EngineSettings) -> None:
    """Checks that CPU ranks in stages can read what `--load-format` names.

    They could read the same files by themselves, but GPU ranks would wait for them: all ranks of a group
    share the files out there (vllm/.../weight_utils.py::fastsafetensors_weights_iterator,
    ::instanttensor_weights_iterator@v0.32.0).

    Raises:
        PlanError: it is a way of GPUs alone.
    """
    asked = EngineOptions.of(engine.extra_args).load_format
    if (asked or "").lower() in OF_GPUS:
        raise _refuse(
            f"engine.args --load-format {asked}",
            "vLLM has it for groups of GPUs alone",
            f"leave it out, or set {SAFETENSORS}",
        )


def check_remote_support(
    profile: ModelProfile, moved: ModelProfile, engine: EngineSettings, cpus: CpuFeatures
) -> tuple[str, ...]:
    """Returns what users should know of feed-forward ranks beside a GPU, one line each.

    Args:
        profile: of the model, whose layers they build without memory.
        moved: of what they have of it.
        cpus: of the role whose pod they are in.

    Raises:
        PlanError: they cannot compute it; the message says what can be done.
    """
    _check_classes(profile)
    _check_sparse(profile)
    warnings = _every_reason(
        lambda: _check_linear(moved, engine), lambda: _check_experts(moved, engine, route=False)
    )
    return (*warnings, *_check_instructions(_weights_need(moved), cpus))


def _refuse(what: str, why: str, remedy: str = "use GPU roles only") -> PlanError:
    return PlanError(
        f"model: got {what}, which CPU ranks cannot run: {why}; {remedy}", reason=PlanReason.UNSUPPORTED_MODEL
    )


def _check_pipeline(profile: ModelProfile, stages: int) -> None:
    if profile.architecture in NO_PIPELINE | BROKEN_PIPELINE:
        why = (
            "vLLM has no pipeline for it"
            if profile.architecture in NO_PIPELINE
            else "vLLM's class for it ends at its load there"
        )
        raise PlanError(
            f"model: got {profile.architecture} in {stages} stages, but {why}; use one "
            "stage: the GPUs of one pod (parallelism.tensor), mode Tensor, whose ranks split each layer, or "
            "mode FeedForward, whose CPU ranks are in no stage",
            reason=PlanReason.UNSUPPORTED_MODEL,
        )


def _check_classes(profile: ModelProfile) -> None:
    gpus = "use GPU roles only, or another model"
    if profile.architecture in GPU_CLASSES:
        raise _refuse(profile.architecture, "vLLM has it in classes for GPUs alone", gpus)
    if profile.architecture in OWN_CPU_BLOCKS:
        why = "vLLM takes KV blocks of 256 tokens there, whatever the group has, which no plan counts yet"
        raise _refuse(profile.architecture, why, gpus)


def _check_sparse(profile: ModelProfile) -> None:
    if any(kind.attention is AttentionKind.SPARSE for kind in profile.layers):
        raise _refuse(
            f"{profile.architecture} with sparse attention",
            "vLLM has it on GPUs only",
            "use GPU roles only, or a model of the family without it (DeepSeek-V3, V3.1)",
        )


def _check_attention(profile: ModelProfile) -> None:
    _check_sparse(profile)
    for kind in profile.layers:
        key, value = kind.head_sizes
        if kind.attention in _KEYS_AND_VALUES and kind.kv_heads and key != value:
            raise _refuse(
                f"{profile.architecture} with keys of {key} elements and values of {value} in each head",
                "its kernels are for keys and values of one size",
                "use GPU roles only, or give CPUs no attention (parallelism.mode: FeedForward)",
            )
    # A profile of version 0.1.0 says nothing of its layers, and what started with it starts again.
    for size in sorted(_head_sizes(profile) - CPU_HEAD_SIZES) if profile.kinds else ():
        raise _refuse(
            f"{profile.architecture} with attention heads of {size} elements",
            f"its kernels are for {', '.join(map(str, sorted(CPU_HEAD_SIZES)))}",
            "use GPU roles only, or give CPUs no attention (parallelism.mode: FeedForward)",
        )


def _check_latent(profile: ModelProfile, engine: EngineSettings) -> None:
    if not profile.is_latent:
        return
    what = f"{profile.architecture} (multi-head latent attention)"
    latents = {kind.kv_width for kind in profile.layers if kind.attention is AttentionKind.LATENT}
    for size in sorted(size for size in latents if size % CPU_LATENT_SIZE):  # a layer may have several
        raise _refuse(
            f"{what} with latents of {size} elements",
            f"its kernels are for {CPU_LATENT_SIZE}",
            "use GPU roles only, or give CPUs no attention (parallelism.mode: FeedForward)",
        )
    if engine.dtype != CPU_LATENT_DTYPE:
        raise _refuse(
            f"{what} with engine.dtype {engine.dtype}",
            f"its kernels are for {CPU_LATENT_DTYPE}, and in float16 give no numbers, without an error",
            f"set engine.dtype: {CPU_LATENT_DTYPE}, or use GPU roles only",
        )
    asked = EngineOptions.of(engine.extra_args).kv_cache_dtype
    if asked != "auto":
        raise _refuse(
            f"{what} with engine.args --kv-cache-dtype {asked}",
            "its kernels keep latents in the model's own type, and know no other",
            "leave it out, or use GPU roles only",
        )


def _check_states(profile: ModelProfile, engine: EngineSettings) -> None:
    if profile.architecture in GPU_STATES:
        why = "vLLM's kernels for states of this kind are for GPUs"
        raise _refuse(f"{profile.architecture} with recurrent states", why)
    if profile.architecture in GATED_DELTA_NETS and engine.dtype != CPU_DELTA_NET_DTYPE:
        raise _refuse(
            f"{profile.architecture} (gated delta nets) with engine.dtype {engine.dtype}",
            f"its kernels are for {CPU_DELTA_NET_DTYPE}",
            f"set engine.dtype: {CPU_DELTA_NET_DTYPE}, or use GPU roles only",
        )


def _head_sizes(profile: ModelProfile) -> frozenset[int]:
    kinds = [kind for kind in profile.layers if kind.attention in _KEYS_AND_VALUES and kind.kv_heads]
    return frozenset(size for kind in kinds for size in kind.head_sizes)


def _check_kv_cache(profile: ModelProfile, engine: EngineSettings) -> None:
    asked = EngineOptions.of(engine.extra_args).kv_cache_dtype
    if asked.startswith("fp8"):
        for size in sorted(each for each in _head_sizes(profile) if each % CPU_FP8_HEAD_MULTIPLE):
            raise _refuse(
                f"engine.args --kv-cache-dtype {asked} with attention heads of {size} elements",
                f"a cache in FP8 is for multiples of {CPU_FP8_HEAD_MULTIPLE} there",
                "leave it out",
            )
    elif asked in ELEMENT_BYTES and asked != engine.dtype:
        raise _refuse(
            f"engine.args --kv-cache-dtype {asked} with engine.dtype {engine.dtype}",
            "attention on CPUs writes elements of engine.dtype into it, of whatever size it was made for",
            f"leave it out, or set engine.dtype: {asked}",
        )


def _check_encoder(profile: ModelProfile, engine: EngineSettings, first: Device) -> None:
    if not profile.encoder or EngineOptions.of(engine.extra_args).is_text_only:
        return
    text_only = "or serve text alone: add --language-model-only to engine.args"
    if profile.architecture in IMAGES_ATTEND_BOTH_WAYS:
        raise _refuse(
            f"{profile.architecture} with images",
            "its image tokens attend to each other in both directions, and attention on CPUs would give "
            "wrong answers without an error",
            f"use GPU roles only, {text_only}",
        )
    if first is Device.CPU:
        raise PlanError(
            f"model: got {MULTIMODAL_CPU_FIRST.feature} ({profile.architecture}, {profile.encoder}), but "
            f"{MULTIMODAL_CPU_FIRST.why}; {MULTIMODAL_CPU_FIRST.remedy.partition(', or')[0]}, {text_only}",
            reason=PlanReason.UNSUPPORTED_MODEL,
        )


def _check_linear(profile: ModelProfile, engine: EngineSettings) -> tuple[str, ...]:
    scheme = profile.scheme
    online = EngineOptions.of(engine.extra_args).quantization
    if online and scheme.name is SchemeName.NONE and profile.kinds:
        raise _refuse(
            f"engine.args --quantization {online}",
            "weights that are quantized at load are untested on CPU ranks",
            "leave it out, or take a model that is published in 4 bits (AWQ, GPTQ)",
        )
    if scheme.name is SchemeName.NONE or not any(kind.quantized_bytes for kind in profile.layers):
        return ()
    kernel = CPU_LINEAR.get(scheme.name)
    if kernel is None or (kernel.bits and scheme.bits not in kernel.bits):
        raise _refuse(f"weights in {_format(profile)}", "vLLM has no such kernel", _other_format(profile))
    _check_dtype(f"weights in {scheme}", kernel, engine)
    if scheme.name in FOUR_BITS and engine.dtype == "float16":
        raise _refuse(
            f"weights in {scheme}, with engine.dtype float16",
            "vLLM takes a kernel that is ten times slower than that for bfloat16, without a word",
            "set engine.dtype: bfloat16, or auto",
        )
    return ()


def _check_dtype(what: str, kernel: LinearKernel | ExpertsKernel, engine: EngineSettings) -> None:
    if kernel.dtypes and engine.dtype not in kernel.dtypes:
        raise _refuse(
            f"{what}, with engine.dtype {engine.dtype}",
            f"its kernel is for {', '.join(sorted(kernel.dtypes))}",
            "set engine.dtype: bfloat16",
        )


def _format(profile: ModelProfile) -> str:
    """Returns the format of the weights; the method's own name where it has no other here."""
    unnamed = profile.scheme.name is SchemeName.OTHER and profile.quantization
    return profile.quantization if unnamed else str(profile.scheme)


def _other_format(profile: ModelProfile) -> str:
    return f"take the same model in FP8, in 4 bits (AWQ, GPTQ) or {in_bf16(profile)}, or use GPU roles only"


def _check_experts(profile: ModelProfile, engine: EngineSettings, *, route: bool = True) -> tuple[str, ...]:
    """Returns what users should know; `route`: whether the same rank chooses the experts."""
    kinds = [kind for kind in profile.layers if kind.experts]
    if not kinds:
        return ()
    chosen = EngineOptions.of(engine.extra_args).moe_backend
    if chosen != "auto":
        raise _refuse(
            f"engine.args --moe-backend {chosen} with experts",
            "it is for GPUs, and vLLM takes one for all devices",
            "leave it out, so that each device has its own kernels",
        )
    if profile.architecture in UNGATED_EXPERTS:
        raise _refuse(
            f"{profile.architecture} with experts",
            "its experts have no gate, and vLLM's kernels for CPUs compute gated ones alone",
        )
    if profile.limited_experts:
        raise _refuse(
            f"{profile.architecture} with a limit of its experts' activations (swiglu_limits)",
            "vLLM's kernels for CPUs leave the limit out, without an error",
        )
    if route and profile.architecture in ZERO_EXPERTS:
        raise _refuse(f"{profile.architecture} with zero experts", "vLLM's router for them is for GPUs")
    if not any(kind.experts_quantized for kind in kinds):
        return ()
    kernel, scheme = CPU_EXPERTS.get(profile.scheme.name), profile.scheme
    plain = f"take the same model {in_bf16(profile)}, or use GPU roles only"
    if kernel is None:
        raise _refuse(f"experts in {_format(profile)}", "vLLM has no such kernel", plain)
    if kernel.group and scheme.group != kernel.group:
        raise _refuse(
            f"experts in {scheme}",
            f"its kernel is for groups of {kernel.group}",
            f"take the model in groups of {kernel.group}, or {in_bf16(profile)}, or use GPU roles only",
        )
    _check_dtype(f"experts in {scheme}", kernel, engine)
    if route and kernel.routing is not None and profile.routing not in kernel.routing:
        raise _refuse(
            f"experts in {scheme} that are chosen by {profile.routing} routing",
            f"its kernel is for {', '.join(sorted(kernel.routing))}",
            f"take the same model {in_bf16(profile)}, use GPU roles only, or let a GPU choose "
            "(parallelism.mode: FeedForward)",
        )
    return ()


def _needs(profile: ModelProfile, engine: EngineSettings) -> tuple[str, str]:
    """Returns AMX or AVX512, and what of a model needs it on CPU ranks; two empty words if nothing does."""
    if profile.is_latent:
        without = "blocks of 16 tokens and no chunked prefill on these ranks alone"
        return AMX, f"multi-head latent attention, for which vLLM else takes {without}"
    if (of_weights := _weights_need(profile))[0]:
        return of_weights
    asked = EngineOptions.of(engine.extra_args).kv_cache_dtype
    if asked.startswith("fp8"):
        return AVX512, f"a KV cache in FP8 (engine.args --kv-cache-dtype {asked})"
    return "", ""


def _weights_need(profile: ModelProfile) -> tuple[str, str]:
    scheme = profile.scheme
    linear, experts = CPU_LINEAR.get(scheme.name), CPU_EXPERTS.get(scheme.name)
    of_linear = linear.needs if linear and any(kind.quantized_bytes for kind in profile.layers) else ""
    if of_linear == AMX:
        return AMX, f"weights in {scheme}"
    if experts and experts.needs_amx and any(kind.experts_quantized for kind in profile.layers):
        return AMX, f"experts in {scheme}"
    return (of_linear, f"weights in {scheme}") if of_linear else ("", "")


def _check_instructions(need: tuple[str, str], cpus: CpuFeatures) -> tuple[str, ...]:
    needs, what = need
    if not needs:
        return ()
    nodes = (
        "put CPU roles on nodes that have it (roles[].template.nodeSelector: "
        f"{CPUID_LABEL}{CPUID_OF[needs][0]}: 'true')"
    )
    for role, features in sorted(cpus.items()):
        if features is not None and features.isdisjoint({needs, AMX}):  # no CPU has AMX alone
            raise PlanError(
                f"role {role}: {needs} is needed on CPUs for {what}, and its nodes do not have it; "
                f"{nodes}, or use GPU roles only",
                reason=PlanReason.UNSUPPORTED_MODEL,
            )
    if None not in cpus.values():
        return ()
    unknown = f"{_WHO_HAS_IT[needs]}), and the nodes do not say whether they have it"
    return (f"{needs} is needed on CPUs for {what} ({unknown}; {nodes}",)
