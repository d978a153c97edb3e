"""Devices, modes and formats that would run a refused model, with their memory. Pure."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Final

from heteroinfer_contract.model import Scheme
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings, Mode
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.feed_forward import (
    check_feed_forward,
    largest_feed_forward_part,
    peak_extra_bytes,
    rank_weight_bytes,
)
from heteroinfer_operator.planning.gpu_floor import GPU_USABLE, GpuFloor
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.vllm_support.cpu_ranks import CpuFeatures, check_support
from heteroinfer_operator.vllm_support.quantization import describe_in_bf16

ALTERNATIVES: Final = "model: alternatives that can run it"
"""Start of the line that `describe_alternatives` returns. `auto_mode` recognizes the line by this start."""


def describe_alternatives(
    mode: Mode,
    profile: ModelProfile,
    engine: EngineSettings,
    cpus: CpuFeatures,
    check_with_roles: Callable[[ModelProfile], object],
) -> str:
    """Returns one line with the devices, modes and formats that can run a refused model.

    Args:
        mode: the mode that was refused.
        cpus: features of the group's CPUs, by role.
        check_with_roles: raises PlanError if a model cannot run with the roles and mode of the spec.
    """
    alternatives = []
    if profile.quantization and _succeeds(lambda: check_with_roles(_unquantized(profile))):
        alternatives.append(f"the same model {describe_in_bf16(profile)}, with the same roles")
    # Only the message of an error would contain the role, so any name will do.
    if mode is not Mode.FEED_FORWARD and _succeeds(lambda: check_feed_forward("gpu", profile, engine)):
        alternatives.append(f"mode FeedForward, with {_feed_forward_memory(profile, engine)}")
    if mode is Mode.FEED_FORWARD and cpus:

        def check_pipeline() -> object:
            # Two stages are the fewest with GPUs and CPUs in mode Pipeline.
            return check_support(profile, engine, cpus, stages=2, tensor=1, first=Device.GPU)

        if _succeeds(check_pipeline):
            memory = format_bytes(_whole_model_bytes(profile, engine, Device.CPU))
            alternatives.append(f"mode Pipeline, with CPU roles of {memory} of memory in all")
    gpu_memory = format_bytes(int(_whole_model_bytes(profile, engine, Device.GPU) / GPU_USABLE))
    host_tables = profile.host_table_bytes
    host_memory = f" and {format_bytes(host_tables)} of host memory" if host_tables else ""
    alternatives.append(f"GPU roles only, with {gpu_memory} of GPU memory{host_memory} in all")
    return f"{ALTERNATIVES}, with one request of {engine.max_model_len:,} tokens: {'; '.join(alternatives)}"


def _succeeds(check: Callable[[], object]) -> bool:
    """Reports whether a check raises no PlanError."""
    try:
        check()
    except PlanError:
        return False
    return True


def _unquantized(profile: ModelProfile) -> ModelProfile:
    """Returns the profile as if the checkpoint had no quantization."""
    kinds = (replace(kind, quantized_bytes=0, experts_quantized=False) for kind in profile.kinds)
    return replace(profile, scheme=Scheme(), expert_scheme=None, quantization="", kinds=tuple(kinds))


def _feed_forward_memory(profile: ModelProfile, engine: EngineSettings) -> str:
    """Returns the GPU and host memory that mode FeedForward needs with all layers on CPU ranks, as text."""
    remote = largest_feed_forward_part(profile)
    stage_bytes = _whole_model_bytes(remote.remaining, engine, Device.GPU)
    floor = GpuFloor.for_settings(profile, engine, tensor=1).total(embeds=True, samples=True, gpus=1)
    gpu_memory = format_bytes(max(ceil(stage_bytes / GPU_USABLE), stage_bytes + floor))
    host_bytes = rank_weight_bytes(remote, engine, 0) + peak_extra_bytes(remote, engine, (0,))
    host_memory = format_bytes(host_bytes + profile.host_table_bytes)
    return f"a GPU of {gpu_memory} or more and {host_memory} of host memory"


def _whole_model_bytes(profile: ModelProfile, engine: EngineSettings, device: Device) -> int:
    """Returns the bytes that one rank with the whole model needs on this device."""
    sizes = Sizes.for_settings(profile, engine, tensor=1, batches=1)
    return sizes.needed_bytes(0, profile.num_layers, device) + sizes.table_bytes(0, 1, device)
