"""Starts the programs of a cluster as independent processes, which carry a mark, and ends them by their ids.

Each program has the environment entry `HETEROINFER_CLUSTER=<state folder>`, and so have its children. So the
remaining state folder of a cluster is enough to find all its processes, even if its starter died before it
wrote anything. Processes are never searched by name.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError

MARK = "HETEROINFER_CLUSTER"
POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Identifies a process by its id and start time, because the kernel reuses ids."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Returns the identity of a living process, or None for a dead one or a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat[stat.rindex(b")") + 2 :].split()
        return None if fields[0] in (b"Z", b"X") else cls(pid=pid, started_ticks=int(fields[19]))

    def alive(self) -> bool:
        """Returns whether this process still runs."""
        return ProcessIdentity.of(self.pid) == self


def spawn(
    command: Sequence[str], *, mark: Path, log: Path, environment: Mapping[str, str] | None = None
) -> ProcessIdentity:
    """Starts a marked program in its own session. Its output is appended to `log`.

    Its environment has only PATH, HOME (= the state folder), the mark and `environment`, so that a proxy or a
    credential of the caller's shell never affects a cluster.

    Raises:
        ClusterError: the program could not be started, or ended immediately.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        # posix_spawn instead of Popen, because the program outlives this object.
        pid = os.posix_spawnp(
            command[0],
            list(command),
            {"PATH": os.environ["PATH"], "HOME": str(mark), MARK: str(mark), **(environment or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), output, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    except OSError as error:
        raise ClusterError(f"cannot start {command[0]}: {error}") from error
    identity = ProcessIdentity.of(pid)
    if identity is None:
        raise ClusterError(f"{command[0]} ended immediately. Its last output:\n{tail(log)}")
    return identity


def run(
    command: Sequence[str],
    *,
    stdin: str | None = None,
    timeout_s: float = 60,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Runs a short command, and returns its output.

    Raises:
        ClusterError: the command failed, is missing, or took longer than `timeout_s`. The message has its
            stderr.
    """
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=None if environment is None else {**os.environ, **environment},
            cwd=cwd,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]}was not found: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)} took longer than {timeout_s:g} s") from error
    if done.returncode:
        raise ClusterError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}{done.stdout[-2000:]}"
        )
    return done.stdout


def tail(log: Path, lines: int = 15) -> str:
    """Returns the last lines of a log, or "" without a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def wait_until(
    what: str,
    check: Callable[[], bool],
    *,
    timeout_s: float,
    process: ProcessIdentity | None = None,
    log: Path | None = None,
) -> None:
    """Waits until `check()` is true. Calls it every 50 ms.

    Raises:
        ClusterError: the time is over, or `process` has ended. The message has the end of `log`.
    """
    deadline = time.monotonic() + timeout_s
    while not check():
        words = f". The end of {log.name}:\n{tail(log)}" if log is not None else ""
        if process is not None and not process.alive():
            raise ClusterError(f"{what}: the program has ended{words}")
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: did not happen within {timeout_s:g} s{words}")
        time.sleep(POLL_S)


def marked_pids(mark: Path) -> list[int]:
    """Returns the ids of the living processes with the mark of this state folder."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill(pids: Sequence[int]) -> None:
    """Kills each process, and reaps those that are children of this process."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def stop_gently(process: ProcessIdentity, timeout_s: float = 10) -> None:
    """Sends SIGTERM to a program, and waits for its end.

    Raises:
        ClusterError: the program still runs after `timeout_s`.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    wait_until(f"the end of process {process.pid}", lambda: not process.alive(), timeout_s=timeout_s)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


def stop_marked(mark: Path, timeout_s: float = 20) -> None:
    """Kills every process with the mark, and waits until none is left.

    Raises:
        ClusterError: a process still runs after `timeout_s`.
    """
    found: set[ProcessIdentity] = set()

    def none_left() -> bool:
        pids = marked_pids(mark)
        found.update(filter(None, map(ProcessIdentity.of, pids)))
        kill(pids)
        # A process that is ending loses its environment, and so its mark, some time before it disappears.
        return not pids and not any(process.alive() for process in found)

    wait_until(f"the end of all programs of {mark}", none_left, timeout_s=timeout_s)
