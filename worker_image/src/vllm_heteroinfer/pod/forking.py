"""Processes of a pod that are forked from its first one, once that has imported torch and vLLM.

Importing vLLM costs 11 s of a CPU in each process that does it (docs/contributor/startup.md). So the
supervisor starts one process, and asks it for the others: a fork has the imports already, and
shares their memory.
Each fork is orphaned on purpose, by a parent that ends at once: it becomes the child of the supervisor,
which is PID 1 or asks for orphans, so that exit codes, signals and the kill at the supervisor's death
are as if the supervisor had started it. The first process then goes on as the rank that it is.

The standard library and the contract only. A channel carries one request a message, with two
descriptors, and one answer for each.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from heteroinfer_contract import codec, names
from heteroinfer_contract.parent_death import die_with_parent
from vllm_heteroinfer.pod.channel import SupervisorEnd, no_channel

MAX_MESSAGE_BYTES = 64 * 1024
"""A request has only the variables that differ from the first process's; they fit the socket's buffer."""
_ORPHANED_POLL_S = 0.001
"""Between two looks of a fork at who its parent is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """One process to fork.

    Attributes:
        module: what it runs, as `python -m` would.
        environment: variables that it has otherwise than the first process; None where it lacks one.
        cpus: that it may run on.
    """

    label: str
    module: str
    environment: Mapping[str, str | None]
    cpus: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAnswer:
    """What became of a request: the process, a child of the supervisor; or why there is none."""

    label: str
    pid: int = 0
    error: str = ""


def run_or_fork(main: Callable[[], None], settle: Callable[[str], None] = lambda module: None) -> None:
    """Forks the pod's other processes where the supervisor asks for it; runs `main` here, and theirs there.

    Args:
        settle: called in each fork with its module, before that runs.

    Raises:
        ContractError: as ForkServer.from_env.
    """
    server = ForkServer.from_env(os.environ)
    module = None if server is None else server.serve()
    if module is None:
        main()
    else:
        import runpy  # the supervisor, which imports this module, starts at once without it

        settle(module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def difference(first: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str | None]:
    """Returns what turns the environment `first` into `other`."""
    changed: dict[str, str | None] = {name: text for name, text in other.items() if first.get(name) != text}
    return changed | {name: None for name in first if name not in other}


class ForkClient(SupervisorEnd):
    """The supervisor's end of the channel to the pod's first process."""

    @classmethod
    def open_pair(cls) -> tuple["ForkClient", socket.socket]:
        """Returns the supervisor's end, and the end to pass to the first process and close here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def ask(self, request: ForkRequest, *, output_fd: int, channel_fd: int) -> None:
        """Asks for a process with this standard output, and this end of a RankChannel.

        Raises:
            OSError: the first process is gone.
        """
        socket.send_fds(self._socket, [json.dumps(asdict(request)).encode()], [output_fd, channel_fd])

    def end_requests(self) -> None:
        """Says that there are no more requests."""
        self._socket.shutdown(socket.SHUT_WR)

    def read(self) -> list[ForkAnswer]:
        """Returns what was answered since the last call; sets `closed` at the other's end.

        Raises:
            ContractError: an answer is of another version.
        """
        messages = self._receive(MAX_MESSAGE_BYTES)
        return [codec.from_json(ForkAnswer, message.decode()) for message in messages]


class ForkServer:
    """The first process's end."""

    def __init__(self, channel: socket.socket, supervisor: int) -> None:
        self._socket = channel
        self._supervisor = supervisor

    @classmethod
    def from_env(cls, env: MutableMapping[str, str]) -> "ForkServer | None":
        """Returns the server of this process, or None if nothing is to be forked from it.

        Takes the descriptor out of `env`: forks have none.

        Raises:
            ContractError: the descriptor is none.
        """
        text = env.pop(names.ENV_FORK_FD, "")
        if not text:
            return None
        try:
            channel = socket.socket(fileno=int(text))
        except (ValueError, OSError) as error:
            raise no_channel(f"{names.ENV_FORK_FD}={text!r}", error) from error
        return cls(channel, os.getppid())

    def serve(self) -> str | None:
        """Forks a process for each request, until the supervisor has no more.

        No thread of this process may hold a lock that a fork needs: call it before any is started.

        Returns:
            In the forks the module to run; None in this process.
        """
        while True:
            message, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 2)
            if not message:
                self._socket.close()
                return None
            request = ForkRequest(**json.loads(message))
            # What is buffered would be written twice.
            sys.stdout.flush()
            sys.stderr.flush()
            pid = _fork_orphan(self._supervisor)
            if pid == 0:
                self._socket.close()
                _become(request, *fds)
                return request.module
            for fd in fds:
                os.close(fd)
            self._answer(request, pid)

    def _answer(self, request: ForkRequest, pid: int | OSError) -> None:
        if isinstance(pid, OSError):
            answer = ForkAnswer(label=request.label, error=str(pid))
        else:
            answer = ForkAnswer(label=request.label, pid=pid)
        self._socket.send(codec.to_json(answer).encode())


def _fork_orphan(supervisor: int) -> int | OSError:
    """Returns 0 in a new process, whose parent is the supervisor; its number here, or why there is none."""
    read_fd, write_fd = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(read_fd)
        os.close(write_fd)
        return error
    if between == 0:
        os.close(read_fd)
        parent = os.getpid()
        _fork_and_leave(write_fd)
        os.close(write_fd)
        while os.getppid() == parent:
            time.sleep(_ORPHANED_POLL_S)
        die_with_parent(supervisor)
        return 0
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    # Once it has ended its child is the supervisor's.
    os.waitpid(between, 0)
    return int(text) if text.isdecimal() else OSError(text or "the process between ended before its fork")


def _fork_and_leave(write_fd: int) -> None:
    """Forks once more: returns in the new process, and ends this one."""
    try:
        pid = os.fork()
    except OSError as error:
        _leave(write_fd, str(error))
    if pid:
        _leave(write_fd, str(pid))


def _leave(write_fd: int, text: str) -> NoReturn:
    try:
        os.write(write_fd, text.encode())
    finally:  # also where the first process has ended meanwhile: this one has nothing else to do
        os._exit(0)


def _become(request: ForkRequest, output_fd: int, channel_fd: int) -> None:
    """Makes this fork of the first process what `request` asks for, in a session of its own."""
    os.setsid()
    os.close(int(os.environ[names.ENV_RANK_CHANNEL_FD]))  # the first process's own
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    os.sched_setaffinity(0, request.cpus)
    for name, text in request.environment.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    os.environ[names.ENV_RANK_CHANNEL_FD] = str(channel_fd)
    sys.argv = [request.module]
