"""Copies between a rank's tensors and the host memory that the link shows to others."""

import time
from collections.abc import Iterable

import torch

from vllm_heteroinfer.distributed.bridge.bridge_link import PART_BYTES, Buffer, Form
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal

MAPPED_BYTES = 256 << 10
"""Up to here a GPU reads and writes host memory from its kernels.

That saves the copy engine's start and a launch: with copies 8 KiB took 68 us and 256 KiB 80
(H200, 2026-11-21). Above, the copy engine moves parts both ways at once.
"""
_SAMPLE = 16
"""One in so many mapped copies is timed, and counts for all: two events cost as much as the copy."""


class Staging:
    """The copies of one rank; for each part the calls are put, in_order or settle, fetch, fetched.

    This one is a CPU rank's: plain copies, and peers' parts are read where they are.
    """

    way = "used in place"
    """How it copies, for the log."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._fetch_start: float | None = None

    def put(self, buffer: Buffer, source: torch.Tensor, form: Form, *, first: bool) -> None:
        """Starts to copy `source`, of this form, to a buffer; `first` part of a tensor or a later one."""
        start = time.perf_counter()
        buffer.shaped(form).copy_(source)
        self._seconds += time.perf_counter() - start

    def in_order(self) -> StreamSignal | None:
        """Returns what publishes what was put once it is there; None: `settle`, then publish."""
        return None

    def settle(self) -> float:
        """Waits until all copies are done. Returns their time since the last call, in seconds."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def fetch(self, peer: int, buffer: Buffer, form: Form) -> torch.Tensor:
        """Returns what a peer put, on this rank's device, in the order of its stream."""
        if self._fetch_start is None:
            self._fetch_start = time.perf_counter()
        return buffer.shaped(form)

    def fetched(self) -> None:
        """Says that the last use of what was fetched is in the stream."""
        if self._fetch_start is not None:
            self._seconds += time.perf_counter() - self._fetch_start
            self._fetch_start = None


class CudaStaging(Staging):
    """A GPU rank's: kernels over mapped host memory for small parts, asynchronous copies for others.

    The first part of a tensor leaves on the stream that computed it; the others on a stream
    of their own, while what came in before is copied in and combined on the first.
    """

    def __init__(
        self,
        device: torch.device,
        peers: tuple[int, ...],
        buffers: Iterable[Buffer],
        signal: StreamSignal | None = None,
    ) -> None:
        """Takes every buffer of the link, page-locked, and what writes its words, if the link has such."""
        self._device, self._signal = device, signal
        self._mapped: dict[Buffer, Buffer] = {}
        self._mapped_bytes, self.way = MAPPED_BYTES, f"mapped up to {MAPPED_BYTES} bytes, copied above"
        try:
            for buffer in buffers:
                self._mapped[buffer] = Buffer(map_to_device(buffer.memory, device))
        except (OSError, RuntimeError) as error:  # slower, and the log says so
            self._mapped_bytes, self.way = 0, f"copied, since the device does not map it: {error}"
        self._copies = torch.cuda.Stream(device)
        self._staged = {
            peer: Buffer(torch.empty(PART_BYTES, dtype=torch.uint8, device=device)) for peer in peers
        }
        self._stream = torch.cuda.current_stream(device)
        self._put_time, self._fetch_time = _DeviceTime(), _DeviceTime()
        self._puts = self._weight = 0
        self._first, self._small = True, False

    def put(self, buffer: Buffer, source: torch.Tensor, form: Form, *, first: bool) -> None:
        """Starts to copy."""
        self._first = first
        if not first:  # the first part has been settled, so what made the tensor is done
            with torch.cuda.stream(self._copies):
                buffer.shaped(form).copy_(source, non_blocking=True)
            return
        small = self._small = form.num_bytes <= self._mapped_bytes
        self._puts += 1
        timed = not small or self._puts % _SAMPLE == 0
        self._weight = 0 if not timed else _SAMPLE if small else 1
        if timed:
            self._put_time.begin(self._weight)
        if small:
            _write(self._mapped[buffer].shaped(form), source)
        else:
            buffer.shaped(form).copy_(source, non_blocking=True)
        if timed:
            self._put_time.end()

    def in_order(self) -> StreamSignal | None:
        """Returns the signal for a small part that is not timed, on the stream of the one before.

        Nothing need be waited for then: the next part is written, and what was fetched for
        this one is used, in the order of that stream.
        """
        signal = self._signal
        if signal is None or self._weight or not self._small or signal.stream() != self._stream.cuda_stream:
            return None
        return signal

    def settle(self) -> float:
        """Waits for the device.

        Returns:
            For the first part of a tensor the device's own time for the copies, since the
            wait is for its computation too; for the others the time of the wait.
        """
        start = time.perf_counter()
        stream, last = torch.cuda.current_stream(self._device), self._stream
        stream.synchronize()
        if last != stream:  # what was fetched before may be in use there
            last.synchronize()
            self._stream = stream
        if self._first:
            return self._put_time.take() + self._fetch_time.take()
        self._first = True
        self._copies.synchronize()
        return time.perf_counter() - start

    def fetch(self, peer: int, buffer: Buffer, form: Form) -> torch.Tensor:
        """Returns host memory itself if it is small, else what is being copied from it."""
        if self._weight:
            self._fetch_time.begin(self._weight)
        if form.num_bytes <= self._mapped_bytes:
            return self._mapped[buffer].shaped(form)
        return self._staged[peer].shaped(form).copy_(buffer.shaped(form), non_blocking=True)

    def fetched(self) -> None:
        """Ends the time of the fetches, on the current stream."""
        self._fetch_time.end()


class _DeviceTime:
    """Time that the current stream takes from one point to another."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._weight = 0
        self._begun = self._ended = False

    def begin(self, weight: int) -> None:
        """Marks the begin, unless it is marked; `weight` such times are taken together."""
        if not self._begun:
            self._begun, self._ended, self._weight = True, False, weight
            self._begin.record()

    def end(self) -> None:
        """Marks the end, if there was a begin."""
        if self._begun:
            self._begun, self._ended = False, True
            self._end.record()

    def take(self) -> float:
        """Returns the seconds between the marks, once: the device must have passed both."""
        if not self._ended:
            return 0.0
        self._ended = False
        return self._begin.elapsed_time(self._end) / 1e3 * self._weight


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies by a kernel: `copy_` would take the copy engine. A product with 1 is the number itself."""
    dtype = source.dtype
    if dtype is torch.bool:
        dtype, target, source = torch.uint8, target.view(torch.uint8), source.view(torch.uint8)
    one = _ONES.get(dtype)
    if one is None:
        one = _ONES[dtype] = torch.ones((), dtype=dtype)
    torch.mul(source, one, out=target)


_ONES: dict[torch.dtype, torch.Tensor] = {}
"""By dtype, on the host: torch takes them as numbers, but need not make a tensor of one each time."""


class _HostMemory:
    """Page-locked host memory, shown to torch as memory of the device that maps it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def map_to_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns page-locked host memory as a tensor of the device, at the same address.

    Source: at::cuda::getDeviceFromPtr@torch-2.13, which takes registered host memory.

    Args:
        memory: [num_bytes], uint8, on the host, page-locked.
        device: a GPU whose host pointers are device pointers (unified addressing).

    Raises:
        OSError: torch made a copy, or the address is another one.
    """
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_HostMemory(memory), device=device)
    if mapped.data_ptr() != memory.data_ptr():
        raise OSError(f"{device} sees host memory at another address; expected unified addressing")
    return mapped
