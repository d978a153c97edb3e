"""What memory a rank has for its KV cache: measured after the largest batch has run once.

Arithmetic, and the reading of what the kernel says. Stdlib only.
"""

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
"""Kept free for CUDA graphs, which are captured after the KV cache is there: vLLM 0.32.0's took well
below 1 GiB for models of 8 billion parameters; a reserve of the plan's own 10 % comes on top."""
_RESET_PEAK = "5"
"""proc_pid_clear_refs(5): resets the peak of the resident set (VmHWM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeadroom:
    """What a rank could give to its KV cache.

    Attributes:
        size_bytes: of it; may be negative.
        words: how it comes about, for people.
    """

    size_bytes: int
    words: str


def grant(rank: RankAssignment, planned_bytes: int, headroom: KvHeadroom) -> tuple[int, str]:
    """Returns the bytes of a rank's KV cache and a warning, "" if it has all that was planned.

    Raises:
        MemoryError: there is no headroom at all.
    """
    if headroom.size_bytes >= planned_bytes or not planned_bytes:
        return planned_bytes, ""
    got = (
        f"rank {rank.rank} (role {rank.role}, {rank.device}): got memory for "
        f"{format_bytes(headroom.size_bytes)} of KV cache, expected "
        f"{format_bytes(planned_bytes)} as planned: {headroom.words}; {_remedy(rank.device)}"
    )
    if headroom.size_bytes <= 0:
        raise MemoryError(got)
    return headroom.size_bytes, f"{got}; until then every rank has only as many blocks as this one"


def _remedy(device: Device) -> str:
    if device is Device.GPU:
        return "free the GPU from other processes, or set roles[].deviceMemory to what it really has"
    return "raise resources.limits.memory of the role, or give the rank fewer layers"


def gpu_headroom(
    *, free_bytes: int, cached_bytes: int, allocated_bytes: int, peak_bytes: int, graphs_bytes: int
) -> KvHeadroom:
    """Returns a GPU's headroom.

    Args:
        free_bytes: of the device now.
        cached_bytes: that torch holds and could not give back: activations go there first. After a model was
            compiled that was 959 MiB (H100, 2026-11-26).
        peak_bytes: most that was allocated by torch during the run.
    """
    activations = max(0, peak_bytes - allocated_bytes - cached_bytes)
    return KvHeadroom(
        size_bytes=free_bytes - activations - graphs_bytes,
        words=f"{format_bytes(free_bytes)} free, less {format_bytes(activations)} that the largest batch "
        f"takes and {format_bytes(graphs_bytes)} for CUDA graphs",
    )


def host_headroom(*, available_bytes: int, share: Fraction, activations_bytes: int) -> KvHeadroom:
    """Returns a CPU rank's headroom.

    Args:
        available_bytes: to all ranks that share this memory (`available_memory`).
        share: of this rank in it (`share_of_memory`).
        activations_bytes: that the largest batch took above what stays.
    """
    others = "" if share == 1 else f" shared with other ranks ({float(share):.0%} of it)"
    return KvHeadroom(
        size_bytes=int(available_bytes * share) - activations_bytes,
        words=f"{format_bytes(available_bytes)} available{others}, less {format_bytes(activations_bytes)} "
        "that the largest batch takes",
    )


def share_of_memory(plan: Plan, launch: PodLaunch, rank: RankAssignment) -> Fraction:
    """Returns the part of this machine's memory that is a CPU rank's: as its KV cache in the plan.

    CPU ranks of one pod share its memory limit, and those of pods with one address
    (`heteroinfer up`) the machine. They share alike where none has a KV cache, as a stage may whose layers
    read the cache of others.
    """
    sharing = ranks_on_machine(plan, launch, Device.CPU)
    caches = sum(each.kv_cache_bytes for each in sharing)
    return Fraction(rank.kv_cache_bytes, caches) if caches else Fraction(1, len(sharing))


class PeakOfRun:
    """The most memory that this process takes above what stays, from here to `above_rest_bytes`."""

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process = process
        # Where the kernel cannot reset it the peak of loading counts: more than the batch takes, so
        # that the headroom comes out smaller than it is, never larger.
        with contextlib.suppress(OSError), (process / "clear_refs").open("w") as file:
            file.write(_RESET_PEAK)

    def above_rest_bytes(self) -> int:
        """Returns the peak of the resident set since, less what is resident now."""
        status = (self._process / "status").read_text()
        try:
            peak_bytes = kernel_bytes(status, "VmHWM")
        except KeyError:  # gVisor: the peak of loading counts, as above
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak_bytes - kernel_bytes(status, "VmRSS"))
