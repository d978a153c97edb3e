"""The socket pair between a supervisor and each process it starts: JSON lines both ways.

The rank tells its phase, its step times and its failure; the supervisor tells how old
its news of the group is. Either end may stand still for any time: the other end drops whole lines
meanwhile, and its next line holds the newest state. Only the end of the channel ends anything: a process
whose supervisor is gone ends. Stdlib and the contract only; the rank's end is used beside torch.
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
from heteroinfer_contract.group_report import RankPhase
from vllm_heteroinfer.pod.lost_peer import Lost

BEAT_INTERVAL_S = 0.2
"""Time between two words of either end."""
FAILURE_TIMEOUT_S = 20.0
"""For a supervisor to take a rank's last words: one that gets no CPU may stand still for 16.5 s
(launch/loop_clock.py)."""
_SEND_POLL_S = 0.02
_JOIN_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 64 * 1024
"""Longest line of the channel; a Failure fits 4096 bytes, a report is shorter."""


def no_channel(got: str, error: Exception) -> ContractError:
    """Returns the error of a process that no supervisor has started, of the variables that it got."""
    return ContractError(
        f"got {got}, expected the open channel of a supervisor ({error}); ranks are started by "
        "`heteroinfer-worker`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank says of itself; the fields are those of RankStatus, in its units.

    Attributes:
        busy: what it is doing now (`step 12`), None while it waits for work.
        waiting_for_rank: the rank it needs something from to go on, None while it
            computes itself.
        waiting_for_engine: whether it waits for the engine's next call.
        drained: of the API server: asked to drain, and the last request has ended.
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
    busy: str | None = None
    waiting_for_rank: int | None = None
    waiting_for_engine: bool = False
    drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """The engine's process has ended, as the API server, its parent, saw it.

    Attributes:
        exit_code: as subprocess has it; None if it is not known.
    """

    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """One line from a rank: its report, or the failure that ends it.

    Attributes:
        lost: if the failure is a consequence: which other process the rank has lost.
        engine_end: of the API server, which ends with its engine.
    """

    report: RankReport | None = None
    failure: Failure | None = None
    lost: Lost | None = None
    engine_end: EngineEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorMessage:
    """One line to a rank.

    Attributes:
        group_age_s: age of the oldest news of a peer's supervisor, in seconds.
        drain: the group is asked to stop: take no more requests, and let the running ones end.
    """

    group_age_s: float
    drain: bool = False


def _end_process() -> None:
    """Ends this process, whose supervisor is gone; the kernel does so too (PR_SET_PDEATHSIG)."""
    sys.stderr.write("the supervisor is gone, and this process ends with it\n")
    sys.stderr.flush()
    os._exit(names.EXIT_RANK_FAILED)


class LineSender:
    """Sends whole lines over a non-blocking socket; drops a line that does not fit."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._rest = b""

    def send(self, line: str) -> bool:
        """Returns whether the kernel took the line; a line of which it took a part is finished first later.

        Raises:
            OSError: the other end is gone.
        """
        if not self.flush():
            return False
        whole = f"{line}\n".encode()
        self._rest = whole
        if not self.flush() and len(self._rest) == len(whole):
            self._rest = b""
            return False
        return True

    def flush(self) -> bool:
        """Returns whether no part of a line is left to send.

        Raises:
            OSError: the other end is gone.
        """
        while self._rest:
            try:
                sent = self._socket.send(self._rest)
            except BlockingIOError:
                return False
            self._rest = self._rest[sent:]
        return True


class RankReporter:
    """The rank's end. A thread speaks and listens 5 times a second; every method is thread-safe.

    Args:
        rank: as below.
        gone: called once the supervisor is gone, or speaks another version, on any thread.

    Attributes:
        rank: the global rank this process is, or None in the API server.
    """

    def __init__(self, channel: socket.socket, rank: int | None, gone: Callable[[], None]) -> None:
        self.rank = rank
        self._socket = channel
        self._socket.setblocking(False)
        self._sender = LineSender(channel)
        self._gone = gone
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
    def from_env(cls, env: Mapping[str, str], gone: Callable[[], None] = _end_process) -> "RankReporter":
        """Returns the reporter of this process; it takes over the descriptor in the environment.

        Args:
            gone: as in the class; by default this process ends.

        Raises:
            ContractError: this process was not started by a supervisor.
        """
        text = env.get(names.ENV_RANK_CHANNEL_FD, "")
        rank = env.get(names.ENV_RANK, "")
        try:
            fd = int(text)
            number = int(rank) if rank else None
            os.set_inheritable(fd, False)
            channel = socket.socket(fileno=fd)
        except (ValueError, OSError) as error:
            got = f"{names.ENV_RANK_CHANNEL_FD}={text!r} and {names.ENV_RANK}={rank!r}"
            raise no_channel(got, error) from error
        return cls(channel, number, gone)

    def phase(self, phase: RankPhase, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        """Sets how far this rank has come, with weights read and to read, in bytes."""
        with self._state_lock:
            self._report = replace(
                self._report, phase=phase, loaded_bytes=loaded_bytes, total_bytes=total_bytes
            )

    def starting(self) -> bool:
        """Returns whether this rank has not been ready yet."""
        with self._state_lock:
            return self._report.phase not in {RankPhase.READY, RankPhase.SLEEPING}

    def step(self, steps: int, step_s: float, compute_s: float, wait_s: float, transfer_s: float) -> None:
        """Sets the number of steps since warm-up and a step's moving averages, in seconds."""
        with self._state_lock:
            self._report = replace(
                self._report,
                steps=steps,
                step_s=step_s,
                compute_s=compute_s,
                wait_s=wait_s,
                transfer_s=transfer_s,
            )

    def kv_cache(self, *, blocks: int, headroom_blocks: int, headroom_bytes: int) -> None:
        """Sets the KV blocks that this rank has, and the headroom that it measured for them."""
        with self._state_lock:
            self._report = replace(
                self._report, kv_blocks=blocks, kv_room_blocks=headroom_blocks, kv_room_bytes=headroom_bytes
            )

    def busy(self, what: str | None, *, waiting_for_rank: int | None = None) -> None:
        """Says what this rank is doing now; None when it has finished.

        A rank whose `what` stays the same past the step deadline ends the group; one
        that says whom it waits for is not blamed as long as the other is stuck too.

        Args:
            what: unlike the last one, as `step 12`.
            waiting_for_rank: the global rank whose message it waits for, if it does.
        """
        with self._state_lock:
            self._report = replace(
                self._report, busy=what, waiting_for_rank=waiting_for_rank, waiting_for_engine=False
            )

    def waits_for(self, rank: int | None) -> None:
        """Says for which global rank's word this rank waits before it is ready; None when it has come."""
        with self._state_lock:
            self._report = replace(self._report, waiting_for_rank=rank)

    def waits_for_engine(self) -> None:
        """Reports that this rank waits for the engine's next call, until it is busy."""
        with self._state_lock:
            self._report = replace(self._report, busy=None, waiting_for_rank=None, waiting_for_engine=True)

    def asked_to_drain(self) -> bool:
        """Returns whether this process shall take no more requests."""
        with self._state_lock:
            return self._drain

    def drained(self) -> None:
        """Says that the last request has ended."""
        with self._state_lock:
            self._report = replace(self._report, drained=True)

    def failure(self, failure: Failure, lost: Lost | None = None) -> None:
        """Sends why this rank ends, before it returns; call it once, just before exiting.

        The supervisor fills in pod, exit code, last log line and time. A supervisor that stands still
        is waited for, for FAILURE_TIMEOUT_S at most.

        Args:
            lost: which other process this rank has lost, if the failure is only a consequence.
        """
        # Cut here: a longer line than MAX_LINE_BYTES would be taken for another program's.
        self._send_last(RankMessage(failure=failure.cut(), lost=lost))

    def engine_ended(self, exit_code: int | None) -> None:
        """Sends that the engine has ended, with which this API server ends; as `failure`."""
        self._send_last(RankMessage(engine_end=EngineEnd(exit_code=exit_code)))

    def heartbeat_age_s(self) -> float:
        """Returns how long ago the group was last known to be whole, in seconds.

        It grows when a peer's supervisor turns silent, and when this rank's own does.
        """
        with self._state_lock:
            return self._group_age_s + (time.monotonic() - self._group_age_at_s)

    def close(self) -> None:
        """Ends the thread and closes the channel; the supervisor goes by the process, not by this."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(BEAT_INTERVAL_S + _JOIN_TIMEOUT_S)
        self._socket.close()

    def _run(self) -> None:
        """Speaks and listens until `close`; what ends this thread otherwise ends the process."""
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
            # The one boundary of this thread: without it the process would be deaf and mute.
            if not self._closed.is_set():
                if not isinstance(error, ConnectionError):
                    traceback.print_exception(error)
                self._closed.set()
                self._gone()

    def _listen(self, lines: "LineBuffer") -> None:
        """Takes in what the supervisor has said; raises ConnectionError once it is gone."""
        chunk = self._socket.recv(4096)
        if not chunk:
            raise ConnectionResetError("the supervisor has closed the channel")
        for line in lines.feed(chunk):
            message = codec.from_json(SupervisorMessage, line)
            with self._state_lock:
                self._group_age_s, self._group_age_at_s = message.group_age_s, time.monotonic()
                self._drain = self._drain or message.drain

    def _send_last(self, message: RankMessage) -> None:
        line, taken = codec.to_json(message), False
        deadline_s = time.monotonic() + FAILURE_TIMEOUT_S
        with contextlib.suppress(OSError):  # the supervisor is gone: nobody is left to tell
            while not self._closed.is_set() and time.monotonic() < deadline_s:
                with self._send_lock:
                    taken = taken or self._sender.send(line)
                    if taken and self._sender.flush():
                        return
                time.sleep(_SEND_POLL_S)


class SupervisorEnd:
    """The supervisor's end of a channel: never blocks; read when fileno() is readable."""

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

    def _receive(self, most_bytes: int) -> Iterator[bytes]:
        """Yields what has come since the last call; sets `closed` at the other's end."""
        while not self.closed:
            try:
                received = self._socket.recv(most_bytes)
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
        """Returns the supervisor's end, and the end to pass to the child and close here."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def read(self) -> list[RankMessage]:
        """Returns what the rank has said since the last call; sets `closed` at its end.

        Raises:
            ContractError: the rank speaks another version of the channel.
        """
        return [
            codec.from_json(RankMessage, line)
            for chunk in self._receive(65536)
            for line in self._lines.feed(chunk)
        ]

    def send(self, message: SupervisorMessage) -> None:
        """Tells the rank how the group is.

        A rank that doesn't read (stopped, or its interpreter is held) misses it: its
        age grows, as it should.
        """
        with contextlib.suppress(OSError):
            self._sender.send(codec.to_json(message))


class LineBuffer:
    """Cuts a stream of bytes into lines of at most MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the lines that `chunk` completes.

        Raises:
            ContractError: a line is longer than any of ours.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ContractError(
                f"got a line of more than {MAX_LINE_BYTES} bytes, expected a message of heteroinfer; "
                "does another program use this port or descriptor?"
            )
        return [line.decode(errors="replace") for line in lines]
