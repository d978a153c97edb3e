"""Starts the ranks of a test group, and ends them completely."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.forked_python import ForkedProcess, forks
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

DEADLINE_S = 120.0
MODULE = "tests.integration.bridge.bridge_rank"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A test group.

    Attributes:
        devices: devices of its ranks, in torch's names.
        share_host: value of this option for all ranks.
        timeout_s: time for which ranks wait for each other.
        wrappers: by rank, a command that runs the rank's command.
    """

    devices: tuple[str, ...] = ("cpu", "cpu")
    share_host: bool = True
    timeout_s: float = 30.0
    wrappers: tuple[tuple[str, ...], ...] = ()


class Process:
    """One rank's process.

    Args:
        config: configuration of the rank.
        errors: file for its stderr.
        wrapper: a command that runs the rank's command. Without one, the process is forked, with torch
            imported.
    """

    def __init__(self, config: str, errors: Path, wrapper: Sequence[str] = ()) -> None:
        self._errors = errors
        if not wrapper:
            parent = forks(WORKER_PYTHON, MODULE)
            self._process: ForkedProcess | Wrapped = parent.start(
                MODULE, config, errors=errors, env=ENVIRONMENT
            )
        else:
            self._process = Wrapped([*wrapper, str(WORKER_PYTHON), "-m", MODULE, config], errors)
        self.pid = self._process.pid

    def next_event(self) -> dict[str, Any]:
        """Waits for the rank's next report, and returns it.

        Only the rank, or pytest's time limit, ends the wait.
        """
        line = self._process.stdout.readline()
        assert line, f"a rank ended:\n{self._errors.read_text()}"
        event: dict[str, Any] = json.loads(line)
        return event

    def release(self) -> None:
        """Resumes a rank that waits for a line."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kills the rank immediately, with the processes of its wrapper."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def end(self) -> None:
        self.kill()
        self._process.close()


class Wrapped:
    """A rank's process that a wrapper starts. Otherwise like a ForkedProcess."""

    def __init__(self, command: Sequence[str], errors: Path) -> None:
        with errors.open("w") as stderr:
            self._popen = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self.pid, self.stdin, self.stdout = self._popen.pid, self._popen.stdin, self._popen.stdout

    def wait(self, timeout_s: float) -> None:
        self._popen.wait(timeout_s)

    def kill(self) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()


@contextmanager
def running(group: Group, scenario: str, **arguments: Any) -> Iterator[list[Process]]:
    """Runs a scenario in the ranks of a group, and yields them. Ends all of them at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processes: list[Process] = []
        try:
            for rank, device in enumerate(group.devices):
                config = {
                    "rank": rank,
                    "world": len(group.devices),
                    "store": f"{folder}/store",
                    "device": device,
                    "share_host": group.share_host,
                    "timeout_s": group.timeout_s,
                    "scenario": scenario,
                    "arguments": arguments,
                }
                wrapper = group.wrappers[rank] if group.wrappers else ()
                errors = Path(folder) / f"stderr-{rank}"
                processes.append(Process(json.dumps(config), errors, wrapper))
            yield processes
        finally:
            for process in processes:
                process.end()


def outcomes(group: Group, scenario: str, **arguments: Any) -> list[dict[str, Any]]:
    """Runs a scenario, and returns the reports of each rank, up to its error or its end."""
    with running(group, scenario, **arguments) as processes:
        return [_outcome(process) for process in processes]


def _outcome(process: Process) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    while not outcome.keys() & {"closed", "error"}:
        outcome |= process.next_event()
    return outcome
