"""Creates and removes a cluster's own cgroup, in every hierarchy (cgroup v1) or in the only one (v2)."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import processes

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids")


def unified() -> bool:
    """Returns whether this machine has only cgroup v2."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Returns the root of each hierarchy: one for v2, one for each controller for v1."""
    if unified():
        return [ROOT]
    return [folder for folder in sorted(ROOT.iterdir()) if (folder / "cgroup.procs").exists()]


def create(name: str) -> None:
    """Creates the cgroup /`name` in every hierarchy, with the controllers that the kubelet needs."""
    if unified():
        offered = (ROOT / "cgroup.controllers").read_text().split()
        wanted = " ".join(f"+{controller}" for controller in CONTROLLERS if controller in offered)
        (ROOT / "cgroup.subtree_control").write_text(wanted)
    for root in hierarchies():
        folder = root / name
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            # In v1, a new cpuset is empty, and no process can enter it before it has CPUs and memory.
            if not unified() and (folder / setting).exists():
                (folder / setting).write_text((root / setting).read_text())


def pids(name: str) -> list[int]:
    """Returns the processes in the cgroup /`name` and below it."""
    return sorted(
        {
            int(pid)
            for root in hierarchies()
            for folder in _with_all_below(root / name)
            for pid in _read(folder / "cgroup.procs").split()
        }
    )


@contextlib.contextmanager
def cpu_limit(pid: int, *, quota_us: int, period_us: int) -> Iterator[None]:
    """Limits the CPU time of a process's cgroup to `quota_us` in each `period_us`, until the context ends."""
    groups = [line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    if unified():
        path = next(path for controllers, path in groups if not controllers)
        settings = {ROOT / path.lstrip("/") / "cpu.max": f"{quota_us} {period_us}"}
    else:
        mount, path = next(group for group in groups if "cpu" in group[0].split(","))
        folder = ROOT / mount / path.lstrip("/")
        settings = {
            folder / "cpu.cfs_period_us": str(period_us),
            folder / "cpu.cfs_quota_us": str(quota_us),
        }
    before = {file: file.read_text() for file in settings}
    try:
        for file, value in settings.items():
            file.write_text(value)
        yield
    finally:
        for file, text in before.items():
            file.write_text(text)


def remove(name: str) -> None:
    """Kills all processes in the cgroup /`name` and below it, and removes it from every hierarchy.

    Containers that end at the same time disappear during this: their own tools also remove cgroups, and the
    kernel keeps a cgroup until the last process has freed its memory.

    Raises:
        ClusterError: a process, or a cgroup, still exists after 20 s.
    """

    def removed() -> bool:
        left = pids(name)
        processes.kill(left)
        return not left and all(_remove_below(root / name) for root in hierarchies())

    processes.wait_until(f"the end of the processes of cgroup {name}", removed, timeout_s=20)


def _remove_below(folder: Path) -> bool:
    """Removes a cgroup and those below it. Returns whether all are gone."""
    try:
        for child in reversed(_with_all_below(folder)):
            child.rmdir()
    except FileNotFoundError:
        return not folder.exists()
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def _with_all_below(folder: Path) -> list[Path]:
    """Returns a cgroup and those below it, each after its parent. May omit one that disappears meanwhile.

    `Path.rglob` raises if a folder disappears during the walk (Python 3.11); `os.walk` omits the folder.
    """
    return [Path(at) for at, _, _ in os.walk(folder)]


def _read(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError, OSError):
        return file.read_text()
    return ""
