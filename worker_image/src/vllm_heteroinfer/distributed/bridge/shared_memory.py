"""The link of ranks on one host: each publishes in the slab, the others read there.

A word of a rank's line says how many parts it has published. It is written after the
part and its header; on x86-64 other CPUs see stores in that order, elsewhere they need not.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

from vllm_heteroinfer.distributed.bridge.bridge_link import (
    AN_ANNOUNCEMENT,
    READING,
    Buffer,
    ProcessGroupRanks,
)
from vllm_heteroinfer.distributed.bridge.bridge_slab import (
    ANNOUNCED,
    CLOSED,
    PARTS,
    READ,
    RING,
    WORDS,
    WRITTEN,
    BridgeSlab,
)
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal
from vllm_heteroinfer.distributed.bridge.waiting import SPIN_S, wait_until
from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.distributed.meter import Meter

MACHINES = ("x86_64",)
"""Machines whose stores are seen in order."""
_CHECK_S = 0.1
"""Between looks at what the device has met, while its own part is not there."""


class SharedMemoryLink:
    """See `BridgeLink`."""

    def __init__(
        self, slab: BridgeSlab, process_group: ProcessGroupRanks, *, timeout_s: float, meter: Meter
    ) -> None:
        self._slab, self._process_group, self._meter, self.timeout_s = slab, process_group, meter, timeout_s
        self._published = self._announced = self._read = 0
        self._signal: StreamSignal | None = None
        self._line = process_group.index * WORDS
        self._own = slab.parts[process_group.index]
        self._own_headers = slab.headers[process_group.index]

    def buffers(self) -> Iterable[Buffer]:
        """Returns the buffers of all ranks."""
        return (part for parts in self._slab.parts for part in parts)

    def outgoing(self) -> Buffer:
        """Returns the buffer that was published the time before the last."""
        return self._own[(self._published + 1) % PARTS]

    def publish(self, header: bytes, num_bytes: int, signal: StreamSignal | None = None) -> None:
        """Writes the header, then the word that says so, or lets the signal write it."""
        published = self._published = self._published + 1
        self._own_headers[published % PARTS][:] = header
        self._signal = signal
        if signal is None:
            self._slab.words[self._line + WRITTEN] = published
        else:
            signal.write(self._line + WRITTEN, published)

    def collect(self) -> Iterator[tuple[int, bytes, Buffer]]:
        """Yields each peer's part once its word says that it is there."""
        words, published = self._slab.words, self._published
        slot = published % PARTS
        pending = self._process_group.peers
        while pending:
            there = [peer for peer in pending if words[peer * WORDS + WRITTEN] >= published]
            if not there:
                if self._signal is not None:
                    self._wait_for_own(self._signal, published)
                self._wait_for_any(pending, published)
                continue
            for peer in there:
                yield peer, bytes(self._slab.headers[peer][slot]), self._slab.parts[peer][slot]
            pending = tuple(peer for peer in pending if peer not in there)

    def _wait_for_own(self, signal: StreamSignal, published: int) -> None:
        """Returns when this rank's own device has come as far: until then it waits for no peer.

        Raises:
            TimeoutError: it has not, in a time in which the peers give up.
        """
        words, word = self._slab.words, self._line + WRITTEN
        waited_s = 0.0
        while not wait_until(lambda: words[word] >= published, _CHECK_S):
            signal.check()
            waited_s += _CHECK_S
            if waited_s > self.timeout_s:
                rank = self._process_group.own_rank
                raise TimeoutError(
                    f"process group {self._process_group.group}: the device of rank {rank} has not finished "
                    f"what its part is made of within {self.timeout_s:.0f} s"
                )

    def _wait_for_any(self, pending: tuple[int, ...], published: int) -> None:
        words = self._slab.words
        lines = [peer * WORDS for peer in pending]

        def ready() -> bool:
            for line in lines:  # noqa: SIM110 - three times as fast as any() of a generator
                if words[line + WRITTEN] >= published or words[line + CLOSED]:
                    return True
            return False

        self._wait(ready, pending[0], "a collective's part")
        for peer, line in zip(pending, lines, strict=True):
            if words[line + CLOSED] and words[line + WRITTEN] < published:
                raise PeerLostError(
                    self._process_group.ranks[peer],
                    0.0,
                    "it has closed its bridge",
                    awaited="a collective's part",
                )

    def _wait(
        self, ready: Callable[[], bool], peer: int, awaited: str, timeout_s: float | None = None
    ) -> None:
        rank = self._process_group.ranks[peer]
        start = time.perf_counter()
        came = wait_until(ready, SPIN_S)
        reported = not came
        if reported:  # reporting a wait costs as much as a short one takes
            self._meter.waiting_for(rank)
            came = wait_until(ready, self.timeout_s if timeout_s is None else timeout_s)
        waited = time.perf_counter() - start
        if not came:
            raise PeerLostError(
                rank, waited, f"process group {self._process_group.group}: no sign of it", awaited=awaited
            )
        if reported:
            self._meter.waiting_for(None)
        self._meter.waited(waited)

    def announce(self, message: bytes) -> None:
        """Puts bytes into the ring; rank 0 only."""
        announced = self._announced + 1
        words = self._slab.words
        for peer in self._process_group.listeners:
            word = peer * WORDS + READ
            if words[word] <= announced - 1 - RING:
                self._wait(partial(_exceeds, words, word, announced - 1 - RING), peer, READING)
        entry = self._slab.ring[announced % RING]
        entry[:8] = len(message).to_bytes(8, "little")
        entry[8 : 8 + len(message)] = message
        self._announced = words[ANNOUNCED] = announced

    def listen(self, deadline_s: float) -> bytes:
        """Returns the next message of the ring."""
        words, wanted = self._slab.words, self._read + 1
        if words[ANNOUNCED] < wanted:
            self._wait(
                lambda: words[ANNOUNCED] >= wanted or bool(words[CLOSED]), 0, AN_ANNOUNCEMENT, deadline_s
            )
            if words[ANNOUNCED] < wanted:
                raise PeerLostError(
                    self._process_group.ranks[0], 0.0, "it has closed its bridge", awaited=AN_ANNOUNCEMENT
                )
        entry = self._slab.ring[wanted % RING]
        message = bytes(entry[8 : 8 + int.from_bytes(entry[:8], "little")])
        self._read = words[self._line + READ] = wanted
        return message

    def finish_sending(self, peer: int) -> None:
        """Does nothing: what was published stays for as long as a rank has the slab mapped."""

    def close(self) -> None:
        """Says so to the others; the memory goes with the last process that maps it."""
        self._slab.words[self._line + CLOSED] = 1
        self._slab.unlock()


def _exceeds(words: "memoryview[int]", word: int, value: int) -> bool:
    return words[word] > value


def choose_path(share_host: bool, machines: set[str]) -> tuple[Literal["shared_memory", "gloo"], str]:
    """Returns how ranks reach each other, and why.

    Args:
        share_host: whether the plan says so.
        machines: what `platform.machine` says on each.
    """
    if not share_host:
        return "gloo", "the plan says that the ranks share no host"
    if not machines <= set(MACHINES):
        return (
            "gloo",
            f"shared memory needs stores seen in order ({', '.join(MACHINES)}), got {sorted(machines)}",
        )
    return "shared_memory", "the plan says that the ranks share a host, and each read what the others wrote"
