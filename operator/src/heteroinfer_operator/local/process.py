"""Starts, watches and ends the process tree of one pod."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heteroinfer_contract import names, parent_death
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from heteroinfer_contract.names import exit_code_of_signal
from heteroinfer_operator.cluster import ContainerTermination
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.local.pod_process import PodProcess

WORKER_MODULE: Final = "vllm_heteroinfer.launch.cli"
"""Module that runs in place of the image's command `heteroinfer-worker`."""
MAX_ERROR_LENGTH: Final = 500
"""Largest part of a command's error output that a message contains, in characters: the end of the output."""
KILL_TIMEOUT_S: Final = 5.0
"""Wait after SIGKILL. A process in an uninterruptible wait takes longer, and is then reported."""
_POLL_S: Final = 0.02
_NOT_INHERITED: Final = ("HETEROINFER_", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", names.ENV_VISIBLE_GPUS)
"""Prefixes of variables that pods do not inherit: they belong to another Python or another pod."""


class LeftoverProcessError(HeteroInferError):
    """Processes of a pod still run after SIGKILL."""

    reason = "LeftoverProcess"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFolder:
    """The files of a pod: a private folder, and the log with the output of all its processes."""

    path: Path
    log: Path

    @property
    def termination_message(self) -> Path:
        """File in which the supervisor writes why it ended."""
        return self.path / "termination-log"

    @property
    def temporary(self) -> Path:
        """The pod's TMPDIR."""
        return self.path / "tmp"

    def remove(self) -> None:
        """Removes the folder, and keeps the log."""
        shutil.rmtree(self.path, ignore_errors=True)


class RunningPod:
    """A pod's processes, from the supervisor's start to the end of the last process."""

    def __init__(self, pod: PodProcess, process: asyncio.subprocess.Process, folder: PodFolder) -> None:
        self.pod = pod
        self.folder = folder
        self._process = process

    @classmethod
    async def start(
        cls,
        pod: PodProcess,
        worker_python: Path,
        folder: PodFolder,
        gpus: Sequence[str],
        env: Mapping[str, str],
    ) -> "RunningPod":
        """Creates the folder, and starts the supervisor of a pod.

        The supervisor runs in a session of its own, so that Ctrl-C reaches only `heteroinfer up`. The kernel
        kills the supervisor when this process ends. The supervisor's environment has the pod's variables, and
        those of `env` except variables for another Python or another pod.

        Raises:
            OSError: the program could not be started, or the folder could not be created.
        """
        folder.temporary.mkdir(parents=True)
        inherited = {name: value for name, value in env.items() if not name.startswith(_NOT_INHERITED)}
        own = {
            "TMPDIR": str(folder.temporary),
            "PYTHONUNBUFFERED": "1",
            names.ENV_VISIBLE_GPUS: ",".join(gpus) or names.HIDE_GPUS,
            names.ENV_TERMINATION_MESSAGE_PATH: str(folder.termination_message),
        }
        # The guard is a program that asks the kernel to kill it when this process ends, and then replaces
        # itself by the supervisor (exec).
        guard = [str(worker_python), "-I", "-S", parent_death.__file__, str(os.getpid())]
        with folder.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *guard,
                str(worker_python),
                "-m",
                WORKER_MODULE,
                *pod.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**inherited, **pod.env, **own},
                cwd=folder.path,
                start_new_session=True,
            )
        return cls(pod, process, folder)

    async def wait(self) -> ContainerTermination:
        """Waits until all processes of the pod have ended. Returns how the supervisor ended.

        As in a container, all other processes are killed when the first process (the supervisor) ends.

        Raises:
            LeftoverProcessError: a process survived SIGKILL.
        """
        code = await self._process.wait()
        await self._kill_remaining()
        return ContainerTermination(
            exit_code=code if code >= 0 else exit_code_of_signal(-code),
            reason="Completed" if code == 0 else "Error",
            message=self._read_termination_message(),
        )

    async def stop(self, grace_s: float) -> None:
        """Ends the pod: SIGTERM to the supervisor, then after `grace_s` SIGKILL to all its processes.

        Waits until the supervisor has ended. If it ends in time, `wait` kills the other processes.

        Raises:
            LeftoverProcessError: a process survived SIGKILL.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await self._kill_remaining()

    def _read_termination_message(self) -> str:
        """Returns the supervisor's termination message, or "" without one."""
        try:
            text = self.folder.termination_message.read_bytes()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"the termination message cannot be read ({error.strerror})"
        return text[:MAX_TERMINATION_MESSAGE_BYTES].decode(errors="replace")

    async def _kill_remaining(self) -> None:
        """Kills all processes of the pod; raises LeftoverProcessError if some survive."""
        deadline = asyncio.get_running_loop().time() + KILL_TIMEOUT_S
        while remaining := sorted(self._find_processes()):
            for pid in remaining:
                # A process of another user cannot be killed. The error after the deadline names this process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if asyncio.get_running_loop().time() > deadline:
                raise LeftoverProcessError(
                    f"pod {self.pod.name}: processes {', '.join(map(str, remaining))} still run "
                    f"{KILL_TIMEOUT_S:g} s after SIGKILL. Read /proc/PID/stack to see where they wait"
                )
            await asyncio.sleep(_POLL_S)

    def _find_processes(self) -> Iterator[int]:
        """Yields the ids of the pod's living processes.

        A process belongs to the pod if it has the pod's session, working directory or environment. One of
        the three suffices, because a process can change the others.
        """
        variable = f"{names.ENV_TERMINATION_MESSAGE_PATH}={self.folder.termination_message}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, session = _state_and_session(entry)
                belongs = (
                    session == self._process.pid
                    or (entry / "cwd").readlink() == self.folder.path
                    or variable in (entry / "environ").read_bytes().split(b"\0")
                )
            except (OSError, ValueError):
                continue  # the process has just ended, or belongs to another user
            if belongs and state != "Z":
                yield int(entry.name)


def _state_and_session(entry: Path) -> tuple[str, int]:
    """Reads state and session of a process from its folder in /proc."""
    # proc_pid_stat(5): the name in parentheses may contain any text; state and session follow it.
    fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[3])
