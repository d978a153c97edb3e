"""Copies between a rank's tensors and the host memory of the link."""

import time
from collections.abc import Iterable

import torch

from vllm_heteroinfer.distributed.bridge.bridge_link import PART_BYTES, Buffer, Form
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal

MAPPED_BYTES = 256 << 10
"""Largest part that a GPU's kernels read and write directly in host memory.

Direct access saves the start of the copy engine and a launch: with copies, 8 KiB took 68 us and 256 KiB
took 80 us (H200, 2026-11-21). For larger parts, the copy engine moves data in both directions concurrently.
"""
_SAMPLE = 16
"""Only one of 16 mapped copies is timed, and its time counts 16 times: timing takes as long as a copy."""


class Staging:
    """The copies of a CPU rank: copies its own parts out, and reads peers' parts in host memory.

    For each part, call `copy_out`, then `publishing_signal` or `wait_for_copies`, then `fetch`, then
    `end_fetches`.
    """

    description = "used directly"
    """Description of the copies, for the log."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._fetch_start: float | None = None

    def copy_out(self, buffer: Buffer, source: torch.Tensor, form: Form, *, first: bool) -> None:
        """Starts to copy `source`, a tensor of this form, to a buffer.

        Args:
            first: whether this is the first part of a tensor.
        """
        start = time.perf_counter()
        buffer.view_as(form).copy_(source)
        self._seconds += time.perf_counter() - start

    def publishing_signal(self) -> StreamSignal | None:
        """Returns a signal that publishes the part after its copy.

        Without a signal (None), call `wait_for_copies` before you publish the part.
        """
        return None

    def wait_for_copies(self) -> float:
        """Waits until all copies are done. Returns their time since the last call, in seconds."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def fetch(self, peer: int, buffer: Buffer, form: Form) -> torch.Tensor:
        """Returns a peer's part on this rank's device, in the order of the device's stream."""
        if self._fetch_start is None:
            self._fetch_start = time.perf_counter()
        return buffer.view_as(form)

    def end_fetches(self) -> None:
        """Ends the time measurement of a part's fetches.

        Call this method after the last use of the fetched tensors is queued on the stream.
        """
        if self._fetch_start is not None:
            self._seconds += time.perf_counter() - self._fetch_start
            self._fetch_start = None


class CudaStaging(Staging):
    """The copies of a GPU rank.

    Kernels on mapped host memory copy small parts. Other parts are copied asynchronously.

    The first part of a tensor is copied out on the stream that computed the tensor. The other parts are
    copied out on a second stream, while the first stream copies in and combines the parts received before.
    """

    def __init__(
        self,
        device: torch.device,
        peers: tuple[int, ...],
        buffers: Iterable[Buffer],
        signal: StreamSignal | None = None,
    ) -> None:
        """Maps the buffers to the device, if the device supports it.

        Args:
            buffers: all buffers of the link, page-locked.
            signal: writes this rank's count of published parts from the GPU's stream; None if the host
                writes it.
        """
        self._device, self._signal = device, signal
        self._mapped: dict[Buffer, Buffer] = {}
        self._mapped_bytes = MAPPED_BYTES
        self.description = f"parts up to {MAPPED_BYTES} bytes are used in place, larger parts are copied"
        try:
            for buffer in buffers:
                self._mapped[buffer] = Buffer(map_to_device(buffer.memory, device))
        except (OSError, RuntimeError) as error:  # copies are slower; the log has the reason
            self._mapped_bytes = 0
            self.description = f"always copied, because the device cannot map host memory: {error}"
        self._second_stream = torch.cuda.Stream(device)
        self._staged = {
            peer: Buffer(torch.empty(PART_BYTES, dtype=torch.uint8, device=device)) for peer in peers
        }
        self._stream = torch.cuda.current_stream(device)
        self._copy_out_time, self._fetch_time = _DeviceTime(), _DeviceTime()
        self._copies_out = 0
        # Number of copies for which the timed copy stands; 0: this copy is not timed.
        self._time_factor = 0
        self._is_first_part, self._is_small_part = True, False

    def copy_out(self, buffer: Buffer, source: torch.Tensor, form: Form, *, first: bool) -> None:
        """Starts to copy `source` to a buffer, by a kernel if the part is small.

        See `Staging.copy_out`.
        """
        self._is_first_part = first
        if not first:  # the first part has been copied, so the computation of the tensor is done
            with torch.cuda.stream(self._second_stream):
                buffer.view_as(form).copy_(source, non_blocking=True)
            return
        small = self._is_small_part = form.num_bytes <= self._mapped_bytes
        self._copies_out += 1
        timed = not small or self._copies_out % _SAMPLE == 0
        self._time_factor = 0
        if timed:
            # A timed small copy counts for all small copies since the last timed one.
            self._time_factor = _SAMPLE if small else 1
            self._copy_out_time.begin(self._time_factor)
        if small:
            _copy_by_kernel(self._mapped[buffer].view_as(form), source)
        else:
            buffer.view_as(form).copy_(source, non_blocking=True)
        if timed:
            self._copy_out_time.end()

    def publishing_signal(self) -> StreamSignal | None:
        """Returns the signal with which the device publishes a part itself; None if the host must publish it.

        The device may publish a small part that is copied on the same stream as the part before. This stream
        copies the part only after it has used the earlier parts, so the host need not wait. For a timed copy,
        the host must wait anyway, to read the time.
        """
        signal, is_timed = self._signal, bool(self._time_factor)
        if (
            signal is None
            or is_timed
            or not self._is_small_part
            or signal.stream() != self._stream.cuda_stream
        ):
            return None
        return signal

    def wait_for_copies(self) -> float:
        """Waits until the device has finished the copies of the current part. Returns a time in seconds.

        For the first part of a tensor, returns the device's own time for the copies, because the wait
        includes the computation of the tensor. For later parts, returns the time of the wait.
        """
        start = time.perf_counter()
        stream, former = torch.cuda.current_stream(self._device), self._stream
        stream.synchronize()
        if former != stream:  # torch's current stream changed; the former stream may still use fetched parts
            former.synchronize()
            self._stream = stream
        if self._is_first_part:
            return self._copy_out_time.take() + self._fetch_time.take()
        # A rank without data for the next part does not call `copy_out`. Then only this stream has work.
        self._is_first_part = True
        self._second_stream.synchronize()  # later parts are copied on it
        return time.perf_counter() - start

    def fetch(self, peer: int, buffer: Buffer, form: Form) -> torch.Tensor:
        """Returns a small part as a view of host memory, and a larger part as a copy in progress."""
        if self._time_factor:  # this part's copies are timed
            self._fetch_time.begin(self._time_factor)
        if form.num_bytes <= self._mapped_bytes:
            return self._mapped[buffer].view_as(form)
        return self._staged[peer].view_as(form).copy_(buffer.view_as(form), non_blocking=True)

    def end_fetches(self) -> None:
        """Ends the time measurement of a part's fetches, on the current stream. See `Staging.end_fetches`."""
        self._fetch_time.end()


class _DeviceTime:
    """Measures the time of the current stream between two marks."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._time_factor = 0
        self._begun = self._ended = False

    def begin(self, factor: int) -> None:
        """Marks the start, if it is not marked yet. `take` multiplies the time by `factor`."""
        if not self._begun:
            self._begun, self._ended, self._time_factor = True, False, factor
            self._begin.record()

    def end(self) -> None:
        """Marks the end, if the start is marked."""
        if self._begun:
            self._begun, self._ended = False, True
            self._end.record()

    def take(self) -> float:
        """Returns the seconds between the marks, times the factor; 0 without new marks.

        The device must have passed both marks.
        """
        if not self._ended:
            return 0.0
        self._ended = False
        return self._begin.elapsed_time(self._end) / 1e3 * self._time_factor


def _copy_by_kernel(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies with a kernel (a product with 1).

    `copy_` would use the copy engine, whose start takes longer for small parts (MAPPED_BYTES).
    """
    dtype = source.dtype
    if dtype is torch.bool:
        dtype, target, source = torch.uint8, target.view(torch.uint8), source.view(torch.uint8)
    one = _ONES.get(dtype)
    if one is None:
        one = _ONES[dtype] = torch.ones((), dtype=dtype)
    torch.mul(source, one, out=target)


_ONES: dict[torch.dtype, torch.Tensor] = {}
"""The number 1 by dtype, on the host: torch treats it as a scalar and need not create a tensor each time."""


class _HostMemory:
    """Page-locked host memory that torch accepts as memory of the device that maps it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",  # uint8
            "data": (memory.data_ptr(), False),  # not read-only
            "version": 3,
        }


def map_to_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Views page-locked host memory as a tensor of the device, at the same address.

    Source: at::cuda::getDeviceFromPtr@torch-2.13, which takes registered host memory.

    Args:
        memory: [num_bytes], uint8, on the host, page-locked.
        device: a GPU whose host pointers are device pointers (unified addressing).

    Raises:
        OSError: torch made a copy, or the address differs.
    """
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_HostMemory(memory), device=device)
    if mapped.data_ptr() != memory.data_ptr():
        raise OSError(f"{device} maps host memory at a different address (no unified addressing)")
    return mapped
