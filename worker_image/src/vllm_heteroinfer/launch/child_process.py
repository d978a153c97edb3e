"""The processes of a pod: started so that none outlives the supervisor, watched, killed. Linux only.

A process is dead for us as soon as the kernel marks it exiting: a rank with 100 GB
takes seconds to give them back, and its exit status comes only after that.
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
"""linux/sched.h; in the flags of /proc/PID/stat."""
REAP_TIMEOUT_S = 30.0
"""A killed process needs as long as the kernel takes to free its memory; beyond this it
hangs in the kernel, and nothing in user space can help."""
REAP_INTERVAL_S = 0.01
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Who opens connections to us takes files; those that are too many are closed in a moment."""


class ProcessState(Enum):
    """What the kernel says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessObservation:
    """A process now.

    Attributes:
        exit_code: as subprocess has it; None while it runs, or as long as the kernel
            doesn't tell.
    """

    state: ProcessState
    exit_code: int | None = None


def parse_stat(stat: str) -> ProcessObservation:
    """Returns what the text of /proc/PID/stat says (proc_pid_stat(5))."""
    fields = stat[stat.rindex(")") + 2 :].split()
    state, flags, status = fields[0], int(fields[6]), int(fields[49])
    if state in "ZXx" or flags & PF_EXITING:
        # The status is 0 also when the kernel may not tell: then wait until it is reaped.
        return ProcessObservation(
            state=ProcessState.ENDED, exit_code=os.waitstatus_to_exitcode(status) if status else None
        )
    return ProcessObservation(state=ProcessState.STOPPED if state in "Tt" else ProcessState.RUNNING)


def _read_stat(pid: int) -> str:
    """Returns the text of /proc/PID/stat; raises OSError when the process is gone.

    The kernel cuts a process's name at 15 bytes, maybe inside of a letter.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace")


def read_switches(pid: int) -> int:
    """Returns how often a process's first thread has left its CPU by itself, which each stop does once.

    Raises:
        OSError: the process is gone.
    """
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    name = "voluntary_ctxt_switches:"
    return next((int(line.removeprefix(name)) for line in status.splitlines() if line.startswith(name)), 0)


class StopClock:
    """Measures how long a process has been in one stop.

    A process that is stopped again and again (cpulimit does this) may be stopped at every look, and yet runs.
    """

    def __init__(self) -> None:
        self._switches: int | None = None
        self._since_s = 0.0

    def stopped_for_s(self, pid: int, now_s: float) -> float:
        """Returns the seconds since the first look that saw this stop; 0 if the process runs or has ended.

        Args:
            now_s: on a clock that stands still while this process has no turn: a stop of the whole pod
                stops it too.
        """
        try:
            stopped = parse_stat(_read_stat(pid)).state is ProcessState.STOPPED
            switches = read_switches(pid) if stopped else None
        except OSError:
            switches = None
        if switches is None or switches != self._switches:
            self._switches, self._since_s = switches, now_s
        return now_s - self._since_s


class ForkedProcess:
    """A process that another one forked, and that became our child; the part of Popen that is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code as Popen does, None while it runs."""
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ChildProcess:
    """One process of the pod, in a session of its own, its output piped through us.

    Started by `start`, or forked by another process, which tells its number later (`adopt`).

    Attributes:
        label: for the output and for messages: `rank 1`, `api`.
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
        """Starts it; returns once the kernel has loaded the command, which may take seconds.

        Call it on a thread that lives as long as the supervisor (PR_SET_PDEATHSIG).

        Raises:
            OSError: the command cannot be started.
        """
        # The standard library names this switch for such cases: a vfork holds the interpreter's lock until
        # the kernel has loaded the command, seconds on a busy disk, and no thread of ours would run.
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
        """Takes the process `pid`, forked by another one and our child by now, for this one."""
        self._process = ForkedProcess(pid)

    @property
    def started(self) -> bool:
        """Returns whether there is a process, or was one."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Returns its process id, which is also its session's and its group's; it must have been started."""
        assert self._process is not None
        return self._process.pid

    def observe(self) -> ProcessObservation:
        """Returns what it does now, and reaps it when it can be reaped."""
        if self._process is None:
            return ProcessObservation(state=ProcessState.RUNNING)  # or will; who forks it is watched
        code = self._process.poll()
        if code is not None:
            return ProcessObservation(state=ProcessState.ENDED, exit_code=code)
        try:
            return parse_stat(_read_stat(self.pid))
        except OSError as error:
            if error.errno not in _NO_FILES:
                raise
            return ProcessObservation(
                state=ProcessState.RUNNING
            )  # as far as is known; the next look comes soon

    def reaped(self) -> bool:
        """Returns whether nothing of it is left, and reaps it if it can be."""
        return self._process is None or self._process.poll() is not None

    def stopped_for_s(self, now_s: float) -> float:
        """Returns how many seconds it has been in one stop, as StopClock does."""
        return 0.0 if self._process is None else self._stop_clock.stopped_for_s(self.pid, now_s)

    def terminate(self) -> None:
        """Asks it to end (SIGTERM to it alone: it ends its own children in its own order)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills its whole process group at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


async def kill_everything(children: Sequence[ChildProcess]) -> bool:
    """Kills the children and every process below this one, and reaps them.

    Needs adopt_orphans() or PID 1: then what left its group becomes our child when its
    parent dies, and is found here.

    Returns:
        whether all are gone before REAP_TIMEOUT_S.
    """
    for child in children:
        child.kill()
    deadline_s = time.monotonic() + REAP_TIMEOUT_S
    left: list[int] = []
    while True:
        try:
            left = _reap(children)
        except OSError as error:
            if error.errno not in _NO_FILES:
                raise
        else:
            if not left:
                return True
        for pid in left:
            # A zombie that another process traces can be in the list: the kill does nothing.
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(REAP_INTERVAL_S)


def _reap(children: Sequence[ChildProcess]) -> list[int]:
    """Reaps what can be reaped; returns our direct children that still live."""
    own = {child.pid: child for child in children if child.started}
    left = []
    for pid in child_pids():
        if pid in own:
            own[pid].kill()
            ended = own[pid].reaped()
        else:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        if not ended:
            left.append(pid)
    return left


def reap_orphans(children: Sequence[ChildProcess]) -> None:
    """Reaps zombies that were left to us by processes below ours, as PID 1 must.

    Call it once all children have been started: one that was forked and is not known yet is no orphan.

    Asks the kernel for any zombie instead of reading /proc, which on a busy host took 8 %
    of a core at the watch's pace (2 cores, 2026-11-21). One of `children` is left for its
    owner, and hides those behind it until then: the next look comes soon.
    """
    own = {child.pid for child in children if child.started}
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in own:
                return
            os.waitpid(found.si_pid, 0)


def child_pids(parent: int | None = None) -> list[int]:
    """Returns the process ids of a process's children, zombies included, whichever thread made them.

    Args:
        parent: ours by default.
    """
    parent = os.getpid() if parent is None else parent
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = _read_stat(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
        if int(stat[stat.rindex(")") + 2 :].split()[1]) == parent:
            found.append(int(entry.name))
    return found
