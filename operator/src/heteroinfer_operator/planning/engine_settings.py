"""Engine settings that must agree between all ranks, each with its reason. Pure."""

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
BLOCK_SIZE: Final = 32
"""Tokens of a KV block: the least that both devices take (vllm/platforms/cpu.py wants a multiple of 32)."""
_DEFAULT_MAX_MODEL_LEN: Final = 8192
"""KV headroom must hold one such sequence at least, which long-context models would not fit into."""


def refused_arguments(args: Sequence[str]) -> Iterator[PlanError]:
    """Finds those of these arguments for vLLM that no plan takes, whatever the model."""
    for refused in find_refused(args):
        yield PlanError(str(refused), reason=PlanReason.REFUSED_ARGUMENT)


def engine_settings(
    spec: HeteroInferenceSpec,
    profile: ModelProfile,
    *,
    has_cpu: bool,
    has_mixed_stage: bool,
    tensor: int,
    served_name: str,
    model_path: str,
) -> EngineSettings:
    """Returns the settings of every rank.

    Args:
        has_mixed_stage: whether GPU and CPU ranks split the same layers.
        tensor: ranks of a stage.
        model_path: where the ranks find the model.

    Raises:
        PlanError: an argument belongs to the plan or isn't supported, or a setting doesn't fit the model.
    """
    for refused in refused_arguments(spec.engine.args):
        raise refused
    settings = EngineSettings(
        model=model_path,
        served_name=served_name,
        dtype=_dtype(spec, profile, has_cpu=has_cpu),
        max_model_len=_max_model_len(spec, profile),
        # A CPU stage does about 2 TFLOP/s in bf16 (16 cores, 2026-11-20): 2048 tokens through
        # 4 layers of an 8B model take about 2 s, and 8192 would block decoding for 8 s.
        max_num_batched_tokens=2048 if has_cpu else 8192,
        # Where vLLM's own defaults are 128 a CPU rank and 1024 on an H200; the CPU stage's
        # step grows with the rows from about 64 on (same measurements).
        max_num_seqs=64 if has_cpu else 256,
        block_size=BLOCK_SIZE,
        # Auto keeps CUDA graphs and torch.compile unless a stage's forward holds collectives with
        # CPU ranks, which cannot be captured (heteroinfer_contract.plan.eager_reason).
        eager_gpu=spec.engine.eager is When.ALWAYS or has_mixed_stage,
        # Auto does not compile on CPUs: it needs a compiler in the image and 38 s once (2026-11-20).
        eager_cpu=spec.engine.eager is not When.NEVER,
        batches_in_flight=spec.parallelism.batches_in_flight,
        extra_args=_extra_args(spec, profile),
    )
    return replace(settings, block_size=_block_size(profile, settings, tensor))


def _extra_args(spec: HeteroInferenceSpec, profile: ModelProfile) -> tuple[str, ...]:
    """Returns the user's arguments, and the type of recurrent states, which vLLM chooses by device.

    CPU kernels of gated delta nets have float32 unless set otherwise, GPUs the model's type
    (vllm/platforms/cpu.py::check_and_update_config@v0.32.0), and blocks are then of other sizes.
    """
    args = spec.engine.args
    if not profile.has_state or EngineOptions.of(args).state_dtype is not None:
        return args
    return with_state_dtype(args)


def with_state_dtype(args: tuple[str, ...]) -> tuple[str, ...]:
    """Adds the type that CPUs and GPUs of one group have for recurrent states."""
    return (*args, STATE_DTYPE, "float32")


def _block_size(profile: ModelProfile, settings: EngineSettings, tensor: int) -> int:
    """Returns the tokens of a block: BLOCK_SIZE, or so many that a recurrent state fits into one.

    vLLM would choose the same by itself (vllm/platforms/interface.py::_align_hybrid_block_size@v0.32.0).
    """
    states = [state_bytes(kind, settings, tensor) for kind in profile.layers]
    tokens = [token_bytes(kind, settings, tensor) for kind in profile.layers if kind.kv_heads]
    if not any(states) or not tokens:
        return BLOCK_SIZE
    align = _LATENT_ALIGNMENT if profile.is_latent else BLOCK_SIZE
    return align * ceil(max(states) / (align * max(tokens)))


def _dtype(spec: HeteroInferenceSpec, profile: ModelProfile, *, has_cpu: bool) -> str:
    # vLLM's own auto turns float32 into a 16-bit type, another one by device.
    dtype = profile.dtype if spec.engine.dtype is DType.AUTO else spec.engine.dtype.value
    if spec.engine.dtype is DType.AUTO and has_cpu and profile.scheme.name in FOUR_BITS:
        # With float16, as these checkpoints say, CPUs take a kernel that is ten times slower.
        return "bfloat16"
    if dtype not in ELEMENT_BYTES:
        raise PlanError(
            f"engine.dtype: the checkpoint's own is {dtype}, expected one of {', '.join(ELEMENT_BYTES)}; "
            "set engine.dtype to one of these",
            reason=PlanReason.UNSUPPORTED_DTYPE,
        )
    return dtype


def _max_model_len(spec: HeteroInferenceSpec, profile: ModelProfile) -> int:
    asked, longest = spec.engine.max_model_len, profile.max_position_embeddings
    if asked is None:
        return min(longest, _DEFAULT_MAX_MODEL_LEN)
    if asked > longest:
        raise PlanError(
            f"engine.maxModelLen: got {asked}, the model was made for {longest}; set {longest} or less",
            reason=PlanReason.MAX_MODEL_LEN_TOO_LONG,
        )
    return asked
