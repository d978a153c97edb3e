"""One connection between two supervisors and the messages on it: JSON lines. Stdlib and the contract only."""

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass

from heteroinfer_contract import codec
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_report import RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Evidence
from vllm_heteroinfer.pod.channel import LineBuffer

FLUSH_TIMEOUT_S = 0.5
"""For the last word to leave; a peer that takes nothing for so long is lost itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a follower is; everything must agree with the leader."""

    group_uid: str
    epoch: int
    plan_hash: str
    pod: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """A rank in a beat: its status, and for how long it has been doing the same thing.

    Attributes:
        busy_s: by its supervisor's clock, so that a rank that cannot speak grows late too.
    """

    status: RankStatus
    busy: str | None = None
    busy_s: float = 0.0
    waiting_for_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line between supervisors. What is None or False is not said.

    Attributes:
        ranks: of a follower, in each of its beats.
        group_age_s: of the leader, in each of its beats: age of its oldest news of a pod.
        stopping: this pod was asked to stop; its end is no failure of its own.
        verdict: the leader's word on who ended the group.
    """

    hello: Hello | None = None
    welcome: bool = False
    refused: Failure | None = None
    ranks: tuple[RankBeat, ...] | None = None
    group_age_s: float | None = None
    evidence: Evidence | None = None
    stopping: bool = False
    verdict: Failure | None = None


def check_hello(hello: Hello, *, plan: Plan, launch: PodLaunch, connected: set[int]) -> tuple[str, bool]:
    """Returns what differs in words ("" if nothing), and whether that ends the leader's group. PURE.

    A pod of another group, or of an earlier epoch of this one, is only sent away.
    """
    if hello.group_uid != launch.group_uid:
        return f"got group uid {hello.group_uid}, expected {launch.group_uid}", False
    if hello.epoch != launch.epoch:
        return f"got epoch {hello.epoch}, expected {launch.epoch}", hello.epoch > launch.epoch
    if hello.plan_hash != plan.hash:
        return f"got plan {hello.plan_hash}, expected {plan.hash}", True
    if not 0 < hello.pod < len(plan.pods):
        return f"got pod index {hello.pod}, expected 1..{len(plan.pods) - 1}", True
    if hello.pod in connected:
        return f"pod {hello.pod} is connected already", False
    return "", False


class SupervisorLink:
    """One connection, after set-up: lines out without waiting, lines in one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._lines = LineBuffer()
        self._queue: list[str] = []
        self.last_heartbeat_at_s = time.monotonic()
        _set_options(writer, timeout_s)

    def send(self, message: Message) -> None:
        """Queues one line; a connection that is gone is noticed by receive()."""
        if not self._writer.is_closing():
            self._writer.write((codec.to_json(message) + "\n").encode())

    async def receive(self) -> Message | None:
        """Returns the next message, or None at the end of the connection.

        Raises:
            ContractError: what came is not of this protocol.
        """
        while not self._queue:
            try:
                chunk = await self._reader.read(65536)
            except OSError:
                chunk = b""
            if not chunk:
                return None
            self.last_heartbeat_at_s = time.monotonic()
            self._queue = self._lines.feed(chunk)
        return codec.from_json(Message, self._queue.pop(0))

    def silent_for_s(self) -> float:
        """Returns the time since the last heartbeat or other message, in seconds."""
        return time.monotonic() - self.last_heartbeat_at_s

    async def flush(self) -> None:
        """Waits until what was sent has left this process, for at most FLUSH_TIMEOUT_S."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._writer.drain()

    def close(self) -> None:
        """Closes the connection after what was sent."""
        self._writer.close()


def _set_options(writer: asyncio.StreamWriter, timeout_s: float) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
