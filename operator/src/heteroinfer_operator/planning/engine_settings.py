"""Chooses the settings of vLLM's engine that all ranks of a group must share. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_contract.refused_args import find_refused
from heteroinfer_operator.api import DType, HeteroInferenceSpec, When
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning.kv_cache import state_bytes, token_bytes
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, STATE_DTYPE, EngineOptions
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS

_LATENT_ALIGNMENT: Final = 128
"""In a model with latent attention and recurrent states, the tokens of a block are a multiple of this
number."""
BLOCK_SIZE: Final = 32
"""Tokens of a KV block: the smallest number that vLLM supports on both devices (vllm/platforms/cpu.py
requires a multiple of 32)."""
CPU_BATCH_TOKENS: Final = 2048
"""Tokens of a step in which CPUs compute layers. A CPU stage computes about 2 TFLOP/s in bf16 (16 cores,
2026-11-20): these tokens take about 2 s through 4 layers of an 8B model, and 8,192 would block decoding for
8 s."""
_GPU_BATCH_TOKENS: Final = 8192
"""Tokens of a step of GPUs."""
_DEFAULT_MAX_MODEL_LEN: Final = 8192
"""Default of engine.maxModelLen, in tokens. The KV cache must hold one request of this length; the maximum of
a long-context model would often not fit."""


def default_max_model_len(profile: ModelProfile) -> int:
    """Returns the longest sequence in tokens if the user sets no engine.maxModelLen."""
    return min(profile.max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)


def refused_arguments(args: Sequence[str]) -> Iterator[PlanError]:
    """Yields an error for each argument of vLLM that every plan refuses."""
    for refused in find_refused(args):
        yield PlanError(str(refused), reason=PlanReason.REFUSED_ARGUMENT)


def choose_engine_settings(
    spec: HeteroInferenceSpec,
    profile: ModelProfile,
    *,
    has_cpu: bool,
    has_mixed_stage: bool,
    tensor: int,
    served_name: str,
    model_path: str,
) -> EngineSettings:
    """Returns the engine settings that all ranks share.

    Args:
        has_mixed_stage: whether GPU and CPU ranks split the same layers.
        tensor: number of ranks in a stage.
        model_path: path at which the ranks find the model.

    Raises:
        PlanError: engine.args has an argument that HeteroInfer does not support or that only HeteroInfer may
            set, or the model does not support a setting.
    """
    for refused in refused_arguments(spec.engine.args):
        raise refused
    settings = EngineSettings(
        model=model_path,
        served_name=served_name,
        dtype=_choose_dtype(spec, profile, has_cpu=has_cpu),
        max_model_len=_choose_max_model_len(spec, profile),
        max_num_batched_tokens=spec.engine.max_batched_tokens
        or (CPU_BATCH_TOKENS if has_cpu else _GPU_BATCH_TOKENS),
        # vLLM's own defaults are 128 on a CPU rank and 1024 on an H200. From about 64 rows on, the step of a
        # CPU stage takes longer with each row (measured as CPU_BATCH_TOKENS).
        max_num_seqs=64 if has_cpu else 256,
        block_size=BLOCK_SIZE,
        # Auto uses CUDA graphs and torch.compile, unless GPU and CPU ranks share layers: a CUDA graph cannot
        # contain collectives with CPU ranks (heteroinfer_contract.plan.eager_reason).
        eager_gpu=spec.engine.eager is When.ALWAYS or has_mixed_stage,
        # Auto does not compile on CPUs, because the compilation needs a compiler in the image, and took 38 s
        # at the first start (2026-11-20).
        eager_cpu=spec.engine.eager is not When.NEVER,
        batches_in_flight=spec.parallelism.batches_in_flight,
        extra_args=_complete_args(spec, profile),
    )
    return replace(settings, block_size=_choose_block_size(profile, settings, tensor))


def _complete_args(spec: HeteroInferenceSpec, profile: ModelProfile) -> tuple[str, ...]:
    """Returns the user's arguments, with the type of recurrent states if the model has states.

    By default, vLLM chooses this type by device: float32 for gated delta nets on CPUs, and the model's type
    on GPUs (vllm/platforms/cpu.py::check_and_update_config@v0.32.0). KV blocks would then differ in size
    between the ranks.
    """
    args = spec.engine.args
    if not profile.has_state or EngineOptions.of(args).state_dtype is not None:
        return args
    return with_state_dtype(args)


def with_state_dtype(args: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the arguments with float32 as the type of recurrent states on CPUs and GPUs."""
    return (*args, STATE_DTYPE, "float32")


def _choose_block_size(profile: ModelProfile, settings: EngineSettings, tensor: int) -> int:
    """Returns the tokens of a KV block: BLOCK_SIZE, or more if a recurrent state needs a larger block.

    vLLM itself would choose the same (vllm/platforms/interface.py::_align_hybrid_block_size@v0.32.0).
    """
    bytes_of_states = [state_bytes(kind, settings, tensor) for kind in profile.layers]
    bytes_of_tokens = [token_bytes(kind, settings, tensor) for kind in profile.layers if kind.kv_heads]
    if not any(bytes_of_states) or not bytes_of_tokens:
        return BLOCK_SIZE
    # The fewest tokens whose keys and values take as many bytes as the largest state.
    alignment = _LATENT_ALIGNMENT if profile.is_latent else BLOCK_SIZE
    return alignment * ceil(max(bytes_of_states) / (alignment * max(bytes_of_tokens)))


def _choose_dtype(spec: HeteroInferenceSpec, profile: ModelProfile, *, has_cpu: bool) -> str:
    """Returns the element type of weights and activations; raises PlanError for an unknown type."""
    # The plan passes a type to vLLM instead of auto, with which vLLM would turn float32 into a 16-bit type
    # that depends on the device.
    dtype = profile.dtype if spec.engine.dtype is DType.AUTO else spec.engine.dtype.value
    if spec.engine.dtype is DType.AUTO and has_cpu and profile.scheme.name in FOUR_BITS:
        # These checkpoints name float16. On CPUs, vLLM's kernel for float16 is ten times slower than that for
        # bfloat16.
        return "bfloat16"
    if dtype not in ELEMENT_BYTES:
        raise PlanError(
            f"engine.dtype: must be one of {', '.join(ELEMENT_BYTES)}, but the checkpoint's own type is "
            f"{dtype}. Set engine.dtype",
            reason=PlanReason.UNSUPPORTED_DTYPE,
        )
    return dtype


def _choose_max_model_len(spec: HeteroInferenceSpec, profile: ModelProfile) -> int:
    """Returns the longest sequence in tokens; raises PlanError if the model only supports less."""
    wanted, longest = spec.engine.max_model_len, profile.max_position_embeddings
    if wanted is None:
        return default_max_model_len(profile)
    if wanted > longest:
        raise PlanError(
            f"engine.maxModelLen: must be at most {longest} (got {wanted}), because {longest} is the model's "
            "own maximum. Lower engine.maxModelLen",
            reason=PlanReason.MAX_MODEL_LEN_TOO_LONG,
        )
    return wanted
