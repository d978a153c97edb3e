"""A connection between two supervisors, with messages as JSON lines. Stdlib and the contract only."""

import asyncio
import contextlib
import errno
import socket
import time

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey
from vllm_heteroinfer.launch.handshake import Seal, build_opening, check_reply, reply_to
from vllm_heteroinfer.launch.loop_clock import LoopClock, silence_limit_s
from vllm_heteroinfer.launch.supervisor_messages import Message
from vllm_heteroinfer.pod.channel import LineBuffer

UNANSWERED = 2
"""Unacknowledged retransmissions in a row (at least 0.6 s) that mean an unreachable peer."""
_RETRANSMITS = 2
"""Offset of linux/tcp.h::tcp_info.tcpi_retransmits, in bytes."""
NO_ANSWER = "the leader closed the connection without an answer"
FLUSH_TIMEOUT_S = 0.5
"""Longest wait for the last message to leave; a peer that reads nothing for longer is itself lost."""


class SupervisorLink:
    """An established connection. `send` does not wait, and `receive` returns one message after the other.

    Attributes:
        how_it_ended: description of the connection's end, after receive() has returned None or raised.
        network_failed: whether the network ended the connection, and not the peer or its kernel.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float, clock: LoopClock
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._clock = clock
        self._peer_late_s = 0.0
        self._unacknowledged = False
        self.how_it_ended = "closed its connection"
        self.network_failed = False
        self._lines = LineBuffer()
        self._queue: list[str] = []
        self._seal: Seal | None = None
        self._record_heartbeat()
        self.own_host = str((writer.get_extra_info("sockname") or ("",))[0])
        _set_options(writer, timeout_s)

    async def prove_as_leader(self, key: EpochKey) -> None:
        """Proves to the follower that this is its leader, once the follower has proved that it has the key.

        Each later line has an authentication code (`Seal`).

        Raises:
            ContractError: the other end does not have the key. The leader then sends nothing.
        """
        opening = await self._receive_line() or ""  # a closed connection counts as an invalid line
        reply, seal = reply_to(key, opening)
        self._send_line(codec.to_json(reply))
        self._seal = seal

    async def prove_as_follower(self, key: EpochKey, pod: int) -> None:
        """Proves this pod's identity to the leader and checks the leader's proof.

        Each later line has an authentication code (`Seal`).

        Raises:
            ContractError: the other end is not the leader.
            OSError: the other end closed the connection.
        """
        opening = build_opening(key, pod)
        self._send_line(codec.to_json(opening))
        line = await self._receive_line()
        if line is None:
            raise OSError(NO_ANSWER)
        self._seal = check_reply(key, opening, line)

    def send(self, message: Message) -> None:
        """Queues one message. Only receive() reports a lost connection."""
        line = codec.to_json(message)
        self._send_line(line if self._seal is None else self._seal.seal(line))

    def _send_line(self, line: str) -> None:
        """Writes a line, unless the connection is closing."""
        if not self._writer.is_closing():
            self._writer.write(f"{line}\n".encode())

    async def receive(self) -> Message | None:
        """Returns the next message, or None at the end of the connection.

        Raises:
            ContractError: the line does not follow this protocol.
        """
        try:
            line = await self._receive_line()
            if line is None:
                return None
            message = codec.from_json(Message, line if self._seal is None else self._seal.open(line))
        except ContractError as error:
            self.how_it_ended = f"sent an invalid message: {error}"
            raise
        if message.late_s is not None:
            self._peer_late_s = message.late_s
        return message

    async def _receive_line(self) -> str | None:
        """Returns the next line, or None at the end of the connection."""
        while not self._queue:
            try:
                chunk = await self._reader.read(65536)
            except OSError as error:
                self._record_error(error)
                chunk = b""
            if not chunk:
                return None
            self._record_heartbeat()
            self._queue = self._lines.feed(chunk)
        return self._queue.pop(0)

    def _record_heartbeat(self) -> None:
        """Stores the current time as the time of the peer's last message."""
        self._last_heartbeat_at_s = time.monotonic()
        self._last_heartbeat_awake_s = self._clock.awake_s(self._last_heartbeat_at_s)

    def _record_error(self, error: OSError) -> None:
        """Stores how the network ended the connection."""
        self.network_failed = True
        # After these errors, even the kernel of the peer's machine does not answer (TCP_USER_TIMEOUT causes
        # ETIMEDOUT). A kernel answers even if the process is stopped, so the machine or the network is gone.
        self._unacknowledged = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
        how = "is no longer reachable" if self._unacknowledged else "lost its connection"
        self.how_it_ended = f"{how} ({error.strerror or error})"

    def silent_for_s(self) -> float:
        """Returns the time since the last heartbeat or other message, in seconds."""
        return time.monotonic() - self._last_heartbeat_at_s

    def limit_s(self) -> float:
        """Returns the longest allowed silence of the peer, in seconds."""
        return silence_limit_s(
            self._timeout_s,
            acknowledged=self._is_acknowledged(),
            own_late_s=self._clock.late_s(),
            peer_late_s=self._peer_late_s,
        )

    def _is_acknowledged(self) -> bool:
        """Returns whether the kernel of the peer's machine acknowledges data; true if unknown."""
        if self._unacknowledged:
            return False
        connection: socket.socket = self._writer.get_extra_info("socket")
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITS + 1)
        except OSError:
            return True  # the socket is closed
        return info[_RETRANSMITS] < UNANSWERED

    def allowed_silence_left_s(self) -> float:
        """Returns the remaining allowed silence, in seconds in which this process runs."""
        silent_s = self._clock.awake_s(time.monotonic()) - self._last_heartbeat_awake_s
        return self.limit_s() - silent_s

    def describe_silence(self) -> str:
        """Returns a description of a silence that is too long, for a message about the peer."""
        silent = f"was silent for {self.silent_for_s():.1f} s"
        limit_s = self.limit_s()
        limit = f"the limit is {limit_s:.1f} s"
        if not self._is_acknowledged():
            return f"{silent}, and its machine does not respond ({limit}, network.heartbeatTimeout)"
        return (
            f"{silent}, although its machine responds ({limit}: {self._timeout_s:g} s of "
            f"network.heartbeatTimeout and {limit_s - self._timeout_s:.1f} s for busy machines)"
        )

    async def flush(self) -> None:
        """Waits until all sent messages have left this process, for at most FLUSH_TIMEOUT_S."""
        with contextlib.suppress(OSError, TimeoutError):  # the peer is gone, or reads nothing
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._writer.drain()

    def close(self) -> None:
        """Closes the connection after the sent messages have left."""
        self._writer.close()

    def send_end(self) -> None:
        """Closes the sending side; messages from the other end are still received."""
        with contextlib.suppress(OSError, RuntimeError):  # the connection is closed already
            self._writer.write_eof()

    def abort(self) -> None:
        """Closes the connection immediately."""
        self._writer.transport.abort()


def _set_options(writer: asyncio.StreamWriter, timeout_s: float) -> None:
    """Makes the kernel send messages immediately, and end a connection without acknowledgements."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
