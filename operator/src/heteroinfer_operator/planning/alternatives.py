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
    beside_weights_bytes,
    check_feed_forward,
    rank_weight_bytes,
    whole_remote,
)
from heteroinfer_operator.planning.gpu_floor import GPU_USABLE, GpuFloor
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.vllm_support.cpu_ranks import CpuFeatures, check_support
from heteroinfer_operator.vllm_support.quantization import in_bf16

THESE_RUN_IT: Final = "model: these run it"
"""Start of the line that `name_alternatives` returns."""


def name_alternatives(
    mode: Mode,
    profile: ModelProfile,
    engine: EngineSettings,
    cpus: CpuFeatures,
    check: Callable[[ModelProfile], object],
) -> str:
    """Returns a line for people: what would run a model that vLLM serves, but not as asked.

    Args:
        mode: the mode that was asked for.
        cpus: features of the group's CPUs, by role.
        check: raises PlanError if a model cannot run as asked.
    """
    ways = []
    if profile.quantization and _passes(lambda: check(_without_format(profile))):
        ways.append(f"the same model {in_bf16(profile)}, with these roles")
    if mode is not Mode.FEED_FORWARD and _passes(lambda: check_feed_forward("", profile, engine)):
        ways.append(f"mode FeedForward, with {_of_feed_forward(profile, engine)}")
    if mode is Mode.FEED_FORWARD and cpus:
        first = Device.GPU
        if _passes(lambda: check_support(profile, engine, cpus, stages=2, tensor=1, first=first)):
            memory = format_bytes(_whole(profile, engine, Device.CPU))
            ways.append(f"mode Pipeline, with CPU roles of {memory} in all")
    gpus = format_bytes(int(_whole(profile, engine, Device.GPU) / GPU_USABLE))
    ways.append(f"GPU roles only, with {gpus} in all")
    return f"{THESE_RUN_IT}, at {engine.max_model_len:,} tokens for one request: {'; '.join(ways)}"


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except PlanError:
        return False
    return True


def _without_format(profile: ModelProfile) -> ModelProfile:
    kinds = (replace(kind, quantized_bytes=0, experts_quantized=False) for kind in profile.kinds)
    return replace(profile, scheme=Scheme(), expert_scheme=None, quantization="", kinds=tuple(kinds))


def _of_feed_forward(profile: ModelProfile, engine: EngineSettings) -> str:
    remote = whole_remote(profile)
    held = _whole(remote.kept, engine, Device.GPU)
    floor = GpuFloor.of(profile, engine, 1).total(embeds=True, samples=True, gpus=1)
    gpu = format_bytes(max(ceil(held / GPU_USABLE), held + floor))
    host = rank_weight_bytes(remote, engine, 0) + beside_weights_bytes(remote, engine, (0,))
    return f"a GPU of {gpu} or more and {format_bytes(host + profile.host_table_bytes)} of host memory"


def _whole(profile: ModelProfile, engine: EngineSettings, device: Device) -> int:
    sizes = Sizes.of(profile, engine, 1, batches=1)
    return sizes.needed(0, profile.num_layers, device) + sizes.tables(0, 1, device)
