"""The socket pair between a supervisor and each process it starts: JSON lines both ways.

The rank sends its phase, its step times and its failure. The supervisor sends the seconds since all pods of
the group were last known to run. If one end does not read for a while, the other end drops whole lines. The
next line has the newest state. Only a closed channel ends a process: a rank ends when its supervisor is gone.
Stdlib and the contract only; processes with and without torch use this module.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from heteroinfer_contract import codec, names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_report import MAX_TRANSPORTS, RankPhase
from vllm_heteroinfer.pod.lost_peer import Lost

BEAT_INTERVAL_S = 0.2
"""Time between two messages from the same end."""
FAILURE_TIMEOUT_S = 20.0
"""Longest wait until the supervisor reads a rank's last message. On a busy node, peers allow a supervisor
16.5 s of silence with the default heartbeat limit (launch/loop_clock.py)."""
_SEND_POLL_S = 0.02
_JOIN_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 64 * 1024
"""Longest line of the channel. A Failure has at most 4096 bytes; a report is shorter."""


def no_channel_error(variables: str, error: Exception) -> ContractError:
    """Returns the error for a process that no supervisor started.

    Args:
        variables: the environment variables that the process found, for the message.
    """
    return ContractError(
        f"{variables}: must name an open socket of a supervisor ({error}, so no supervisor started this "
        "process). Start the pod with `heteroinfer-worker`, which starts the ranks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The state of a rank; fields and units are those of RankStatus.

    Attributes:
        busy: name of the current work (`step 12`); None while the rank waits for work.
        waiting_for_rank: global rank whose message this rank waits for; None while this rank computes.
        waiting_for_engine: whether the rank waits for the engine's next call.
        drained: set by vLLM's API server only: the last request has ended after a request to drain.
    """

    phase: RankPhase = RankPhase.STARTING
    loaded_bytes: int = 0
    total_bytes: int = 0
    steps: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    kv_blocks: int = 0
    kv_room_blocks: int = 0
    kv_room_bytes: int = 0
    locked_memory_bytes: int | None = None
    locked_memory_limit_bytes: int | None = None
    transports: tuple[str, ...] = ()
    gpu_experts_from: int | None = None
    busy: str | None = None
    waiting_for_rank: int | None = None
    waiting_for_engine: bool = False
    drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """The end of the engine's process, as its parent, vLLM's API server, observed it.

    Attributes:
        exit_code: as in `subprocess`; None if unknown.
    """

    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """One line from a rank: its report, or the failure that ends the rank.

    Attributes:
        lost: the other process that the rank has lost, if the failure is only a consequence.
        engine_end: sent by vLLM's API server only, which ends with its engine.
    """

    report: RankReport | None = None
    failure: Failure | None = None
    lost: Lost | None = None
    engine_end: EngineEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorMessage:
    """One line to a rank.

    Attributes:
        group_age_s: seconds since the last heartbeat of the supervisor that has been silent longest.
        drain: whether to refuse new requests and let the running requests end.
    """

    group_age_s: float
    drain: bool = False


def _end_process() -> None:
    """Ends this process because its supervisor is gone; the kernel does so too (PR_SET_PDEATHSIG)."""
    sys.stderr.write("the supervisor is gone: this process ends now\n")
    sys.stderr.flush()
    os._exit(names.EXIT_RANK_FAILED)


class LineSender:
    """Sends whole lines over a non-blocking socket; drops a line that does not fit."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._unsent = b""

    def send(self, line: str) -> bool:
        """Sends a line; returns whether the kernel took at least a part.

        A later call first sends the rest of a line that the kernel took in part.

        Raises:
            OSError: the other end is gone.
        """
        if not self.flush():  # the kernel has no space even for the rest of an earlier line
            return False
        whole_line = f"{line}\n".encode()
        self._unsent = whole_line
        self.flush()
        kernel_took_nothing = len(self._unsent) == len(whole_line)
        if kernel_took_nothing:
            self._unsent = b""
        return not kernel_took_nothing

    def flush(self) -> bool:
        """Sends the rest of an unfinished line; returns whether nothing is left to send.

        Raises:
            OSError: the other end is gone.
        """
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]
        return True


class RankReporter:
    """The rank's end. A thread sends the report 5 times a second; every method is thread-safe.

    Args:
        on_supervisor_lost: called on any thread once the supervisor is gone or sends a message of another
            version.

    Attributes:
        rank: global rank of this process; None in vLLM's API server.
    """

    def __init__(
        self, channel: socket.socket, rank: int | None, on_supervisor_lost: Callable[[], None]
    ) -> None:
        self.rank = rank
        self._socket = channel
        self._socket.setblocking(False)
        self._sender = LineSender(channel)
        self._on_supervisor_lost = on_supervisor_lost
        self._state_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._report = RankReport()
        self._group_age_s = 0.0
        self._group_age_at_s = time.monotonic()
        self._drain = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heteroinfer-channel", daemon=True)
        self._thread.start()

    @classmethod
    def from_env(
        cls, env: Mapping[str, str], on_supervisor_lost: Callable[[], None] = _end_process
    ) -> "RankReporter":
        """Creates the reporter of this process, which owns the descriptor in the environment.

        Args:
            on_supervisor_lost: as in the class; ends this process by default.

        Raises:
            ContractError: no supervisor started this process.
        """
        text = env.get(names.ENV_RANK_CHANNEL_FD, "")
        rank = env.get(names.ENV_RANK, "")
        try:
            fd = int(text)
            global_rank = int(rank) if rank else None
            os.set_inheritable(fd, False)
            channel = socket.socket(fileno=fd)
        except (ValueError, OSError) as error:
            variables = f"{names.ENV_RANK_CHANNEL_FD}={text!r} and {names.ENV_RANK}={rank!r}"
            raise no_channel_error(variables, error) from error
        return cls(channel, global_rank, on_supervisor_lost)

    def set_phase(self, phase: RankPhase, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        """Sets the phase of this rank, with the bytes of weights that are loaded and the total."""
        with self._state_lock:
            self._report = replace(
                self._report, phase=phase, loaded_bytes=loaded_bytes, total_bytes=total_bytes
            )

    def is_starting(self) -> bool:
        """Reports whether this rank is still starting."""
        with self._state_lock:
            return self._report.phase not in {RankPhase.READY, RankPhase.SLEEPING}

    def set_step_times(
        self, steps: int, step_s: float, compute_s: float, wait_s: float, transfer_s: float
    ) -> None:
        """Sets the number of steps since warm-up, and the moving averages of a step's times, in seconds."""
        with self._state_lock:
            self._report = replace(
                self._report,
                steps=steps,
                step_s=step_s,
                compute_s=compute_s,
                wait_s=wait_s,
                transfer_s=transfer_s,
            )

    def set_kv_cache(self, *, blocks: int, headroom_blocks: int, headroom_bytes: int) -> None:
        """Sets the number of KV blocks on this rank, and how many the rank's memory could hold."""
        with self._state_lock:
            self._report = replace(
                self._report, kv_blocks=blocks, kv_room_blocks=headroom_blocks, kv_room_bytes=headroom_bytes
            )

    def set_locked_memory(self, locked_bytes: int, limit_bytes: int | None) -> None:
        """Sets the memory that this rank has locked, and the most that it may lock; None without a limit."""
        with self._state_lock:
            self._report = replace(
                self._report, locked_memory_bytes=locked_bytes, locked_memory_limit_bytes=limit_bytes
            )

    def add_transport(self, transport: str) -> None:
        """Adds a transport of this rank's tensors, such as `ranks:nccl_p2p`."""
        with self._state_lock:
            transports = sorted({*self._report.transports, transport})[:MAX_TRANSPORTS]
            self._report = replace(self._report, transports=tuple(transports))

    def set_gpu_experts_from(self, rows: int) -> None:
        """Sets the fewest rows of which the GPU computes some experts; 0 if CPUs compute all experts."""
        with self._state_lock:
            self._report = replace(self._report, gpu_experts_from=rows)

    def set_work(self, work: str | None, *, waiting_for_rank: int | None = None) -> None:
        """Sets the current work of this rank; None once the work is done.

        If `work` stays the same past the step deadline, the group ends. A rank that waits for another rank is
        not the culprit as long as the other rank is stuck too.

        Args:
            work: a name that differs from the previous one, for example `step 12`.
            waiting_for_rank: global rank whose message this rank waits for; None if it waits for no rank.
        """
        with self._state_lock:
            self._report = replace(
                self._report, busy=work, waiting_for_rank=waiting_for_rank, waiting_for_engine=False
            )

    def set_awaited_rank(self, rank: int | None) -> None:
        """Sets the global rank whose message a starting rank waits for; None once the message has come."""
        with self._state_lock:
            self._report = replace(self._report, waiting_for_rank=rank)

    def report_engine_wait(self) -> None:
        """Reports that this rank waits for the engine's next call; the next `set_work` ends the wait."""
        with self._state_lock:
            self._report = replace(self._report, busy=None, waiting_for_rank=None, waiting_for_engine=True)

    def asked_to_drain(self) -> bool:
        """Reports whether this process must refuse new requests."""
        with self._state_lock:
            return self._drain

    def report_drained(self) -> None:
        """Reports that the last request has ended."""
        with self._state_lock:
            self._report = replace(self._report, drained=True)

    def send_failure(self, failure: Failure, lost: Lost | None = None) -> None:
        """Sends the failure that ends this rank. Call it once, just before exiting.

        Returns once the supervisor has the failure, or after FAILURE_TIMEOUT_S. The supervisor adds pod, exit
        code, last log line and time.

        Args:
            lost: the other process that this rank has lost, if the failure is only a consequence.
        """
        # The supervisor would refuse a line longer than MAX_LINE_BYTES as one from another program.
        self._send_last(RankMessage(failure=failure.cut(), lost=lost))

    def report_engine_end(self, exit_code: int | None) -> None:
        """Reports that the engine has ended, so vLLM's API server ends, too.

        Returns once the supervisor has the report, or after FAILURE_TIMEOUT_S.
        """
        self._send_last(RankMessage(engine_end=EngineEnd(exit_code=exit_code)))

    def heartbeat_age_s(self) -> float:
        """Returns the seconds since all supervisors of the group were last heard.

        The age grows if a peer's supervisor or this rank's own supervisor becomes silent.
        """
        with self._state_lock:
            return self._group_age_s + (time.monotonic() - self._group_age_at_s)

    def close(self) -> None:
        """Ends the thread and closes the channel; the supervisor watches the process, not the channel."""
        self._closed.set()
        if threading.current_thread() is not self._thread:  # a thread cannot wait for itself
            self._thread.join(BEAT_INTERVAL_S + _JOIN_TIMEOUT_S)
        self._socket.close()

    def _run(self) -> None:
        """Sends reports and reads messages until `close`; an error here ends the process."""
        lines = LineBuffer()
        try:
            while not self._closed.is_set():
                with self._state_lock:
                    report = self._report
                with self._send_lock:
                    self._sender.send(codec.to_json(RankMessage(report=report)))
                next_beat = time.monotonic() + BEAT_INTERVAL_S
                while not self._closed.is_set() and (left_s := next_beat - time.monotonic()) > 0:
                    if select.select([self._socket], [], [], left_s)[0]:
                        self._listen(lines)
        except Exception as error:
            # Without this handler, the thread would end silently, and the process would go on without a
            # channel.
            if not self._closed.is_set():
                if not isinstance(error, ConnectionError):
                    traceback.print_exception(error)
                self._closed.set()
                self._on_supervisor_lost()

    def _listen(self, lines: "LineBuffer") -> None:
        """Reads messages of the supervisor; raises ConnectionError once the supervisor is gone."""
        chunk = self._socket.recv(4096)
        if not chunk:
            raise ConnectionResetError("the supervisor has closed the channel")
        for line in lines.feed(chunk):
            message = codec.from_json(SupervisorMessage, line)
            with self._state_lock:
                self._group_age_s, self._group_age_at_s = message.group_age_s, time.monotonic()
                self._drain = self._drain or message.drain

    def _send_last(self, message: RankMessage) -> None:
        """Sends the last message of this process; waits until the kernel has taken the whole message.

        Gives up after FAILURE_TIMEOUT_S.
        """
        line, kernel_took_part = codec.to_json(message), False
        deadline_s = time.monotonic() + FAILURE_TIMEOUT_S
        with contextlib.suppress(OSError):  # the supervisor is gone: no process is left to report to
            while not self._closed.is_set() and time.monotonic() < deadline_s:
                with self._send_lock:
                    kernel_took_part = kernel_took_part or self._sender.send(line)
                    if kernel_took_part and self._sender.flush():
                        return
                time.sleep(_SEND_POLL_S)


class SupervisorEnd:
    """The supervisor's end of a channel. Never blocks; read it when fileno() is readable."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._socket.setblocking(False)
        self.closed = False

    def fileno(self) -> int:
        """Returns the descriptor to watch."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes this end."""
        self.closed = True
        self._socket.close()

    def _receive(self, max_bytes: int) -> Iterator[bytes]:
        """Yields the bytes since the last call; sets `closed` once the other end is closed."""
        while not self.closed:
            try:
                received = self._socket.recv(max_bytes)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            self.closed = not received
            if received:
                yield received


class RankChannel(SupervisorEnd):
    """The supervisor's end of a rank's channel."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self._sender = LineSender(channel)
        self._lines = LineBuffer()

    @classmethod
    def open_pair(cls) -> tuple["RankChannel", socket.socket]:
        """Creates the supervisor's end, and the end to pass to the child and close here."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def read(self) -> list[RankMessage]:
        """Returns the rank's messages since the last call; sets `closed` once the rank's end is closed.

        Raises:
            ContractError: a message is of another version.
        """
        return [
            codec.from_json(RankMessage, line)
            for chunk in self._receive(65536)
            for line in self._lines.feed(chunk)
        ]

    def send(self, message: SupervisorMessage) -> None:
        """Sends the state of the group to the rank.

        A rank that does not read (it is stopped, or its interpreter is blocked) misses the message. Its
        heartbeat age then grows, as intended.
        """
        with contextlib.suppress(OSError):
            self._sender.send(codec.to_json(message))


class LineBuffer:
    """Cuts a stream of bytes into lines. A line that is not complete may have at most MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._incomplete_line = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the lines that `chunk` completes.

        Raises:
            ContractError: the unfinished last line is longer than MAX_LINE_BYTES.
        """
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        if len(self._incomplete_line) > MAX_LINE_BYTES:
            raise ContractError(
                f"a message must have at most {MAX_LINE_BYTES} bytes (got a longer line). Check whether "
                "another program uses this port or descriptor"
            )
        return [line.decode(errors="replace") for line in lines]
