"""This machine as the one node of its own cluster."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from heteroinfer_operator.api import DEFAULT_GPU_RESOURCE
from heteroinfer_operator.cluster import NodeView

NODE_NAME: Final = "localhost"
_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


def observe_node(proc: Path = _PROC, cgroup: Path = _CGROUP, env: Mapping[str, str] = os.environ) -> NodeView:
    """Returns what is free on this machine now: cores, bytes of memory, GPUs.

    Cores are those this process may run on, and no more than its CPU quota; memory is what
    the kernel calls available, and no more than its cgroup's limit leaves.

    Args:
        proc: procfs.
        cgroup: the mount of cgroup v2; where it is not, there is no limit.
        env: of this process.
    """
    memory_bytes = min([_available_bytes(proc), *_limits(proc, cgroup, _memory_left)])
    cores = min([float(len(os.sched_getaffinity(0))), *_limits(proc, cgroup, _cpu_quota)])
    gpus = len(observe_gpus(proc, env))
    devices = {DEFAULT_GPU_RESOURCE: float(gpus)} if gpus else {}
    return NodeView(name=NODE_NAME, allocatable={"cpu": cores, "memory": memory_bytes, **devices})


def observe_gpus(proc: Path = _PROC, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the GPUs that CUDA programs of this process may use, as CUDA_VISIBLE_DEVICES names them.

    The driver's own list is read; no CUDA library is loaded.
    """
    folder = proc / "driver" / "nvidia" / "gpus"
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(str(index) for index in range(count))
    # CUDA takes the devices up to the first that there is not, such as -1.
    chosen = []
    for name in (item.strip() for item in visible.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < count):
            break
        chosen.append(name)
    return tuple(chosen)


def _available_bytes(proc: Path) -> float:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"{proc / 'meminfo'} has no MemAvailable; expected Linux 3.14 or later")


def _limits(proc: Path, cgroup: Path, read: Callable[[Path], float | None]) -> list[float]:
    """Returns the limits of this process's cgroup and of those above it."""
    lines = (proc / "self" / "cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    own_group = cgroup / own.strip("/")
    folders = [own_group, *own_group.parents] if own_group.is_relative_to(cgroup) else []
    found = [read(folder) for folder in folders if folder.is_relative_to(cgroup)]
    return [limit for limit in found if limit is not None]


def _memory_left(folder: Path) -> float | None:
    limit = _read(folder / "memory.max")
    if limit in ("", "max"):
        return None
    used = float(_read(folder / "memory.current") or 0)
    # The page cache is given back under pressure.
    stats = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return max(float(limit) - used + float(stats.get("inactive_file", 0)), 0.0)


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return None if quota in ("", "max") else float(quota) / float(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not a cgroup v2 file here: no limit
