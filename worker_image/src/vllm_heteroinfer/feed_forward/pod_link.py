"""Connects an asking rank with a feed-forward rank of another pod, and measures the connection.

The feed-forward rank listens at a free port and publishes it in the group's store. Both ends prove that they
have the key of the epoch, as supervisors do (launch/handshake.py). Afterwards each message carries a token
that only the two ends know. Imports neither torch nor vLLM.

Each code is computed with the epoch's key from the values that were sent before. Trial messages measure the
connection.

    asking rank -> feed-forward rank   its rank, its nonce, code
    feed-forward rank -> asking rank   its nonce, code
    asking rank -> feed-forward rank   code, then trial messages, then asks
"""

import contextlib
import ctypes
import os
import queue
import secrets
import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey, GroupKey
from heteroinfer_contract.plan import RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.pod import addresses
from vllm_heteroinfer.pod.threads import start_thread

PROTOCOL: Final = 1
"""Version of the messages in kernels/source/feed_forward_link.cpp."""
PROOF_S: Final = 3.0
"""Time for a client to prove that it is the asking rank. No client occupies a thread longer."""
TRIAL_S: Final = 60.0
"""Time for one trial message, so that 1 MiB passes at 0.3 Mbit/s."""
TRIALS, LARGE_TRIALS, LARGE_BYTES = 9, 3, 1 << 20
"""Number of trials with one row, number of trials with many rows, and in a trial with many rows the bytes of
ask and answer together."""
_NAP_S: Final = 0.01
"""Longest wait of the listener for a new client, before it checks again for proven connections."""
_SHORTEST_WAIT_S: Final = 0.001
"""Shortest timeout of a socket. A timeout of 0 would make the socket non-blocking."""
_MAX_PROOFS: Final = 64
"""Number of clients that may prove themselves at the same time. The listener refuses further clients."""
_LINE_BYTES: Final = 1024
_RETRANSMITS_AT, _UNACKED_AT, _INFO_BYTES = 2, 24, 104
"""Offsets in `struct tcp_info` (linux/tcp.h), and the number of bytes to read of it."""
_SLOW: Final = "the network is slow, or the rank has stopped"
_UNANSWERED: Final = 2
"""The other machine counts as silent after Linux has sent a packet again this many times. A single time is no
proof, because one packet may be lost."""


class Link(ctypes.Structure):
    """The same fields as `HeteroinferLink` in kernels/source/feed_forward_link.cpp."""

    _fields_ = (
        ("socket", ctypes.c_int32),
        ("lane", ctypes.c_uint32),
        ("token", ctypes.c_uint64),
        ("sent", ctypes.c_uint64),
        ("to_send", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("to_receive", ctypes.c_uint64),
        ("network_ns", ctypes.c_uint64),
        ("asks", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("is_open", ctypes.c_uint32),
        ("messages", ctypes.c_char * 80),
    )


END_OF_FILE, MALFORMED = -1, -2
"""Values of `Link.error` besides errno."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The time that a connection adds to an ask, as measured when the rank starts.

    Attributes:
        round_trip_s: seconds for an ask of one row and its answer, without computation.
        bytes_per_s: rate of large messages, both directions together.
    """

    round_trip_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _AskerProof:
    """First line of the asking rank. `code` proves the key; "" without a key."""

    protocol: int
    rank: int
    nonce: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswererProof:
    """The feed-forward rank's answer to the first line. `code` proves the key; "" without a key."""

    nonce: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """First line of a trial.

    Attributes:
        ask: number of bytes that follow the line; 0 ends the trials.
        answer: number of bytes of the answer.
    """

    ask: int
    answer: int


def epoch_key(launch: PodLaunch) -> EpochKey | None:
    """Returns the key of this epoch; None if the operator gave the group no key."""
    key = GroupKey.from_env(os.environ)
    return None if key is None else key.of_epoch(launch.epoch)


class Connection:
    """One end of a connection whose ends have proven their key to each other.

    Attributes:
        token: number that each message carries.
    """

    def __init__(self, connected: socket.socket, token: int) -> None:
        self.socket, self.token = connected, token

    def link(self, lane: int) -> Link:
        """Returns the connection's state for the C++ code. The connection must outlive the result."""
        self.socket.setblocking(False)
        return Link(socket=self.socket.fileno(), lane=lane, token=self.token)

    def measure(self, ask_bytes: int, answer_bytes: int, rows: int) -> LinkCost:
        """Measures the connection with messages as large as asks. The other end must run `answer_trials`.

        Args:
            ask_bytes: size of an ask of one row.
            answer_bytes: size of the answer to one row.
            rows: maximum number of rows of an ask.

        Raises:
            OSError: the connection ended, or a message took longer than TRIAL_S.
        """
        self.socket.settimeout(TRIAL_S)
        small_s = statistics.median(self._trial(ask_bytes, answer_bytes) for _ in range(TRIALS))
        num_rows = max(1, min(rows, LARGE_BYTES // (ask_bytes + answer_bytes)))
        large_s = min(self._trial(num_rows * ask_bytes, num_rows * answer_bytes) for _ in range(LARGE_TRIALS))
        _send_line(self.socket, codec.to_json(_Trial(ask=0, answer=0)))  # ends the trials
        num_bytes = num_rows * (ask_bytes + answer_bytes)
        # By chance, a small trial may take nearly as long as a large trial. At least a tenth of the time of a
        # large trial counts as transfer, so that the rate stays plausible.
        transfer_s = max(large_s - small_s, large_s / 10)
        return LinkCost(round_trip_s=small_s, bytes_per_s=num_bytes / transfer_s)

    def _trial(self, ask_bytes: int, answer_bytes: int) -> float:
        """Sends a trial message, and returns the seconds until its answer has arrived."""
        payload = bytes(ask_bytes)
        start = time.perf_counter()
        line = codec.to_json(_Trial(ask=ask_bytes, answer=answer_bytes)).encode() + b"\n"
        self.socket.sendall(line + payload)
        _read_and_discard(self.socket, answer_bytes)
        return time.perf_counter() - start

    def answer_trials(self) -> None:
        """Answers the trial messages of the asking rank; raises OSError if the connection ends."""
        while True:
            trial = codec.from_json(_Trial, _read_line(self.socket, Deadline.after(TRIAL_S)))
            self.socket.settimeout(TRIAL_S)
            if not trial.ask:
                return
            codec.at_least(0, "trial", ask=trial.ask, answer=trial.answer)
            # `measure` sends no larger messages, so a larger number is an error of the other end.
            codec.at_most(LARGE_BYTES * 2, "trial", ask=trial.ask, answer=trial.answer)
            _read_and_discard(self.socket, trial.ask)
            self.socket.sendall(bytes(trial.answer))


class Listener:
    """Waits for the asking rank, in a feed-forward rank of another pod."""

    def __init__(self, address: str) -> None:
        """Listens at a free port of the address; raises OSError if no port is free."""
        self._socket = socket.socket(addresses.family_of(address), socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen()
        self._socket.settimeout(_NAP_S)  # between two clients, `accept` checks for proven connections

    @property
    def port(self) -> int:
        """Port that the asking rank connects to."""
        return int(self._socket.getsockname()[1])

    def accept(self, launch: PodLaunch, asking: int, deadline: Deadline) -> Connection:
        """Waits until the asking rank has connected and proven itself. Then closes the listener.

        Each client proves itself in its own thread, so a slow stranger does not keep the asking rank out.

        Raises:
            TimeoutError: the asking rank did not connect by the deadline.
        """
        results: queue.SimpleQueue[Connection | BaseException] = queue.SimpleQueue()
        proving = threading.Semaphore(_MAX_PROOFS)

        def prove(connected: socket.socket) -> None:
            """Puts a proven connection into `results`. Closes the connection of any other client."""
            try:
                results.put(_prove_to_client(connected, launch, asking))
            except (OSError, ContractError):  # a stranger, or a client that left
                connected.close()
            finally:
                proving.release()

        with self._socket:
            while deadline.left_s:
                with contextlib.suppress(queue.Empty):  # no client has proven itself yet
                    result = results.get_nowait()
                    if isinstance(result, BaseException):  # a thread ended with an unexpected error
                        raise result
                    return result
                with contextlib.suppress(TimeoutError):  # no client connected within _NAP_S
                    connected = self._socket.accept()[0]
                    if proving.acquire(blocking=False):
                        start_thread(partial(prove, connected), name="heteroinfer-proof", failed=results.put)
                    else:  # too many clients at the same time
                        connected.close()
            raise TimeoutError(
                f"rank {asking} did not connect within {deadline.total_s:.0f} s. Read the log of rank "
                f"{asking}"
            )


def _prove_to_client(connected: socket.socket, launch: PodLaunch, asking: int) -> Connection:
    """Proves the two ends of an accepted connection to each other. Returns the connection.

    Raises:
        OSError: the client left.
        ContractError: the client is not the asking rank of this epoch.
    """
    _set_options(connected, launch)
    deadline = Deadline.after(PROOF_S)
    opening = codec.from_json(_AskerProof, _read_line(connected, deadline))
    if (opening.protocol, opening.rank) != (PROTOCOL, asking):
        raise ContractError(
            f"client: must be rank {asking} with protocol {PROTOCOL} (got rank {opening.rank}, protocol "
            f"{opening.protocol})"
        )
    key, parts = epoch_key(launch), (str(opening.rank), opening.nonce)
    if key is not None and not key.verifies(opening.code, "feed-forward open", *parts):
        raise ContractError("client: must have the key of this epoch")
    nonce = secrets.token_hex(16)
    _send_line(
        connected, codec.to_json(_AnswererProof(nonce=nonce, code=_prove(key, "reply", *parts, nonce)))
    )
    confirmed = _read_line(connected, deadline)
    if key is not None and not key.verifies(confirmed, "feed-forward confirm", *parts, nonce):
        raise ContractError("client: must confirm this connection (sent a line of another connection)")
    return Connection(connected, _derive_token(key, *parts, nonce))


def connect(host: str, port: int, launch: PodLaunch, asking: int, peer: RankAssignment) -> Connection:
    """Connects the asking rank to a feed-forward rank, and proves the two to each other.

    Raises:
        OSError: the rank cannot be reached, or did not answer.
        ContractError: another process answered.
    """
    connected = socket.create_connection((host, port), timeout=PROOF_S)
    try:
        _set_options(connected, launch)
        key, nonce = epoch_key(launch), secrets.token_hex(16)
        parts = (str(asking), nonce)
        opening = _AskerProof(protocol=PROTOCOL, rank=asking, nonce=nonce, code=_prove(key, "open", *parts))
        _send_line(connected, codec.to_json(opening))
        proof = codec.from_json(_AnswererProof, _read_line(connected, Deadline.after(PROOF_S)))
        if key is not None and not key.verifies(proof.code, "feed-forward reply", *parts, proof.nonce):
            raise ContractError(
                f"{host} port {port}: the process that listens there does not have the key of this epoch, so "
                f"it is not feed-forward rank {peer.rank} (another pod or program uses this address). Check "
                "which pod has this address (kubectl get pods -A -o wide)"
            )
        _send_line(connected, _prove(key, "confirm", *parts, proof.nonce))
        return Connection(connected, _derive_token(key, *parts, proof.nonce))
    except BaseException:
        connected.close()
        raise


def _prove(key: EpochKey | None, purpose: str, *parts: str) -> str:
    """Returns the code that proves the key for a step of the hand-shake; "" without a key."""
    return "" if key is None else key.code(f"feed-forward {purpose}", *parts)


def _derive_token(key: EpochKey | None, *parts: str) -> int:
    """Returns the number that each message of a connection carries.

    Args:
        key: the epoch's key; None for a group without a key.
        *parts: texts that only this connection has; the last text is a nonce in hex.
    """
    text = parts[-1] if key is None else key.session("feed-forward", *parts).code("token")
    return int(text[:16], 16)


def _set_options(connected: socket.socket, launch: PodLaunch) -> None:
    """Makes a socket send immediately, and fail if the other machine is silent for the heartbeat timeout."""
    timeout_ms = int(launch.heartbeat_timeout_s * 1000)
    tcp = socket.IPPROTO_TCP
    # Without TCP_NODELAY, Linux delays small messages to join them.
    connected.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connected.setsockopt(tcp, socket.TCP_USER_TIMEOUT, timeout_ms)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connected.setsockopt(tcp, option, 1)  # seconds between packets on an idle connection


def _send_line(connected: socket.socket, text: str) -> None:
    """Sends a text and a line break."""
    connected.sendall(text.encode() + b"\n")


def _read_line(connected: socket.socket, deadline: Deadline) -> str:
    """Reads a line, and leaves the bytes after the line in the socket. So this function reads byte by byte.

    Raises:
        OSError: the connection ended, the line is too long, or the whole line did not arrive by the deadline.
    """
    line = b""
    while not line.endswith(b"\n"):
        connected.settimeout(max(deadline.left_s, _SHORTEST_WAIT_S))
        if deadline.left_s == 0:
            raise TimeoutError(f"the other end sent no whole line within {deadline.total_s:.0f} s")
        byte = connected.recv(1)
        if not byte:
            raise ConnectionError("the other end closed the connection")
        if len(line) == _LINE_BYTES:
            raise ConnectionError(f"the other end sent a line of more than {_LINE_BYTES} bytes")
        line += byte
    return line[:-1].decode(errors="replace")


def _read_and_discard(connected: socket.socket, num_bytes: int) -> None:
    """Reads `num_bytes` bytes; raises ConnectionError if the connection ends earlier."""
    remaining = num_bytes
    while remaining:
        count = len(connected.recv(min(remaining, LARGE_BYTES)))
        if not count:
            raise ConnectionError("the other end closed the connection")
        remaining -= count


def describe(link: Link) -> str:
    """Describes how far the request to a rank got, for the message about a missing answer."""
    if not link.is_open:  # no ask is open: the answer came after another thread reported it as missing
        return "its answer has arrived by now"
    try:
        duplicate = socket.socket(fileno=os.dup(link.socket))
    except OSError as error:
        return f"its connection is closed ({error})"
    with duplicate:
        info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return _describe_open_link(link, info)


def _describe_open_link(link: Link, info: bytes) -> str:
    """Describes how far an unanswered request got. `info` is the socket's `struct tcp_info`."""
    (unacknowledged_packets,) = struct.unpack_from("=I", info, _UNACKED_AT)
    if link.error:
        return "its connection broke"
    if info[_RETRANSMITS_AT] >= _UNANSWERED:
        return "its machine does not respond"
    if link.sent < link.to_send:
        return f"{_describe_progress(link.sent, link.to_send)} of the request are sent; {_SLOW}"
    if unacknowledged_packets:
        return "its machine has not acknowledged the request; the network is slow"
    if link.received:
        return f"{_describe_progress(link.received, link.to_receive)} of the answer arrived; {_SLOW}"
    return "its machine has received the request"


def _describe_progress(done: int, total: int) -> str:
    """Returns the transferred bytes of a message and the message's size, in words."""
    return f"{format_bytes(done)} of {format_bytes(total)}"
