"""Starts the ranks of a test group, and ends them without a trace."""

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

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A test group.

    Attributes:
        devices: of its ranks, as torch names them.
        share_host: what the ranks are given.
        timeout_s: for which they wait for one another.
        wrappers: by rank, a command that runs its command.
    """

    devices: tuple[str, ...] = ("cpu", "cpu")
    share_host: bool = True
    timeout_s: float = 30.0
    wrappers: tuple[tuple[str, ...], ...] = ()


class Process:
    """One rank's process."""

    def __init__(self, command: Sequence[str], errors: Path) -> None:
        self._errors = errors
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with errors.open("w") as stderr:
            self._popen = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def next_event(self) -> dict[str, Any]:
        """Returns what the rank tells next; it ends by itself, or by pytest's time limit."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, f"a rank ended with {self._popen.wait(DEADLINE_S)}:\n{self._errors.read_text()}"
        event: dict[str, Any] = json.loads(line)
        return event

    def release(self) -> None:
        """Lets a rank go on that waits for a line."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()

    def kill(self) -> None:
        """Ends the rank, and whatever its wrapper started, at once."""
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(DEADLINE_S)

    def end(self) -> None:
        self.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def running(group: Group, scenario: str, **arguments: Any) -> Iterator[list[Process]]:
    """Gives the ranks of a group that runs a scenario; none of them is left afterwards."""
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
                command = [
                    *wrapper,
                    str(WORKER_PYTHON),
                    "-m",
                    "tests.integration.bridge.bridge_rank",
                    json.dumps(config),
                ]
                processes.append(Process(command, Path(folder) / f"stderr-{rank}"))
            yield processes
        finally:
            for process in processes:
                process.end()


def outcomes(group: Group, scenario: str, **arguments: Any) -> list[dict[str, Any]]:
    """Runs a scenario and returns what each rank reported, up to its error or its end."""
    with running(group, scenario, **arguments) as processes:
        return [_outcome(process) for process in processes]


def _outcome(process: Process) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    while not outcome.keys() & {"closed", "error"}:
        outcome |= process.next_event()
    return outcome
