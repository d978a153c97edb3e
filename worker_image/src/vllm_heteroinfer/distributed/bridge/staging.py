"""Copies between a member's tensors and the host memory that the link shows to others."""

import time
from typing import Protocol

import torch

from vllm_heteroinfer.distributed.bridge.link import PART_BYTES, Buffer


class Staging(Protocol):
    """The copies of one member; calls come in the order put, settle, fetch for each part."""

    def put(self, target: torch.Tensor, source: torch.Tensor, *, first: bool) -> None:
        """Starts to copy `source` to host memory; `first` part of a tensor or a later one."""

    def settle(self) -> float:
        """Returns when nothing that was put or fetched is still under way; the seconds it took."""

    def fetch(self, peer: int, part: torch.Tensor) -> torch.Tensor:
        """Returns what a peer put, on this member's device, in the order of its stream."""

    def fetched(self) -> None:
        """Says that the last use of what was fetched is in the stream."""


class HostStaging:
    """A CPU member's: plain copies; peers' parts are read where they are."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._fetch_start: float | None = None

    def put(self, target: torch.Tensor, source: torch.Tensor, *, first: bool) -> None:
        """Copies at once."""
        start = time.perf_counter()
        target.copy_(source)
        self._seconds += time.perf_counter() - start

    def settle(self) -> float:
        """Returns the seconds spent since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def fetch(self, peer: int, part: torch.Tensor) -> torch.Tensor:
        """Returns the part itself."""
        if self._fetch_start is None:
            self._fetch_start = time.perf_counter()
        return part

    def fetched(self) -> None:
        """Counts the time since `fetch`: what was computed with the parts is done."""
        if self._fetch_start is not None:
            self._seconds += time.perf_counter() - self._fetch_start
            self._fetch_start = None


class CudaStaging:
    """A GPU member's: asynchronous copies to and from page-locked memory.

    The first part of a tensor leaves on the stream that computed it, which costs no event
    across streams; the others on a stream of their own, while what came in before is copied
    in and combined on the first.
    """

    def __init__(self, device: torch.device, peers: tuple[int, ...]) -> None:
        self._copies = torch.cuda.Stream(device)
        self._staged = {
            peer: Buffer(torch.empty(PART_BYTES, dtype=torch.uint8, device=device)) for peer in peers
        }
        # With times: what the device copied is transfer, what it computed before is not.
        self._put_begin, self._put_end, self._fetch_begin, self._fetch_end = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )
        self._first = self._putting = self._fetching = False
        self._fetch_started = False

    def put(self, target: torch.Tensor, source: torch.Tensor, *, first: bool) -> None:
        """Starts to copy; `target` is page-locked."""
        self._first, self._putting = first, True
        if first:
            self._copy_out(target, source)
            return
        # The first part has been settled, so what made the tensor is done.
        with torch.cuda.stream(self._copies):
            self._copy_out(target, source)

    def _copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._put_begin.record()
        target.copy_(source, non_blocking=True)
        self._put_end.record()

    def settle(self) -> float:
        """Waits for the device.

        Returns:
            For the first part of a tensor the device's own time for the copies, since the
            wait is for its computation too; for the others the time of the wait.
        """
        start = time.perf_counter()
        seconds = 0.0
        if self._putting:
            self._put_end.synchronize()
            if self._first:
                seconds += self._put_begin.elapsed_time(self._put_end) / 1e3
        if self._fetching:
            self._fetch_end.synchronize()
            if self._first:
                seconds += self._fetch_begin.elapsed_time(self._fetch_end) / 1e3
        if not self._first:
            seconds = time.perf_counter() - start
        self._first = self._putting = self._fetching = False
        return seconds

    def fetch(self, peer: int, part: torch.Tensor) -> torch.Tensor:
        """Starts to copy a peer's part to the device, on the current stream."""
        if not self._fetch_started:
            self._fetch_started = True
            self._fetch_begin.record()
        staged = self._staged[peer].shaped(part.dtype, part.shape)
        staged.copy_(part, non_blocking=True)
        return staged

    def fetched(self) -> None:
        """Marks the end of the fetches on the current stream."""
        if self._fetch_started:
            self._fetch_started, self._fetching = False, True
            self._fetch_end.record()
