"""Runs two ranks of a slab in one process.

The first rank's memory words are written late, as by a GPU's stream.
"""

import json
import os
import threading
import time
from typing import Any

from tests.integration.bridge.bridge_rank import CountingMeter
from vllm_heteroinfer.distributed.bridge.bridge_link import ProcessGroupRanks
from vllm_heteroinfer.distributed.bridge.bridge_slab import BridgeSlab, slab_bytes
from vllm_heteroinfer.distributed.bridge.header import HEADER_BYTES
from vllm_heteroinfer.distributed.bridge.shared_memory import SharedMemoryLink
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal

HEADER = b"h" * HEADER_BYTES
LATE_S = 0.3


class LateWords(StreamSignal):
    """A stream whose writes take effect only when a test calls `run`. It can also report a failed device."""

    def __init__(self, slab: BridgeSlab) -> None:
        self._slab = slab
        self.pending: list[tuple[int, int]] = []
        self.failed = False

    def write(self, word: int, value: int) -> None:
        self.pending.append((word, value))

    def stream(self) -> int:
        return 0

    def raise_device_error(self) -> None:
        if self.failed:
            raise RuntimeError("the device has failed")

    def run(self) -> None:
        for word, value in self.pending:
            self._slab.words[word] = value


def links(timeout_s: float) -> tuple[LateWords, list[SharedMemoryLink], list[CountingMeter]]:
    """Returns a late stream, and the links and meters of two ranks of a new slab."""
    fd = os.memfd_create("late-words")
    os.posix_fallocate(fd, 0, slab_bytes(2))
    slab = BridgeSlab(fd, 2)
    meters = [CountingMeter(), CountingMeter()]
    ranks = [ProcessGroupRanks(group="late", ranks=(0, 1), index=index, listeners=(1,)) for index in range(2)]
    return (
        LateWords(slab),
        [
            SharedMemoryLink(slab, rank, timeout_s=timeout_s, meter=meter)
            for rank, meter in zip(ranks, meters, strict=True)
        ],
        meters,
    )


def reported(link: SharedMemoryLink) -> str:
    try:
        list(link.collect())
    except (RuntimeError, TimeoutError) as error:
        return str(error)
    return ""


def late(peer_s: float) -> dict[str, Any]:
    """Writes the first rank's word after LATE_S, and starts the second rank after `peer_s`."""
    signal, (first, second), (own, other) = links(timeout_s=30.0)
    first.publish(HEADER, 0, signal)

    def second_rank() -> None:
        second.publish(HEADER, 0)
        list(second.collect())

    timers = [threading.Timer(LATE_S, signal.run), threading.Timer(peer_s, second_rank)]
    start = time.perf_counter()
    for timer in timers:
        timer.start()
    got = [peer for peer, _, _ in first.collect()]
    took_s = time.perf_counter() - start
    for timer in timers:
        timer.join()
    return {
        "got": got,
        "took_s": took_s,
        "waited_s": own.waited_s,
        "peer_waited_s": other.waited_s,
    }


def main() -> None:
    """Prints the results of a late word, a failed device, and a word that is never written."""
    failed, (first, _), _ = links(timeout_s=30.0)
    failed.failed = True
    first.publish(HEADER, 0, failed)
    never, (stuck, _), _ = links(timeout_s=0.3)
    stuck.publish(HEADER, 0, never)
    print(
        json.dumps(
            {
                "before": late(0.0),
                "after": late(2 * LATE_S),
                "failed": reported(first),
                "stuck": reported(stuck),
            }
        )
    )


if __name__ == "__main__":
    main()
