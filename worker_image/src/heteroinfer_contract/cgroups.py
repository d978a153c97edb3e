"""CPU and memory that this process may use: its cgroup limits (v1 or v2) and free memory. Linux only.

Reads the kernel's files; stdlib only.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path, own_cgroups: str) -> float | None:
    """Returns the number of CPUs that the cgroups (v1 or v2) allow; None without a limit.

    Args:
        root: mount point of the cgroups.
        own_cgroups: text of /proc/self/cgroup.
    """
    directories = cgroup_directories(root, own_cgroups, "cpu")
    quotas = [quota for directory in directories if (quota := _read_cpu_quota(directory))]
    return min(quotas, default=None)


def cgroup_directories(root: Path, own_cgroups: str, controller: str) -> Iterator[Path]:
    """Yields directories that may hold a controller's files, for each cgroup (v1 or v2) of this process.

    Args:
        controller: `cpu` or `memory`.
    """
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, alone or beside version 1
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):  # version 1; a mount can have several controllers
            mounts = [root / controllers, root / controller]
        else:
            continue
        # Every ancestor sets limits too. In a container the path may be invisible, but its root is visible.
        for level in [PurePosixPath(path), *PurePosixPath(path).parents]:
            yield from (mount / level.relative_to("/") for mount in mounts)


def _read_cpu_quota(cgroup: Path) -> float | None:
    """Returns the CPU quota of one cgroup as a number of CPUs; None without a limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu.cfs_period_us").read_text()
    except FileNotFoundError:
        return None
    if quota == "max" or int(quota) < 0:
        return None
    return int(quota) / int(period)


def available_memory(cgroups: Path, own_cgroups: str, meminfo: str) -> int:
    """Returns the bytes that can still be allocated: the minimum over the machine and all cgroup limits.

    Page cache counts as free, including active pages: the kernel drops both before it refuses memory, and
    counts both in MemAvailable (Documentation/filesystems/proc.rst). Pages of tmpfs do not count as page
    cache.

    Raises:
        KeyError: the kernel does not report MemAvailable; Linux reports it since 3.14.
    """
    return min([kernel_bytes(meminfo, "MemAvailable"), *_unused_bytes_of_limits(cgroups, own_cgroups)])


def _unused_bytes_of_limits(cgroups: Path, own_cgroups: str) -> Iterator[int]:
    """Yields the bytes that each memory limit of this process's cgroups still allows."""
    for cgroup in cgroup_directories(cgroups, own_cgroups, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
        ):
            limit, usage = cgroup / limit_name, cgroup / usage_name
            if not (limit.exists() and usage.exists()):
                continue
            text = limit.read_text().strip()
            if text != "max":
                yield max(0, int(text) - int(usage.read_text()) + _reclaimable(cgroup))


def _reclaimable(cgroup: Path) -> int:
    """Returns the page cache of a cgroup, in bytes; for v1, descendant cgroups are included."""
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in stat else ""
    return sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def kernel_bytes(text: str, field: str) -> int:
    """Returns a field of /proc/meminfo or /proc/PID/status, in bytes; raises KeyError if it is missing."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)
