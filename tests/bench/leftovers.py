"""Lists the machine's resources that a group holds while it runs, and those that stay after its end.

The kernel shows the owner of each resource: of a process by its folder and its parents; of ports, sockets and
shared memory by the processes that hold them. So other groups on the machine do not matter. The environment
of a process proves nothing, because setproctitle overwrites it.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LISTENING = "0A"
"""TCP_LISTEN in /proc/net/tcp (include/net/tcp_states.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. The kernel may give its number to another process later, so the start time belongs to it.

    Attributes:
        pid: its number.
        start_ticks: its start time, since boot.
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The resources of a group.

    Attributes:
        processes: all of its processes, including supervisors.
        ports: inode of a listening TCP socket -> port.
        files: files in /dev/shm, and Unix sockets elsewhere.
    """

    processes: frozenset[Process]
    ports: dict[int, int]
    files: frozenset[Path]

    def __or__(self, other: "Holdings") -> "Holdings":
        """Returns the union of both."""
        return Holdings(
            processes=self.processes | other.processes,
            ports={**self.ports, **other.ports},
            files=self.files | other.files,
        )


def observe(supervisors: Sequence[int], folder: Path) -> Holdings:
    """Returns the resources of the processes below `supervisors` and of those that run in `folder`."""
    stats = dict(_stats())
    pids = {pid for pid in supervisors if pid in stats}
    pids |= {pid for pid in stats if _runs_in(pid, folder)}
    while below := {pid for pid, (parent, _) in stats.items() if parent in pids} - pids:
        pids |= below
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return Holdings(
        processes=frozenset(Process(pid=pid, start_ticks=stats[pid][1]) for pid in pids),
        ports={inode: port for inode, port in _listening().items() if inode in inodes},
        files=frozenset(
            [
                *(path for pid in pids for path in _shared_memory(pid)),
                *(path for inode, path in _bound().items() if inode in inodes),
            ]
        ),
    )


def wait_gone(held: Holdings, folder: Path, scratch: Path, deadline_s: float) -> list[str]:
    """Waits until nothing of `held` exists. Describes what is left at the deadline, or returns nothing.

    Args:
        held: resources of the group while it ran.
        folder: folder in which its processes ran.
        scratch: folder for its temporary files, which is deleted with the pods, like an emptyDir.
        deadline_s: deadline by time.monotonic().
    """
    while (left := describe_left(held, folder, scratch)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def describe_left(held: Holdings, folder: Path, scratch: Path) -> list[str]:
    """Describes the resources of `held` that still exist."""
    stats = dict(_stats())
    alive = {
        process.pid for process in held.processes if stats.get(process.pid, (0, -1))[1] == process.start_ticks
    }
    alive |= {pid for pid in stats if _runs_in(pid, folder)}
    listening = _listening()
    return [
        *(f"process {pid} {_name(pid)!r}" for pid in sorted(alive)),
        *(f"listening port {port}" for inode, port in held.ports.items() if inode in listening),
        *(str(path) for path in sorted(held.files) if path.exists() and not path.is_relative_to(scratch)),
    ]


def unheld_shared_memory(before: frozenset[Path]) -> list[Path]:
    """Returns the files in /dev/shm that were not in `before` and that no living process holds."""
    held = {path for pid, _ in _stats() for path in _shared_memory(pid)}
    return sorted(set(SHARED_MEMORY.iterdir()) - before - held)


def _stats() -> Iterator[tuple[int, tuple[int, int]]]:
    """Returns pid -> (parent, start) of every process, without zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text()
                fields = text[text.rindex(")") + 2 :].split()
                if fields[0] not in "ZXx":
                    yield int(entry.name), (int(fields[1]), int(fields[19]))


def _runs_in(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        where = os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")
        return Path(where).is_relative_to(folder)
    return False


def _socket_inodes(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    yield int(target[len("socket:[") : -1])


def _listening() -> dict[int, int]:
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING:
                    found[int(fields[9])] = int(fields[1].rsplit(":", 1)[1], 16)
    return found


def _bound() -> dict[int, Path]:
    """Returns inode -> path of the Unix sockets that are bound to a file."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith("/"):
            found[int(fields[6])] = Path(fields[7])
    return found


def _shared_memory(pid: int) -> Iterator[Path]:
    """Yields the files in /dev/shm that a process has mapped or open, and that still have a name."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                path = Path(fields[5])
                if path.exists():
                    yield path
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = Path(os.readlink(entry.path))
                if path.is_relative_to(SHARED_MEMORY) and path.exists():
                    yield path


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    return "?"
