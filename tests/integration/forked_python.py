"""Processes of the worker's Python that begin with torch imported: forked from one that has imported it.

For many short processes, whose imports would be most of their time. Not for what is about imports, or about
the environment that a process begins with. The parent runs no tensor operation: it has no thread to lose.

`python -m tests.integration.forked_python MODULE...` is that parent; requests come by the socket at stdin.
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
    """A forked process, a session of its own, with pipes for stdin and stdout."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> None:
        """Returns once the process has ended; raises TimeoutError if it has not by then."""
        if self._pidfd is not None and not select.select([self._pidfd], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {self.pid} runs on after {timeout_s} s")

    def kill(self) -> None:
        """Ends the process, and what it started, immediately."""
        if self._pidfd is not None and not select.select([self._pidfd], [], [], 0)[0]:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # no session of its own yet, or it has ended since
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and closes its pipes."""
        self.kill()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A forked process that has ended: what it printed, and whether with an error."""

    lines: list[str]
    errors: str

    def answer(self) -> Any:
        """Returns the last line, parsed."""
        assert self.lines, self.errors[-4000:]
        return json.loads(self.lines[-1])


class Forks:
    """A parent of forked processes; it ends with this process.

    Args:
        python: of the worker.
        modules: that it imports before the first fork.
    """

    def __init__(self, python: Path, *modules: str) -> None:
        self._requests, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this object
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
            module: one of the parent's modules, or another.
            argument: of its `main`.
            errors: file for its stderr.
            env: added to its environment before the call.
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
        """Does the same until the process ends, or pytest's time limit comes."""
        with tempfile.TemporaryDirectory() as folder:
            errors = Path(folder) / "stderr"
            process = self.start(module, argument, errors=errors, env=env)
            try:
                return Ended(lines=process.stdout.read().splitlines(), errors=errors.read_text())
            finally:
                process.close()


@functools.cache
def forks(python: Path, *modules: str) -> Forks:
    """Returns the one parent of these modules."""
    return Forks(python, *modules)


def main(modules: list[str]) -> None:
    """Forks a process for each request, until nobody is there to ask."""
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
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
    """Runs a request in a new process, and ends it."""
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
        if isinstance(end.code, str):  # as Python itself does: words are an error
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
