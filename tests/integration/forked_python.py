"""Forks processes of the worker's Python from a process that has imported torch.

Use it for many short processes, whose imports would take most of their time. Do not use it for tests of
imports, or of the environment in which a process starts. The parent runs no tensor operation, so it has no
threads that a fork would lose.

`python -m tests.integration.forked_python MODULE...` is this parent. It reads requests from the socket at
stdin.
"""

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[2]
_REQUEST_BYTES = 1 << 20


class ForkedProcess:
    """A forked process in its own session, with pipes for stdin and stdout."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> None:
        """Waits until the process has ended. Raises TimeoutError if it still runs."""
        if self._pidfd is not None and not select.select([self._pidfd], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")

    def kill(self) -> None:
        """Kills the process and the processes that it started."""
        if self._pidfd is not None and not select.select([self._pidfd], [], [], 0)[0]:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # It has no session of its own yet, or it has ended in the meantime.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kills the process and closes its pipes."""
        self.kill()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A forked process that has ended: its output, and whether it failed."""

    lines: list[str]
    errors: str

    def answer(self) -> Any:
        """Returns the last line of the output, parsed as JSON."""
        assert self.lines, self.errors[-4000:]
        return json.loads(self.lines[-1])


class Forks:
    """The parent of forked processes. It ends with this process.

    Args:
        python: the worker's Python.
        modules: modules that the parent imports before the first fork.
    """

    def __init__(self, python: Path, *modules: str) -> None:
        self._requests, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - stays open as long as this object
        with theirs:
            self._parent = subprocess.Popen(
                [str(python), "-m", "tests.integration.forked_python", *modules],
                cwd=REPOSITORY,
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )

    def start(
        self, module: str, argument: str, *, errors: Path, env: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        """Forks a process that calls `module.main(argument)`.

        Args:
            module: one of the parent's modules, or another module.
            argument: argument of `main`.
            errors: file for its stderr.
            env: variables that are set before the call.
        """
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        with errors.open("w") as stderr:
            request = json.dumps([module, argument, dict(env or {})]).encode()
            assert len(request) < _REQUEST_BYTES
            socket.send_fds(self._requests, [request], [read_in, write_out, stderr.fileno()])
        os.close(read_in)
        os.close(write_out)
        pid = self._requests.recv(32)
        if not pid:
            self._log.seek(0)
            raise AssertionError(
                f"the parent ended with {self._parent.wait(60)}:\n{self._log.read()[-4000:]}"
            )
        return ForkedProcess(int(pid), os.fdopen(write_in, "w"), os.fdopen(read_out))

    def run(self, module: str, argument: str, *, env: Mapping[str, str] | None = None) -> Ended:
        """Forks a process like `start`, and waits for its end or for pytest's time limit."""
        with tempfile.TemporaryDirectory() as folder:
            errors = Path(folder) / "stderr"
            process = self.start(module, argument, errors=errors, env=env)
            try:
                return Ended(lines=process.stdout.read().splitlines(), errors=errors.read_text())
            finally:
                process.close()


@functools.cache
def forks(python: Path, *modules: str) -> Forks:
    """Returns the parent of forks with these modules. All callers share it."""
    return Forks(python, *modules)


def main(modules: list[str]) -> None:
    """Forks a process for each request, until the requesting process has ended."""
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children
    requests = socket.socket(fileno=os.dup(0))
    while True:
        request, pipes, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            _run(json.loads(request), pipes)
        for pipe in pipes:
            os.close(pipe)
        requests.send(str(pid).encode())


def _run(request: list[Any], pipes: list[int]) -> None:
    """Runs a request in this new process, and ends the process."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
        module, argument, env = request
        os.environ.update(env)
        importlib.import_module(module).main(argument)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):  # like Python itself: an exit code that is a text is an error
            print(end.code, file=sys.stderr)
        else:
            code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
