"""Memory that a rank has for its KV cache, measured after one run of the largest batch. Stdlib only."""

import contextlib
import resource
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from heteroinfer_contract.cgroups import kernel_bytes
from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch, ranks_on_machine
from heteroinfer_contract.printable import format_bytes

CUDA_GRAPHS_BYTES = 1 << 30
"""Memory kept free for CUDA graphs, which vLLM captures after it allocates the KV cache. In vLLM 0.32.0 they
took well below 1 GiB for models of 8 billion parameters. The plan's own reserve of 10 % comes on top."""
_RESET_PEAK = "5"
"""proc_pid_clear_refs(5): resets the peak of the resident set (VmHWM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeadroom:
    """Memory that a rank has for its KV cache.

    Attributes:
        size_bytes: negative if memory is missing.
        explanation: how the size was computed, for messages.
    """

    size_bytes: int
    explanation: str


def grant(rank: RankAssignment, planned_bytes: int, headroom: KvHeadroom) -> tuple[int, str]:
    """Returns the bytes of a rank's KV cache, and a warning if they are fewer than planned (otherwise "").

    Raises:
        MemoryError: there is no memory for a KV cache.
    """
    needs_no_cache = not planned_bytes  # the rank's layers read the caches of other layers
    if headroom.size_bytes >= planned_bytes or needs_no_cache:
        return planned_bytes, ""
    problem = (
        f"rank {rank.rank} (role {rank.role}, {rank.device}): memory for the KV cache is "
        f"{format_bytes(headroom.size_bytes)}, but the plan needs {format_bytes(planned_bytes)}: "
        f"{headroom.explanation}. {_fix(rank.device)}"
    )
    if headroom.size_bytes <= 0:
        raise MemoryError(problem)
    return (
        headroom.size_bytes,
        f"{problem}. In this epoch, all ranks use the number of KV blocks that fits on this rank",
    )


def _fix(device: Device) -> str:
    """Returns the user's fix for too little memory on a device."""
    if device is Device.GPU:
        return "End other processes on the GPU, or set roles[].deviceMemory to the GPU's real memory"
    return "Raise resources.limits.memory of the role, or give the rank fewer layers"


def gpu_headroom(
    *, free_bytes: int, cached_bytes: int, allocated_bytes: int, peak_bytes: int, graphs_bytes: int
) -> KvHeadroom:
    """Returns a GPU's headroom: the free memory, minus activations and CUDA graphs.

    Args:
        free_bytes: free memory of the device now.
        cached_bytes: memory that torch holds and cannot release. Activations use this memory first. It was
            959 MiB after compiling a model (H100, 2026-11-26).
        allocated_bytes: memory of torch's tensors now.
        peak_bytes: maximum memory that torch allocated during the run.
        graphs_bytes: memory to keep free for CUDA graphs; 0 if vLLM captures none.
    """
    activations = max(0, peak_bytes - allocated_bytes - cached_bytes)
    return KvHeadroom(
        size_bytes=free_bytes - activations - graphs_bytes,
        explanation=f"{format_bytes(free_bytes)} free, minus {format_bytes(activations)} for the largest "
        f"batch and {format_bytes(graphs_bytes)} for CUDA graphs",
    )


def host_headroom(*, available_bytes: int, share: Fraction, activations_bytes: int) -> KvHeadroom:
    """Returns a CPU rank's headroom.

    Args:
        available_bytes: memory available to all ranks that share it (`available_memory`).
        share: this rank's share of that memory (`share_of_memory`).
        activations_bytes: temporary memory of the largest batch.
    """
    for_whom = "" if share == 1 else f" to all ranks, {float(share):.0%} to this rank"
    return KvHeadroom(
        size_bytes=int(available_bytes * share) - activations_bytes,
        explanation=f"{format_bytes(available_bytes)} available{for_whom}, minus "
        f"{format_bytes(activations_bytes)} for the largest batch",
    )


def share_of_memory(plan: Plan, launch: PodLaunch, rank: RankAssignment) -> Fraction:
    """Returns a CPU rank's share of this machine's memory, in proportion to its planned KV cache.

    CPU ranks of a pod share the pod's memory limit. Pods with the same address (`heteroinfer up`) share the
    machine. The shares are equal if none of these ranks has a KV cache, for example because their layers read
    the caches of other layers.
    """
    sharing = ranks_on_machine(plan, launch, Device.CPU)
    caches = sum(each.kv_cache_bytes for each in sharing)
    return Fraction(rank.kv_cache_bytes, caches) if caches else Fraction(1, len(sharing))


class PeakOfRun:
    """Peak of this process's temporary memory, from construction to `temporary_bytes`."""

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process = process
        # If the kernel cannot reset the peak, it reports the peak of loading. That exceeds the batch's peak,
        # so the measured headroom is too small, never too large.
        with contextlib.suppress(OSError), (process / "clear_refs").open("w") as file:
            file.write(_RESET_PEAK)

    def temporary_bytes(self) -> int:
        """Returns the peak since construction minus the present size of the resident set, in bytes."""
        status = (self._process / "status").read_text()
        try:
            peak_bytes = kernel_bytes(status, "VmHWM")
        except KeyError:  # gVisor has no VmHWM. The peak of getrusage includes the loading
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak_bytes - kernel_bytes(status, "VmRSS"))
