"""The link for ranks on one host: each rank publishes its parts in the slab, and the others read them there.

A word in a rank's line counts the parts that the rank has published. The rank writes the word after the
part and its header. On x86-64, other CPUs see stores in that order; other architectures do not ensure it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

from vllm_heteroinfer.distributed.bridge.bridge_link import (
    AN_ANNOUNCEMENT,
    FREE_PLACE,
    Buffer,
    ProcessGroupRanks,
)
from vllm_heteroinfer.distributed.bridge.bridge_slab import (
    ANNOUNCED,
    CLOSED,
    MAX_UNREAD,
    PARTS,
    READ,
    WORDS,
    WRITTEN,
    BridgeSlab,
)
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal
from vllm_heteroinfer.distributed.bridge.waiting import SPIN_S, wait_until
from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.distributed.meter import Meter

MACHINES = ("x86_64",)
"""Architectures on which other CPUs see stores in order."""
_CHECK_S = 0.1
"""Interval of checks for errors of this rank's device, while its own part is not published."""
_A_PART, _HAS_LEFT = "a part of a collective operation", "the rank has left the process group"


class SharedMemoryLink:
    """A link over shared memory. See `BridgeLink`."""

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
        """Returns the buffer that was published before the last one; all ranks have read it."""
        return self._own[(self._published + 1) % PARTS]

    def publish(self, header: bytes, num_bytes: int, signal: StreamSignal | None = None) -> None:
        """Writes the header, then the count of published parts; a signal makes the device write the count."""
        published = self._published = self._published + 1
        self._own_headers[published % PARTS][:] = header
        self._signal = signal
        if signal is None:
            self._slab.words[self._line + WRITTEN] = published
        else:
            signal.write(self._line + WRITTEN, published)

    def collect(self) -> Iterator[tuple[int, bytes, Buffer]]:
        """Yields each peer's part when the peer's count shows that it is published."""
        words, published = self._slab.words, self._published
        slot = published % PARTS
        pending = self._process_group.peers
        while pending:
            arrived = [peer for peer in pending if words[peer * WORDS + WRITTEN] >= published]
            if not arrived:
                if self._signal is not None:
                    self._wait_for_own_device(self._signal, published)
                self._wait_for_peers(pending, published)
                continue
            for peer in arrived:
                yield peer, bytes(self._slab.headers[peer][slot]), self._slab.parts[peer][slot]
            pending = tuple(peer for peer in pending if peer not in arrived)

    def _wait_for_own_device(self, signal: StreamSignal, published: int) -> None:
        """Waits until this rank's own device has published its part, before the wait for peers begins.

        Raises:
            TimeoutError: the device did not publish within the time-out, after which the peers give up too.
        """
        words, word = self._slab.words, self._line + WRITTEN
        waited_s = 0.0
        while not wait_until(lambda: words[word] >= published, _CHECK_S):
            signal.raise_device_error()
            waited_s += _CHECK_S
            if waited_s > self.timeout_s:
                rank = self._process_group.own_rank
                raise TimeoutError(
                    f"process group {self._process_group.group}: the device of rank {rank} has not finished "
                    f"the computation of its part within {self.timeout_s:.0f} s. Check this device's log "
                    "(for a GPU: dmesg)"
                )

    def _wait_for_peers(self, pending: tuple[int, ...], published: int) -> None:
        """Waits until one of the pending ranks has published its part.

        Raises:
            PeerLostError: a rank has left the process group, or no rank published in time.
        """
        words = self._slab.words
        lines = [peer * WORDS for peer in pending]

        def ready() -> bool:
            """Returns whether a pending rank has published its part, or has left the process group."""
            for line in lines:  # noqa: SIM110 - three times as fast as any() of a generator
                if words[line + WRITTEN] >= published or words[line + CLOSED]:
                    return True
            return False

        # The meter and a time-out name one rank: the first of the pending ranks.
        self._wait_and_report(ready, pending[0], _A_PART)
        for peer, line in zip(pending, lines, strict=True):
            if words[line + CLOSED] and words[line + WRITTEN] < published:
                rank = self._process_group.ranks[peer]
                raise PeerLostError(rank, 0.0, _HAS_LEFT, awaited=_A_PART)

    def _wait_and_report(
        self, ready: Callable[[], bool], peer: int, awaited: str, timeout_s: float | None = None
    ) -> None:
        """Waits until `ready` is true, and reports the wait to the meter.

        Raises:
            PeerLostError: rank `peer` of the process group did not write `awaited` in time.
        """
        rank = self._process_group.ranks[peer]
        start = time.perf_counter()
        arrived = wait_until(ready, SPIN_S)
        reported = not arrived
        if reported:  # a short wait is not reported, because the report would take as long
            self._meter.set_awaited_rank(rank)
            arrived = wait_until(ready, self.timeout_s if timeout_s is None else timeout_s)
        waited = time.perf_counter() - start
        if not arrived:
            raise PeerLostError(
                rank,
                waited,
                f"the rank wrote no data to the shared memory of process group {self._process_group.group}",
                awaited=awaited,
            )
        if reported:
            self._meter.set_awaited_rank(None)
        self._meter.add_wait(waited)

    def announce(self, message: bytes) -> None:
        """Puts a message into the place for announcements; only the first rank may call it."""
        announced = self._announced + 1
        words = self._slab.words
        overwritten = announced - MAX_UNREAD  # the announcement whose place the new announcement takes
        for peer in self._process_group.listeners:
            word = peer * WORDS + READ
            if words[word] < overwritten:
                self._wait_and_report(partial(_has_reached, words, word, overwritten), peer, FREE_PLACE)
        entry = self._slab.announcements[announced % MAX_UNREAD]
        entry[:8] = len(message).to_bytes(8, "little")
        entry[8 : 8 + len(message)] = message
        self._announced = words[ANNOUNCED] = announced  # the line of the first rank begins at word 0

    def listen(self, deadline_s: float) -> bytes:
        """Waits for the next announcement."""
        words, wanted = self._slab.words, self._read + 1  # the line of the first rank begins at word 0
        if words[ANNOUNCED] < wanted:
            self._wait_and_report(
                lambda: words[ANNOUNCED] >= wanted or bool(words[CLOSED]), 0, AN_ANNOUNCEMENT, deadline_s
            )
            if words[ANNOUNCED] < wanted:
                rank = self._process_group.ranks[0]
                raise PeerLostError(rank, 0.0, _HAS_LEFT, awaited=AN_ANNOUNCEMENT)
        entry = self._slab.announcements[wanted % MAX_UNREAD]
        message = bytes(entry[8 : 8 + int.from_bytes(entry[:8], "little")])
        self._read = words[self._line + READ] = wanted
        return message

    def finish_sending(self, peer: int) -> None:
        """Does nothing, because a published part exists as long as any rank maps the slab."""

    def close(self) -> None:
        """Marks this rank as closed. Linux frees the memory when no process maps it any more."""
        self._slab.words[self._line + CLOSED] = 1
        self._slab.unlock()


def _has_reached(words: "memoryview[int]", word: int, value: int) -> bool:
    """Returns whether a word has at least this value."""
    return words[word] >= value


def choose_path(share_host: bool, machines: set[str]) -> tuple[Literal["shared_memory", "gloo"], str]:
    """Chooses the link between the ranks. Returns the link's name, and the reason for the log.

    Args:
        share_host: whether the plan puts the ranks on one host.
        machines: `platform.machine()` of each rank.
    """
    if not share_host:
        return "gloo", "the plan puts the ranks on different hosts"
    if not machines <= set(MACHINES):
        return (
            "gloo",
            f"shared memory needs CPUs with ordered stores ({', '.join(MACHINES)}), and the CPUs are "
            + ", ".join(sorted(machines)),
        )
    return "shared_memory", f"the plan puts the ranks on one host, and its CPUs are {MACHINES[0]}"
