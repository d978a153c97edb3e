"""The cgroups that limit this process, v1 or v2. Reads the kernel's files; Linux only."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path, own_cgroups: str) -> float | None:
    """Returns how many CPUs' worth of time the cgroups allow, None without a limit; v1 and v2.

    Args:
        root: where cgroups are mounted.
        own_cgroups: text of /proc/self/cgroup.
    """
    directories = cgroup_directories(root, own_cgroups, "cpu")
    quotas = [quota for directory in directories if (quota := _quota(directory))]
    return min(quotas, default=None)


def cgroup_directories(root: Path, own_cgroups: str, controller: str) -> Iterator[Path]:
    """Yields where the files of a controller may be, v1 or v2, for each cgroup that this process is in.

    Args:
        root: where cgroups are mounted.
        own_cgroups: text of /proc/self/cgroup.
        controller: `cpu` or `memory`.
    """
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        # Every ancestor limits as well; in a container the path may not be visible, its root is.
        for level in [PurePosixPath(path), *PurePosixPath(path).parents]:
            yield from (mount / level.relative_to("/") for mount in mounts)


def _quota(directory: Path) -> float | None:
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
    except FileNotFoundError:
        return None
    if quota == "max" or int(quota) < 0:
        return None
    return int(quota) / int(period)
