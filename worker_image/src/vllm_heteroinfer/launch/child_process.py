"""Starts, observes and kills child processes. No child outlives the supervisor. Linux only.

A process counts as ended as soon as the kernel marks it as exiting. The kernel needs seconds to free the
memory of a rank with 100 GB, and reports the exit status only afterwards.
"""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO

from heteroinfer_contract import parent_death
from vllm_heteroinfer.launch.output import OutputPump

PF_EXITING = 0x4
"""Flag of an exiting process in /proc/PID/stat (linux/sched.h)."""
REAP_TIMEOUT_S = 30.0
"""Longest wait for the end of a killed process. The process ends when the kernel has freed its memory. A
process that takes longer hangs in the kernel, and no other process can end it."""
REAP_INTERVAL_S = 0.01
_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors for too many open files. They end soon: connections cause them, and excess ones are closed."""


class ProcessState(Enum):
    """The state of a process in the kernel."""

    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessObservation:
    """A process at one moment.

    Attributes:
        exit_code: as in subprocess. None while the process runs, or if the kernel does not report it yet.
    """

    state: ProcessState
    exit_code: int | None = None


def parse_stat(stat: str) -> ProcessObservation:
    """Parses the text of /proc/PID/stat."""
    state, flags, status = _stat_field(stat, 3), int(_stat_field(stat, 9)), int(_stat_field(stat, 52))
    if state in "ZXx" or flags & PF_EXITING:  # a zombie, dead, or exiting
        # The kernel also shows 0 if this process may not read the status. Then the exit code is known only
        # after the child was reaped.
        return ProcessObservation(
            state=ProcessState.ENDED, exit_code=os.waitstatus_to_exitcode(status) if status else None
        )
    is_stopped = state in "Tt"  # by a signal, or by a debugger
    return ProcessObservation(state=ProcessState.STOPPED if is_stopped else ProcessState.RUNNING)


def _stat_field(stat: str, number: int) -> str:
    """Returns a field of /proc/PID/stat by its number in proc_pid_stat(5), from 3 on.

    Field 2, the name of the process, ends with the last parenthesis and may contain spaces.
    """
    fields_from_3 = stat[stat.rindex(")") + 2 :].split()
    return fields_from_3[number - 3]


def _read_stat(pid: int) -> str:
    """Returns the text of /proc/PID/stat. Raises OSError if the process is gone.

    The kernel cuts a process's name after 15 bytes, possibly within a character.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace")


def count_voluntary_switches(pid: int) -> int:
    """Returns the number of voluntary context switches of a process's first thread.

    Each stop of the process adds one.

    Raises:
        OSError: the process is gone.
    """
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    name = "voluntary_ctxt_switches:"
    return next((int(line.removeprefix(name)) for line in status.splitlines() if line.startswith(name)), 0)


class StopClock:
    """Measures how long a process has been stopped without running in between.

    For example, cpulimit stops a process again and again. Such a process may be stopped at every check, but
    it runs between the checks.
    """

    def __init__(self) -> None:
        self._switches: int | None = None
        self._since_s = 0.0

    def stopped_for_s(self, pid: int, now_s: float) -> float:
        """Seconds since the first call during this stop; 0 if the process runs or has ended.

        Args:
            now_s: time of a clock that does not advance while this process is not scheduled, for example
                during a stop of the whole pod.
        """
        try:
            stopped = parse_stat(_read_stat(pid)).state is ProcessState.STOPPED
            switches = count_voluntary_switches(pid) if stopped else None
        except OSError:
            switches = None
        # If the count of switches differs, the process has run since the last call, so this is another stop.
        if switches is None or switches != self._switches:
            self._switches, self._since_s = switches, now_s
        return now_s - self._since_s


class ForkedProcess:
    """A child of this process that another process forked; replaces the Popen of a ChildProcess."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        if self._code is None:
            ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended_pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ChildProcess:
    """One process of the pod, in its own session. Its output passes through this process.

    Either `start` starts it, or another process forks it and later reports its process id (`adopt`).

    Attributes:
        label: name in output and messages: `rank 1`, `api`.
    """

    def __init__(self, label: str, pipe: IO[bytes], process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.label = label
        self.output = OutputPump(pipe, prefix=f"[{label}] ")
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = process
        self._stop_clock = StopClock()

    @classmethod
    def start(
        cls, *, label: str, command: Sequence[str], env: Mapping[str, str], inherited_fds: Sequence[int] = ()
    ) -> "ChildProcess":
        """Starts a process. Returns after the kernel has loaded the command, possibly after seconds.

        Call this on a thread that lives as long as the supervisor: the process ends with the thread that
        started it (PR_SET_PDEATHSIG).

        Raises:
            OSError: the command cannot be started.
        """
        # The standard library documents this switch for such cases. A vfork holds the interpreter's lock
        # until the kernel has loaded the command (seconds on a busy disk), so no other thread could run.
        subprocess._USE_VFORK = False  # type: ignore[misc]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(inherited_fds),
            start_new_session=True,
        )
        assert process.stdout is not None
        return cls(label, process.stdout, process)

    def adopt(self, pid: int) -> None:
        """Sets the id of the process that another process has forked.

        The new process must be a child of this process by now.
        """
        self._process = ForkedProcess(pid)

    @property
    def started(self) -> bool:
        """Whether the process has been started. Also true after its end."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id, also the id of its session and group. Only valid after the start."""
        assert self._process is not None
        return self._process.pid

    def observe(self) -> ProcessObservation:
        """Returns the current state of the process. Reaps the process if it has ended."""
        if self._process is None:
            # The process will run soon. If the fork fails, the forking process reports that.
            return ProcessObservation(state=ProcessState.RUNNING)
        code = self._process.poll()
        if code is not None:
            return ProcessObservation(state=ProcessState.ENDED, exit_code=code)
        try:
            return parse_stat(_read_stat(self.pid))
        except OSError as error:
            if error.errno not in _TOO_MANY_FILES:
                raise
            # The state is unknown. The next check follows soon.
            return ProcessObservation(state=ProcessState.RUNNING)

    def is_reaped(self) -> bool:
        """Whether the process was reaped or never started. Reaps the process if it has ended."""
        return self._process is None or self._process.poll() is not None

    def stopped_for_s(self, now_s: float) -> float:
        """Seconds for which the process has been stopped; see StopClock."""
        return 0.0 if self._process is None else self._stop_clock.stopped_for_s(self.pid, now_s)

    def terminate(self) -> None:
        """Sends SIGTERM to the process only. The process ends its children in its own order."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the whole process group immediately."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the group's processes have ended
                os.killpg(self.pid, signal.SIGKILL)


async def kill_everything(children: Sequence[ChildProcess]) -> bool:
    """Kills and reaps the children and all other descendants of this process.

    This process must be PID 1 or have called adopt_orphans(). Then a descendant outside of its child's
    process group becomes a child of this process when its parent dies, and is killed in the next turn of the
    loop.

    Returns:
        Whether all are gone within REAP_TIMEOUT_S.
    """
    for child in children:
        child.kill()
    deadline_s = time.monotonic() + REAP_TIMEOUT_S
    alive: list[int] = []
    while True:
        try:
            alive = _kill_and_reap(children)
        except OSError as error:
            if error.errno not in _TOO_MANY_FILES:
                raise
        else:
            if not alive:
                return True
        for pid in alive:
            # The list can contain a zombie that another process traces. A kill has no effect on such a
            # zombie.
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(REAP_INTERVAL_S)


def _kill_and_reap(children: Sequence[ChildProcess]) -> list[int]:
    """Kills the given children again, and reaps every child process that has ended.

    Also reaps the orphans that this process has adopted. Returns the process ids of the child processes that
    have not ended.
    """
    by_pid = {child.pid: child for child in children if child.started}
    alive = []
    for pid in child_pids():
        if pid in by_pid:
            by_pid[pid].kill()  # again: its process group may have forked since the last kill
            ended = by_pid[pid].is_reaped()
        else:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        if not ended:
            alive.append(pid)
    return alive


def reap_orphans(children: Sequence[ChildProcess]) -> None:
    """Reaps orphaned zombies, as PID 1 must.

    Call this after the start of all children. Otherwise it could reap a forked child whose process id is not
    known yet.

    Asks the kernel for any zombie. Reading /proc instead took 8 % of a core on a busy host, because
    supervisors call this at short intervals (2 cores, 2026-11-21). If the kernel returns one of `children`,
    this function stops, because ChildProcess reaps that child. A later call reaps the remaining zombies.
    """
    own_pids = {child.pid for child in children if child.started}
    with contextlib.suppress(ChildProcessError):  # this process has no children
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own_pids:
                return
            os.waitpid(ended.si_pid, 0)


def child_pids(parent: int | None = None) -> list[int]:
    """Lists the process ids of a process's children, including zombies and the children of all threads.

    Args:
        parent: process id; default: this process.
    """
    parent = os.getpid() if parent is None else parent
    children = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = _read_stat(int(entry.name))
        except OSError:
            continue  # the process has ended
        parent_of_entry = int(_stat_field(stat, 4))
        if parent_of_entry == parent:
            children.append(int(entry.name))
    return children
