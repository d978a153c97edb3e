"""Models and options that CPU ranks and stages support. Pure.

The checks refuse a model that vLLM would refuse at load or compute wrongly, and name a fix.
tests/integration/models compares the tables with vLLM's own kernels.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from heteroinfer_contract.load_formats import GPU_FORMATS, SAFETENSORS
from heteroinfer_contract.model import AttentionKind, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_contract.refused_args import MULTIMODAL_CPU_FIRST
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.nodes.cpu_features import AMX, AVX512, CPUID_LABEL, CPUID_OF
from heteroinfer_operator.vllm_support.architectures import (
    BROKEN_PIPELINE,
    IMAGES_ATTEND_BOTH_WAYS,
    OWN_CPU_BLOCKS,
)
from heteroinfer_operator.vllm_support.combined_checks import run_all_checks
from heteroinfer_operator.vllm_support.cpu_kernels import (
    CODED_BITS,
    NO_KERNEL,
    build_cpu_error,
    check_feed_forward_experts,
    check_moe_backend,
    check_stage_experts,
    describe_format,
    stage_instructions,
)
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, EngineOptions
from heteroinfer_operator.vllm_support.listed_architectures import (
    GATED_DELTA_NETS,
    GPU_CLASSES,
    GPU_STATES,
    NO_PIPELINE,
)
from heteroinfer_operator.vllm_support.quantization import describe_in_bf16
from heteroinfer_operator.vllm_support.served_architectures import class_names

_PROCESSORS: Final = MappingProxyType(
    {
        AMX: "Intel Xeon processors of the 4th generation or later",
        AVX512: "AMD EPYC processors of the 4th generation or later and all Intel Xeon Scalable processors",
    }
)
_SUCCESSORS_OF_V3: Final = frozenset({"DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"})
"""Models for which the predecessors DeepSeek-V3 and V3.1 are an alternative without sparse attention."""
_GPU_ATTENTION_REMEDY: Final = (
    "Use GPU roles only, or compute attention on GPUs (parallelism.mode: FeedForward)"
)
CPU_HEAD_SIZES: Final = frozenset({32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Sizes of an attention head, in elements, that CPU kernels support. With any other size, vLLM fails at
the first step (csrc/cpu/cpu_attn.cpp::cpu_attn_get_scheduler_metadata@v0.32.0)."""
CPU_FP8_HEAD_MULTIPLE: Final = 32
"""With a KV cache in FP8, the size of an attention head must be a multiple of this number of elements
(vllm/v1/attention/backends/cpu_attn.py::_get_attn_isa@v0.32.0)."""
CPU_LATENT_SIZE: Final = 576
"""Size of a latent, in elements, that CPU kernels support with and without AMX: 512, plus 64 for the position
(vllm/v1/attention/backends/mla/amx_mla.py, cpu_mla.py::get_supported_head_sizes@v0.32.0). vLLM itself does
not check the size."""
CPU_LATENT_DTYPE: Final = "bfloat16"
"""Type of latent attention and its cache with AMX (vllm/v1/attention/backends/mla/amx_mla.py@v0.32.0). vLLM
does not check the type: in float16, decoding of 512 + 64 elements gave NaN 30 times of 30 (AMX, 2026-11-22).
"""
CPU_DELTA_NET_DTYPE: Final = "bfloat16"
"""Type of linear attention with gated delta nets. With another type, vLLM fails at the first step
(vllm/.../mamba/ops/cpu/gdn_attention.py::cpu_gdn_attention_core@v0.32.0)."""
CpuFeatures: TypeAlias = Mapping[str, frozenset[str] | None]
"""Role with CPU ranks -> features that the CPUs of all its nodes have; None if the features are unknown."""
_STORES_KEYS_AND_VALUES: Final = (AttentionKind.FULL, AttentionKind.WINDOW, AttentionKind.CHUNKED)


def check_support(
    profile: ModelProfile,
    engine: EngineSettings,
    cpus: CpuFeatures,
    *,
    stages: int,
    tensor: int,
    first: Device,
) -> tuple[str, ...]:
    """Checks that stages and CPU ranks support a model. Returns warnings for the user, one line each.

    Args:
        cpus: features of the CPUs, by role with CPU ranks; empty without such roles.
        stages: number of stages.
        tensor: number of ranks that share each layer of a stage.
        first: device of the first rank.

    Raises:
        PlanError: vLLM cannot run the model in stages, on CPUs, or on these nodes. The message names a fix.
    """
    if not cpus:
        return _check_pipeline(profile, stages)
    return run_all_checks(
        lambda: _check_pipeline(profile, stages),
        lambda: _check_classes(profile),
        lambda: _check_sparse_attention(profile),
        lambda: _check_head_sizes(profile),
        lambda: _check_latent_attention(profile, engine),
        lambda: _check_states(profile, engine),
        lambda: _check_kv_cache(profile, engine),
        lambda: _check_encoder(profile, engine, first),
        lambda: _check_linear_layers(profile, engine),
        lambda: check_moe_backend(profile, engine),
        lambda: check_stage_experts(profile, engine, has_whole_layers=tensor == 1),
        lambda: _check_instructions(
            _find_needed_instructions(profile, engine, has_whole_layers=tensor == 1), cpus
        ),
    )


def check_load_format(engine: EngineSettings) -> None:
    """Checks that CPU ranks in stages support the value of `--load-format`.

    In some formats, all ranks of a group divide the files among themselves
    (vllm/.../weight_utils.py::fastsafetensors_weights_iterator, ::instanttensor_weights_iterator@v0.32.0).
    CPU ranks would not take part in this division, and GPU ranks would wait for them forever.

    Raises:
        PlanError: the format is for GPUs only.
    """
    load_format = EngineOptions.of(engine.extra_args).load_format
    if (load_format or "").lower() in GPU_FORMATS:
        raise build_cpu_error(
            f"--load-format {load_format}",
            "vLLM supports this format in groups of GPUs only",
            f"Remove the option, or set {SAFETENSORS}",
            field="engine.args",
        )


def check_feed_forward_support(part: ModelProfile, engine: EngineSettings) -> tuple[str, ...]:
    """Checks that feed-forward ranks support a model. Returns warnings for the user, one line each.

    Only experts and MLPs matter: the GPU computes attention with its own classes. The kernels of feed-forward
    ranks run on any CPU with AVX2.

    Args:
        part: profile of the experts or MLPs that these ranks compute.

    Raises:
        PlanError: feed-forward ranks cannot compute the model. The message names a fix.
    """
    return run_all_checks(
        lambda: _check_linear_layers(part, engine),
        lambda: check_moe_backend(part, engine),
        lambda: check_feed_forward_experts(part),
    )


def _check_pipeline(profile: ModelProfile, stages: int) -> tuple[str, ...]:
    """Raises PlanError if vLLM cannot run the model in several stages. Returns no warnings."""
    unsupported = (NO_PIPELINE | BROKEN_PIPELINE) & set(class_names(profile))
    if stages > 1 and unsupported:
        why = (
            "vLLM's class of this model does not support pipeline parallelism"
            if unsupported & NO_PIPELINE
            else "vLLM's class of this model fails to load with pipeline parallelism"
        )
        raise PlanError(
            f"model: {profile.architecture} cannot run in {stages} stages: {why}. Use one stage: put "
            "all GPUs into one pod and set parallelism.tensor to their number, set parallelism.mode: Tensor "
            "(the ranks split each layer), or set parallelism.mode: FeedForward (CPU ranks hold no stage)",
            reason=PlanReason.UNSUPPORTED_MODEL,
        )
    return ()


def _check_classes(profile: ModelProfile) -> None:
    """Raises PlanError if vLLM's classes for the model need GPUs, or if plans cannot count their memory."""
    remedy = "Use GPU roles only, or another model"
    unsupported = GPU_CLASSES & set(class_names(profile))
    if unsupported:
        raise build_cpu_error(min(unsupported), "vLLM's classes for this model are for GPUs only", remedy)
    if profile.architecture in OWN_CPU_BLOCKS:
        why = "on CPUs vLLM always uses KV blocks of 256 tokens for this model, which plans do not count yet"
        raise build_cpu_error(profile.architecture, why, remedy)


def _check_sparse_attention(profile: ModelProfile) -> None:
    """Raises PlanError for sparse attention, which vLLM supports on GPUs only."""
    if any(kind.attention is AttentionKind.SPARSE for kind in profile.layers):
        or_older_model = ", or DeepSeek-V3 or V3.1" if profile.architecture in _SUCCESSORS_OF_V3 else ""
        subject = f"{profile.architecture} with sparse attention"
        raise build_cpu_error(subject, "vLLM supports it on GPUs only", f"Use GPU roles only{or_older_model}")


def _check_head_sizes(profile: ModelProfile) -> None:
    """Raises PlanError if CPU attention does not support the sizes of the model's heads."""
    for kind in profile.layers:
        key, value = kind.head_sizes
        if kind.attention in _STORES_KEYS_AND_VALUES and kind.kv_heads and key != value:
            raise build_cpu_error(
                f"{profile.architecture} with keys of {key} elements and values of {value} in each head",
                "vLLM's CPU kernels require keys and values of the same size",
                _GPU_ATTENTION_REMEDY,
            )
    # Skips this check for a profile that version 0.1.0 stored. Such a profile does not describe the layers,
    # and groups that run with such a profile must be able to restart.
    unsupported_sizes = _head_sizes(profile) - CPU_HEAD_SIZES if profile.kinds else frozenset()
    if unsupported_sizes:
        raise build_cpu_error(
            f"{profile.architecture} with attention heads of {min(unsupported_sizes)} elements",
            f"vLLM's CPU kernels support only {', '.join(map(str, sorted(CPU_HEAD_SIZES)))} elements",
            _GPU_ATTENTION_REMEDY,
        )


def _check_latent_attention(profile: ModelProfile, engine: EngineSettings) -> None:
    """Raises PlanError if CPU kernels do not support the model's multi-head latent attention.

    The kernels support several latents of CPU_LATENT_SIZE elements each in a layer.
    """
    if not profile.is_latent:
        return
    subject = f"{profile.architecture} (multi-head latent attention)"
    latents = {kind.kv_width for kind in profile.layers if kind.attention is AttentionKind.LATENT}
    # `kv_width` is the sum of a layer's latents, so a multiple is several latents of the supported size.
    unsupported_sizes = [size for size in latents if size % CPU_LATENT_SIZE]
    if unsupported_sizes:
        raise build_cpu_error(
            f"{subject} with latents of {min(unsupported_sizes)} elements",
            f"vLLM's CPU kernels support only multiples of {CPU_LATENT_SIZE}",
            _GPU_ATTENTION_REMEDY,
        )
    if engine.dtype != CPU_LATENT_DTYPE:
        raise build_cpu_error(
            f"{subject} with engine.dtype {engine.dtype}",
            f"vLLM's CPU kernels support {CPU_LATENT_DTYPE} only. In float16 they silently return NaN",
            f"Set engine.dtype: {CPU_LATENT_DTYPE}, or use GPU roles only",
        )
    cache_dtype = EngineOptions.of(engine.extra_args).kv_cache_dtype
    if cache_dtype != "auto":
        raise build_cpu_error(
            f"{subject} with engine.args --kv-cache-dtype {cache_dtype}",
            "vLLM's CPU kernels store latents in the model's own type only",
            "Remove the option, or use GPU roles only",
        )


def _check_states(profile: ModelProfile, engine: EngineSettings) -> None:
    """Raises PlanError if CPU kernels do not support the model's recurrent states."""
    if GPU_STATES & set(class_names(profile)):
        why = "vLLM's kernels for states of this kind are for GPUs only"
        raise build_cpu_error(f"{profile.architecture} with recurrent states", why)
    if profile.architecture in GATED_DELTA_NETS and engine.dtype != CPU_DELTA_NET_DTYPE:
        raise build_cpu_error(
            f"{profile.architecture} (gated delta nets) with engine.dtype {engine.dtype}",
            f"vLLM's CPU kernels support {CPU_DELTA_NET_DTYPE} only",
            f"Set engine.dtype: {CPU_DELTA_NET_DTYPE}, or use GPU roles only",
        )


def _head_sizes(profile: ModelProfile) -> frozenset[int]:
    """Returns all sizes of keys and values in the model's attention heads, in elements."""
    kinds = [kind for kind in profile.layers if kind.attention in _STORES_KEYS_AND_VALUES and kind.kv_heads]
    return frozenset(size for kind in kinds for size in kind.head_sizes)


def _check_kv_cache(profile: ModelProfile, engine: EngineSettings) -> None:
    """Raises PlanError if CPU attention does not support the type of the KV cache."""
    cache_dtype = EngineOptions.of(engine.extra_args).kv_cache_dtype
    if cache_dtype.startswith("fp8"):
        unsupported_sizes = [size for size in _head_sizes(profile) if size % CPU_FP8_HEAD_MULTIPLE]
        if unsupported_sizes:
            size = min(unsupported_sizes)
            raise build_cpu_error(
                f"--kv-cache-dtype {cache_dtype} with attention heads of {size} elements",
                f"on CPUs a KV cache in FP8 requires heads whose size is a multiple of "
                f"{CPU_FP8_HEAD_MULTIPLE} elements",
                "Remove the option",
                field="engine.args",
            )
    elif cache_dtype in ELEMENT_BYTES and cache_dtype != engine.dtype:
        raise build_cpu_error(
            f"--kv-cache-dtype {cache_dtype} with engine.dtype {engine.dtype}",
            "attention on CPUs always stores elements of engine.dtype in the cache",
            f"Remove the option, or set engine.dtype: {cache_dtype}",
            field="engine.args",
        )


def _check_encoder(profile: ModelProfile, engine: EngineSettings, first: Device) -> None:
    """Raises PlanError if the group must serve images or audio, but CPU ranks prevent that.

    Args:
        first: device of the first stage, which runs the encoder.
    """
    if not profile.encoder or EngineOptions.of(engine.extra_args).is_text_only:
        return
    text_only = "or serve text only: add --language-model-only to engine.args"
    if profile.architecture in IMAGES_ATTEND_BOTH_WAYS:
        raise build_cpu_error(
            f"{profile.architecture} with images",
            "its image tokens attend to each other in both directions, and attention on CPUs would silently "
            "give wrong answers",
            f"Use GPU roles only, {text_only}",
        )
    if first is Device.CPU:
        raise PlanError(
            f"model: {MULTIMODAL_CPU_FIRST.feature} is not supported ({profile.architecture}, "
            f"{profile.encoder}): {MULTIMODAL_CPU_FIRST.why}. Add a GPU role and remove "
            f"parallelism.stageOrder, {text_only}",
            reason=PlanReason.UNSUPPORTED_MODEL,
        )


def _check_linear_layers(profile: ModelProfile, engine: EngineSettings) -> tuple[str, ...]:
    """Checks that CPU kernels support the format of the model's linear layers. Returns no warnings.

    Raises:
        PlanError: CPU kernels do not support the format, or its quantization at load.
    """
    scheme = profile.scheme
    online_method = EngineOptions.of(engine.extra_args).quantization
    # Skips this check for a profile that version 0.1.0 stored (without `kinds`): groups that run with such a
    # profile must be able to restart.
    if online_method and scheme.name is SchemeName.NONE and profile.kinds:
        raise build_cpu_error(
            f"--quantization {online_method}",
            "quantization at load is untested on CPU ranks",
            "Remove the option, or use a model that is published in 4 bits (AWQ, GPTQ)",
            field="engine.args",
        )
    if scheme.name is SchemeName.NONE or not any(kind.quantized_bytes for kind in profile.layers):
        return ()
    if scheme.bits not in CODED_BITS.get(scheme.name, ()):
        raise build_cpu_error(
            f"weights in {describe_format(profile)}", NO_KERNEL, _advise_other_format(profile)
        )
    return ()


def _advise_other_format(profile: ModelProfile) -> str:
    """Returns the advice to use the model in a format that CPU kernels support."""
    in_bf16 = describe_in_bf16(profile)
    return f"Use the same model in FP8, in 4 bits (AWQ, GPTQ) or {in_bf16}, or use GPU roles only"


def _find_needed_instructions(
    profile: ModelProfile, engine: EngineSettings, *, has_whole_layers: bool
) -> tuple[str, str]:
    """Returns the instructions that CPU ranks need (AMX or AVX512) and the part of the model that needs them.

    Both are "" if AVX2 is enough.
    """
    if profile.is_latent:
        limits = "KV blocks of 16 tokens and no chunked prefill on CPU ranks, unlike on GPU ranks"
        return AMX, f"multi-head latent attention (without AMX, vLLM uses {limits})"
    instructions = stage_instructions(profile, has_whole_layers=has_whole_layers)
    if instructions:
        return instructions, f"experts in {profile.scheme_of_experts}"
    cache_dtype = EngineOptions.of(engine.extra_args).kv_cache_dtype
    if cache_dtype.startswith("fp8"):
        return AVX512, f"a KV cache in FP8 (engine.args --kv-cache-dtype {cache_dtype})"
    return "", ""


def _check_instructions(needed: tuple[str, str], cpus: CpuFeatures) -> tuple[str, ...]:
    """Raises PlanError if a role's nodes lack the needed instructions.

    Returns a note if the features of a role's CPUs are unknown.

    Args:
        needed: result of `_find_needed_instructions`.
    """
    instructions, part = needed
    if not instructions:
        return ()
    fix = (
        f"Put CPU roles on nodes that have {instructions} (roles[].template.nodeSelector: "
        f"{CPUID_LABEL}{CPUID_OF[instructions][0]}: 'true')"
    )
    for role, features in sorted(cpus.items()):
        # A CPU with AMX also has the older instruction sets.
        if features is not None and features.isdisjoint({instructions, AMX}):
            raise PlanError(
                f"role {role}: {instructions} is needed on CPUs for {part}, but the role's nodes do not have "
                f"it. {fix}, or use GPU roles only",
                reason=PlanReason.UNSUPPORTED_MODEL,
            )
    if None not in cpus.values():
        return ()
    problem = f"the nodes' labels do not show whether the CPUs have {instructions}"
    processors = _PROCESSORS[instructions]
    return (f"{instructions} is needed on CPUs for {part}, but {problem}. {processors} have it. {fix}",)
