"""The link for ranks without shared memory: one gloo message for each part and pair of ranks.

A message is a header and the bytes of the part. The receive buffer has room for the largest part, so
gloo accepts every message, and the comparison of headers finds a mismatch.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_heteroinfer.distributed.bridge.bridge_link import (
    AN_ANNOUNCEMENT,
    FREE_PLACE,
    MESSAGE_BYTES,
    PART_BYTES,
    Buffer,
    ProcessGroupRanks,
)
from vllm_heteroinfer.distributed.bridge.header import HEADER_BYTES
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal
from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.distributed.meter import Meter

_TAG = 0x4862
"""First tag of the bridge's messages (parts, announcements, sends). vLLM's messages use the process
group too."""
_PART_TAG, _ANNOUNCE_TAG, _SEND_TAG = range(_TAG, _TAG + 3)
_PARTS = 2
"""Messages for each direction and peer: see `BridgeLink`."""
_MAX_UNREAD = 16
"""Number of announcements that may be unread."""
_MISMATCH_GRACE_S = 1.0
"""Time that a rank waits after it found a mismatch, so that the other rank finds the mismatch, too."""
_LENGTH_BYTES = 8


class _GlooMessage:
    """A persistent buffer for a header and a part; page-locked on a GPU rank.

    Attributes:
        bytes: the whole message, uint8.
        part: the message without its header.
        works: gloo's handles of the sends or the receive in progress.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.bytes = torch.zeros(HEADER_BYTES + PART_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.part = Buffer(self.bytes[HEADER_BYTES:])
        self._header = memoryview(self.bytes.numpy())[:HEADER_BYTES]
        self.works: list[Any] = []

    @property
    def header(self) -> bytes:
        return bytes(self._header)

    @header.setter
    def header(self, header: bytes) -> None:
        self._header[:] = header


class GlooLink:
    """A link over gloo. See `BridgeLink`."""

    def __init__(
        self,
        cpu_group: Any,
        process_group: ProcessGroupRanks,
        device: torch.device,
        *,
        timeout_s: float,
        meter: Meter,
    ) -> None:
        """Allocates two messages for each direction and peer, and the place for announcements.

        Args:
            cpu_group: gloo ProcessGroup of exactly these ranks.
            timeout_s: longest wait for another rank, in seconds.
        """
        self._group, self._process_group = cpu_group, process_group
        self._meter, self.timeout_s = meter, timeout_s
        self._pinned = device.type == "cuda"
        self._published = self._announced = 0
        self._out = [_GlooMessage(pinned=self._pinned) for _ in range(_PARTS)]
        self._in = {
            peer: [_GlooMessage(pinned=self._pinned) for _ in range(_PARTS)] for peer in process_group.peers
        }
        self._announcements = torch.zeros((_MAX_UNREAD, _LENGTH_BYTES + MESSAGE_BYTES), dtype=torch.uint8)
        self._announcement_works: list[list[tuple[int, Any]]] = [[] for _ in range(_MAX_UNREAD)]
        self._direct_message: _GlooMessage | None = None
        # gloo can wait for a receive, but cannot report whether it is done.
        self._wait_threads = (
            ThreadPoolExecutor(len(process_group.peers), "heteroinfer-bridge")
            if len(process_group.peers) > 1
            else None
        )

    def buffers(self) -> Iterable[Buffer]:
        """Returns the parts of all messages."""
        messages = (self._out, *self._in.values())
        return (message.part for pair in messages for message in pair)

    def outgoing(self) -> Buffer:
        """Returns the buffer for the next part. All receivers have read its earlier content."""
        return self._out[(self._published + 1) % _PARTS].part

    def publish(self, header: bytes, num_bytes: int, signal: StreamSignal | None = None) -> None:
        """Posts this rank's receives from all peers, then its sends to them. Does not support a signal."""
        if signal is not None:
            raise ValueError(
                "publish: signal must be None, because gloo sends immediately (got a signal). Pass no signal"
            )
        self._published += 1
        slot = self._published % _PARTS
        message = self._out[slot]
        message.works.clear()  # these sends are done, because their receivers have published since then
        message.header = header
        for peer in self._process_group.peers:
            incoming = self._in[peer][slot]
            incoming.works = [self._post(dist.irecv, incoming.bytes, peer, _PART_TAG)]
        sent = message.bytes[: HEADER_BYTES + num_bytes]
        message.works = [self._post(dist.isend, sent, peer, _PART_TAG) for peer in self._process_group.peers]

    def collect(self) -> Iterator[tuple[int, bytes, Buffer]]:
        """Yields each peer's part when its message arrives."""
        slot = self._published % _PARTS
        pending = list(self._process_group.peers)
        arrivals = self._arrivals(slot)
        while pending:
            start = time.perf_counter()
            # Report each wait: if a rank reports no wait, the supervisor concludes that this rank is the one
            # that hangs.
            self._meter.set_awaited_rank(self._process_group.ranks[pending[0]])
            peer = next(arrivals)
            self._meter.add_wait(time.perf_counter() - start)
            self._meter.set_awaited_rank(None)
            pending.remove(peer)
            message = self._in[peer][slot]
            yield peer, message.header, message.part

    def _arrivals(self, slot: int) -> Iterator[int]:
        """Yields each peer once its message has arrived, the earliest first."""

        def wait_for_message(peer: int) -> int:
            """Waits for the message of a peer, and returns the peer."""
            self._wait_for(
                self._in[peer][slot].works[0], peer, "a part of a collective operation", self.timeout_s
            )
            return peer

        if self._wait_threads is None:  # there is at most one peer, so no order
            yield from map(wait_for_message, self._process_group.peers)
            return
        futures = [self._wait_threads.submit(wait_for_message, peer) for peer in self._process_group.peers]
        for future in as_completed(futures):
            yield future.result()

    def announce(self, message: bytes) -> None:
        """Sends a message to each listener; only the first rank may call it."""
        self._announced += 1
        slot = self._announced % _MAX_UNREAD
        for peer, work in self._announcement_works[slot]:  # the sends of the earlier message in this place
            self._wait_and_report(work, peer, FREE_PLACE, self.timeout_s)
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        row = self._announcements[slot, : len(framed)]
        row.copy_(torch.frombuffer(bytearray(framed), dtype=torch.uint8))
        self._announcement_works[slot] = [
            (peer, self._post(dist.isend, row, peer, _ANNOUNCE_TAG)) for peer in self._process_group.listeners
        ]

    def listen(self, deadline_s: float) -> bytes:
        """Waits for the next announcement of the first rank."""
        row = self._announcements[0]  # a listener receives one announcement at a time
        self._wait_and_report(self._post(dist.irecv, row, 0, _ANNOUNCE_TAG), 0, AN_ANNOUNCEMENT, deadline_s)
        framed = bytes(row.numpy())
        return framed[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(framed[:_LENGTH_BYTES], "little")]

    def send(self, peer: int, header: bytes, part: torch.Tensor) -> None:
        """Sends one part to one rank and waits until the rank has received it.

        Args:
            peer: rank in the process group.
            part: [n], any device, at most PART_BYTES.
        """
        message = self._direct_message = self._direct_message or _GlooMessage(pinned=self._pinned)
        message.header = header
        message.part.first_elements(part.dtype, part.numel()).copy_(part)
        sent = message.bytes[: HEADER_BYTES + part.numel() * part.element_size()]
        work = self._post(dist.isend, sent, peer, _SEND_TAG)
        self._wait_and_report(work, peer, "an acknowledgement of a tensor", self.timeout_s)

    def receive(self, peer: int) -> tuple[bytes, Buffer]:
        """Receives a header and a part from a rank; valid until the next call."""
        message = self._direct_message = self._direct_message or _GlooMessage(pinned=self._pinned)
        work = self._post(dist.irecv, message.bytes, peer, _SEND_TAG)
        self._wait_and_report(work, peer, "a tensor", self.timeout_s)
        return message.header, message.part

    def finish_sending(self, peer: int) -> None:
        """Waits until a rank has received this rank's last part, for at most one second."""
        works = self._out[self._published % _PARTS].works  # empty before the first part
        for receiver, work in zip(self._process_group.peers, works, strict=False):
            if receiver == peer:
                with suppress(PeerLostError):  # the caller raises its own error
                    self._wait_for(work, peer, "an acknowledgement of a part", _MISMATCH_GRACE_S)

    def close(self) -> None:
        """Ends the waiting threads. The process group closes the connections."""
        if self._wait_threads is not None:
            self._wait_threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, operation: Any, message: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts a send or a receive (`operation`); raises PeerLostError if the connection is lost."""
        rank = self._process_group.ranks[peer]
        try:
            return operation(message, rank, group=self._group, tag=tag)
        except RuntimeError as error:
            raise PeerLostError(rank, 0.0, str(error), awaited="a message") from error

    def _wait_and_report(self, work: Any, peer: int, awaited: str, timeout_s: float) -> None:
        """Waits for a send or a receive, and reports the wait to the meter."""
        start = time.perf_counter()
        self._meter.set_awaited_rank(self._process_group.ranks[peer])
        self._wait_for(work, peer, awaited, timeout_s)
        self._meter.set_awaited_rank(None)
        self._meter.add_wait(time.perf_counter() - start)

    def _wait_for(self, work: Any, peer: int, awaited: str, timeout_s: float) -> None:
        """Waits for a send or a receive; raises PeerLostError if it fails or takes too long."""
        start = time.perf_counter()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited = time.perf_counter() - start
            raise PeerLostError(
                self._process_group.ranks[peer], waited, str(error), awaited=awaited
            ) from error
