"""The link of ranks that share no memory: one gloo message a part and pair of ranks.

A message is a header and the part's bytes, received into a buffer for the largest part, so that
gloo never sees two sizes that differ and a mismatch is found by comparing headers.
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
    MESSAGE_BYTES,
    PART_BYTES,
    READING,
    Buffer,
    ProcessGroupRanks,
)
from vllm_heteroinfer.distributed.bridge.header import HEADER_BYTES
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal
from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.distributed.meter import Meter

_TAG = 0x4862
"""Of the bridge's messages on a process group that others use too: parts, announcements, sends."""
_PART_TAG, _ANNOUNCE_TAG, _SEND_TAG = range(_TAG, _TAG + 3)
_PARTS = 2
_RING = 16
_FAREWELL_S = 1.0
"""For which a rank that found a mismatch stays, so that the other one finds it too."""
_LENGTH_BYTES = 8


class _GlooMessage:
    """Buffer for a header and a part, persistent, page-locked on a GPU rank."""

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
    """See `BridgeLink`."""

    def __init__(
        self,
        cpu_group: Any,
        process_group: ProcessGroupRanks,
        device: torch.device,
        *,
        timeout_s: float,
        meter: Meter,
    ) -> None:
        self._group, self._process_group = cpu_group, process_group
        self._meter, self.timeout_s = meter, timeout_s
        self._pinned = device.type == "cuda"
        self._published = self._announced = 0
        self._out = [_GlooMessage(pinned=self._pinned) for _ in range(_PARTS)]
        self._in = {
            peer: [_GlooMessage(pinned=self._pinned) for _ in range(_PARTS)] for peer in process_group.peers
        }
        self._ring = torch.zeros((_RING, _LENGTH_BYTES + MESSAGE_BYTES), dtype=torch.uint8)
        self._ring_works: list[list[tuple[int, Any]]] = [[] for _ in range(_RING)]
        self._letter: _GlooMessage | None = None
        # gloo's receives can be waited for, but not asked whether they are done.
        self._waiters = (
            ThreadPoolExecutor(len(process_group.peers), "heteroinfer-bridge")
            if len(process_group.peers) > 1
            else None
        )

    def buffers(self) -> Iterable[Buffer]:
        """Returns the parts of all messages."""
        messages = (self._out, *self._in.values())
        return (message.part for both in messages for message in both)

    def outgoing(self) -> Buffer:
        """Returns the part of the message that was sent the time before the last."""
        return self._out[(self._published + 1) % _PARTS].part

    def publish(self, header: bytes, num_bytes: int, signal: StreamSignal | None = None) -> None:
        """Posts all receives, then all sends, of this rank; without a signal only."""
        if signal is not None:
            raise ValueError("gloo sends what is there: got a signal for later, expected none")
        self._published += 1
        slot = self._published % _PARTS
        message = self._out[slot]
        message.works.clear()  # their readers have since published, so they are done
        message.header = header
        for peer in self._process_group.peers:
            incoming = self._in[peer][slot]
            incoming.works = [self._post(dist.irecv, incoming.bytes, peer, _PART_TAG)]
        sent = message.bytes[: HEADER_BYTES + num_bytes]
        message.works = [self._post(dist.isend, sent, peer, _PART_TAG) for peer in self._process_group.peers]

    def collect(self) -> Iterator[tuple[int, bytes, Buffer]]:
        """Yields each peer's part once its message is there."""
        slot = self._published % _PARTS
        pending = list(self._process_group.peers)
        arrivals = self._arrivals(slot)
        while pending:
            start = time.perf_counter()
            # Also after others have come: who says that it waits for nobody is taken for the one that hangs.
            self._meter.waiting_for(self._process_group.ranks[pending[0]])
            peer = next(arrivals)
            self._meter.waited(time.perf_counter() - start)
            self._meter.waiting_for(None)
            pending.remove(peer)
            message = self._in[peer][slot]
            yield peer, message.header, message.part

    def _arrivals(self, slot: int) -> Iterator[int]:
        """Yields the peers in the order in which their messages come."""

        def arrived(peer: int) -> int:
            self._finish(self._in[peer][slot].works[0], peer, "a collective's part", self.timeout_s)
            return peer

        if self._waiters is None:
            yield from map(arrived, self._process_group.peers)
            return
        futures = [self._waiters.submit(arrived, peer) for peer in self._process_group.peers]
        for future in as_completed(futures):
            yield future.result()

    def announce(self, message: bytes) -> None:
        """Sends bytes to each listener; the first rank only."""
        self._announced += 1
        slot = self._announced % _RING
        for peer, work in self._ring_works[slot]:
            self._wait(work, peer, READING, self.timeout_s)
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        row = self._ring[slot, : len(framed)]
        row.copy_(torch.frombuffer(bytearray(framed), dtype=torch.uint8))
        self._ring_works[slot] = [
            (peer, self._post(dist.isend, row, peer, _ANNOUNCE_TAG)) for peer in self._process_group.listeners
        ]

    def listen(self, deadline_s: float) -> bytes:
        """Returns the next message of the first rank."""
        row = self._ring[0]
        self._wait(self._post(dist.irecv, row, 0, _ANNOUNCE_TAG), 0, AN_ANNOUNCEMENT, deadline_s)
        framed = bytes(row.numpy())
        return framed[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(framed[:_LENGTH_BYTES], "little")]

    def send(self, peer: int, header: bytes, part: torch.Tensor) -> None:
        """Sends one part to one rank and waits until it is taken.

        Args:
            peer: rank in the process group.
            part: [n], any device, at most PART_BYTES.
        """
        letter = self._letter = self._letter or _GlooMessage(pinned=self._pinned)
        letter.header = header
        letter.part.elements(part.dtype, part.numel()).copy_(part)
        sent = letter.bytes[: HEADER_BYTES + part.numel() * part.element_size()]
        work = self._post(dist.isend, sent, peer, _SEND_TAG)
        self._wait(work, peer, "the taking of a tensor", self.timeout_s)

    def receive(self, peer: int) -> tuple[bytes, Buffer]:
        """Returns the header and the part that a rank sends; valid until the next call."""
        letter = self._letter = self._letter or _GlooMessage(pinned=self._pinned)
        work = self._post(dist.irecv, letter.bytes, peer, _SEND_TAG)
        self._wait(work, peer, "a tensor", self.timeout_s)
        return letter.header, letter.part

    def finish_sending(self, peer: int) -> None:
        """Waits until a rank has taken this rank's last part, for a second at most."""
        works = self._out[self._published % _PARTS].works
        for receiver, work in zip(self._process_group.peers, works, strict=False):
            if receiver == peer:
                with suppress(PeerLostError):
                    self._finish(work, peer, "the taking of a part", _FAREWELL_S)

    def close(self) -> None:
        """Ends the waiting threads; connections end with the process group."""
        if self._waiters is not None:
            self._waiters.shutdown(wait=False, cancel_futures=True)

    def _post(self, post: Any, message: torch.Tensor, peer: int, tag: int) -> Any:
        rank = self._process_group.ranks[peer]
        try:
            return post(message, rank, group=self._group, tag=tag)
        except RuntimeError as error:
            raise PeerLostError(rank, 0.0, str(error), awaited="a message") from error

    def _wait(self, work: Any, peer: int, awaited: str, timeout_s: float) -> None:
        start = time.perf_counter()
        self._meter.waiting_for(self._process_group.ranks[peer])
        self._finish(work, peer, awaited, timeout_s)
        self._meter.waiting_for(None)
        self._meter.waited(time.perf_counter() - start)

    def _finish(self, work: Any, peer: int, awaited: str, timeout_s: float) -> None:
        start = time.perf_counter()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited = time.perf_counter() - start
            raise PeerLostError(
                self._process_group.ranks[peer], waited, str(error), awaited=awaited
            ) from error
