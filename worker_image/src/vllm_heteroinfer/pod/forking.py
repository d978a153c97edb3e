"""Forks a pod's processes from its first process, which has imported torch and vLLM.

Importing vLLM takes 11 s of CPU time in each process (docs/contributor/startup.md). So the supervisor starts
one process and asks it to fork the other processes: a fork has the imports already and shares their memory.

Each fork is orphaned on purpose, by a parent that ends immediately. The fork becomes a child of the
supervisor, which is PID 1 or a subreaper. So exit codes, signals and the kill at the supervisor's death work
as if the supervisor had started the fork. After the last fork the first process continues as a rank.

Stdlib and the contract only. Each message of the channel is one request with two descriptors; each request
gets one answer.
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
from vllm_heteroinfer.pod.channel import SupervisorEnd, no_channel_error

MAX_MESSAGE_BYTES = 64 * 1024
"""Maximum size of a request, which must fit the socket's buffer. A request has only the variables that differ
from those of the first process."""
_ORPHANED_POLL_S = 0.001
"""Interval at which a fork checks whether its parent has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """One process to fork.

    Attributes:
        module: name of the module to run, as for `python -m`.
        environment: variables that differ from the first process's; None removes a variable.
        cpus: numbers of the CPUs that the process may run on.
    """

    label: str
    module: str
    environment: Mapping[str, str | None]
    cpus: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAnswer:
    """The result of a request: the process, which is a child of the supervisor, or an error."""

    label: str
    pid: int = 0
    error: str = ""


def run_or_fork(main: Callable[[], None], prepare_fork: Callable[[str], None] = lambda module: None) -> None:
    """Forks the processes that the supervisor asks for, then runs `main`.

    A fork returns from this function after it has run its own module instead of `main`.

    Args:
        prepare_fork: called in each fork with the name of its module, before the module runs.

    Raises:
        ContractError: see ForkServer.from_env.
    """
    server = ForkServer.from_env(os.environ)
    module = None if server is None else server.serve()
    if module is None:
        main()
    else:
        import runpy  # imported here so that the supervisor, which imports this module, starts faster

        prepare_fork(module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def environment_changes(first: Mapping[str, str], target: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the changes that turn the environment `first` into `target`; None removes a variable."""
    changes: dict[str, str | None] = {name: text for name, text in target.items() if first.get(name) != text}
    return changes | {name: None for name in first if name not in target}


class ForkClient(SupervisorEnd):
    """The supervisor's end of the channel by which it asks the pod's first process for forks."""

    @classmethod
    def open_pair(cls) -> tuple["ForkClient", socket.socket]:
        """Creates the supervisor's end, and the end to pass to the first process and close here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def ask(self, request: ForkRequest, *, output_fd: int, channel_fd: int) -> None:
        """Requests a process with the given standard output and end of a RankChannel.

        Raises:
            OSError: the first process is gone.
        """
        socket.send_fds(self._socket, [json.dumps(asdict(request)).encode()], [output_fd, channel_fd])

    def end_requests(self) -> None:
        """Ends the requests, so that the first process goes on as a rank."""
        self._socket.shutdown(socket.SHUT_WR)

    def read(self) -> list[ForkAnswer]:
        """Returns the answers since the last call; sets `closed` once the other end is closed.

        Raises:
            ContractError: an answer is of another version.
        """
        messages = self._receive(MAX_MESSAGE_BYTES)
        return [codec.from_json(ForkAnswer, message.decode()) for message in messages]


class ForkServer:
    """Answers a ForkClient in the pod's first process, which forks the pod's other processes."""

    def __init__(self, channel: socket.socket, supervisor: int) -> None:
        self._socket = channel
        self._supervisor = supervisor

    @classmethod
    def from_env(cls, env: MutableMapping[str, str]) -> "ForkServer | None":
        """Creates the server of this process; None if the supervisor wants no forks from this process.

        Removes the descriptor from `env`, because forks do not have it.

        Raises:
            ContractError: the environment has no valid descriptor.
        """
        text = env.pop(names.ENV_FORK_FD, "")
        if not text:
            return None
        try:
            channel = socket.socket(fileno=int(text))
        except (ValueError, OSError) as error:
            raise no_channel_error(f"{names.ENV_FORK_FD}={text!r}", error) from error
        return cls(channel, os.getppid())

    def serve(self) -> str | None:
        """Forks a process for each request, until the supervisor ends the requests.

        Call this method before this process starts threads: a fork has only the calling thread, so it would
        wait without end for a lock that another thread held.

        Returns:
            In a fork, the name of the module to run; in this process, None.
        """
        while True:
            message, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 2)
            if not message:
                self._socket.close()
                return None
            request = ForkRequest(**json.loads(message))
            # Otherwise both processes would write the buffered output after the fork.
            sys.stdout.flush()
            sys.stderr.flush()
            result = _fork_orphan(self._supervisor)
            if result == 0:  # this is the fork
                self._socket.close()
                _take_over(request, *fds)
                return request.module
            for fd in fds:
                os.close(fd)
            self._answer(request, result)

    def _answer(self, request: ForkRequest, result: int | OSError) -> None:
        """Sends the result of a fork to the supervisor: the process id, or the error."""
        if isinstance(result, OSError):
            answer = ForkAnswer(label=request.label, error=str(result))
        else:
            answer = ForkAnswer(label=request.label, pid=result)
        self._socket.send(codec.to_json(answer).encode())


def _fork_orphan(supervisor: int) -> int | OSError:
    """Forks a child of the supervisor, through an intermediate process that ends at once.

    Returns 0 in the child. In this process, returns the PID of the child, or the error.
    """
    read_fd, write_fd = os.pipe()
    try:
        intermediate = os.fork()
    except OSError as error:
        os.close(read_fd)
        os.close(write_fd)
        return error
    if intermediate == 0:
        os.close(read_fd)
        parent = os.getpid()
        _fork_and_exit(write_fd)
        os.close(write_fd)
        while os.getppid() == parent:  # until the intermediate process has ended
            time.sleep(_ORPHANED_POLL_S)
        die_with_parent(supervisor)
        return 0
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    # The supervisor becomes the fork's parent once the intermediate process has ended.
    os.waitpid(intermediate, 0)
    return (
        int(text) if text.isdecimal() else OSError(text or "the intermediate process ended before it forked")
    )


def _fork_and_exit(write_fd: int) -> None:
    """Forks again. Returns only in the new process, and ends the calling (intermediate) process."""
    try:
        pid = os.fork()
    except OSError as error:
        _exit_with_result(write_fd, str(error))
    if pid:
        _exit_with_result(write_fd, str(pid))


def _exit_with_result(write_fd: int, text: str) -> NoReturn:
    """Passes `text` to the first process, and ends the intermediate process."""
    try:
        os.write(write_fd, text.encode())
    finally:  # exit even if the write fails because the first process has ended
        os._exit(0)


def _take_over(request: ForkRequest, output_fd: int, channel_fd: int) -> None:
    """Turns this fork into the process that `request` describes, in a new session."""
    os.setsid()
    os.close(int(os.environ[names.ENV_RANK_CHANNEL_FD]))  # this channel belongs to the first process
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
