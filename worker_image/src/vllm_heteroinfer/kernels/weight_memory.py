"""Packed weights in a memfd, so that other processes of the pod can map them. Imports torch, not vLLM.

Linux frees a memfd when the last process that has it exits. A memfd needs no /dev/shm, and reads are as
fast as from private memory (docs/decisions/2026-11-22-feed-forward.md). Linux only.
"""

import contextlib
import ctypes
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Final

import torch

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page. Each tensor begins at a multiple of this size, in the memfd and in this process, so
that Linux can use huge pages."""
NAME: Final = "heteroinfer-weights"
"""Beginning of the memfd's name in /proc/PID/maps."""
_MADV_COLLAPSE: Final = 25
"""Advice for madvise() that needs Linux 6.1. Older versions refuse the advice, and then reads are slower."""
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class WeightMemory:
    """One memfd that grows with each tensor.

    Attributes:
        name: name of the memfd, which no other memfd has.
        fd: descriptor of the memfd, closed when this object is freed.
        num_bytes: size of all tensors so far, each rounded up to huge pages.
    """

    def __init__(self) -> None:
        self.name = f"{NAME}-{secrets.token_hex(16)}"
        self.fd = os.memfd_create(self.name)
        self.num_bytes = 0
        # For each tensor until it is freed: its first address, the address after its end, and its offset in
        # the memfd. Loops run over a copy, because a tensor may be freed during the loop.
        self._spans: list[tuple[int, int, int]] = []
        self._close_fd = weakref.finalize(self, os.close, self.fd)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor in the memfd.

        When the tensor is freed, its mapping ends. Written values stay in the memfd.

        Raises:
            OSError: the memory cannot be mapped.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        length = _round_up_to_huge_pages(count * dtype.itemsize)
        os.ftruncate(self.fd, self.num_bytes + length)
        address = _map_aligned(self.fd, self.num_bytes, length)
        span = (address, address + length, self.num_bytes)
        self._spans.append(span)
        self.num_bytes += length
        # The tensor references `memory`, so the mapping ends only after the tensor is freed.
        memory = (ctypes.c_char * length).from_address(address)
        weakref.finalize(memory, _unmap, self._spans, span)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of a tensor in this memory; raises OSError if it cannot be mapped."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's first byte is in this memory."""
        return any(begin <= tensor.data_ptr() < end for begin, end, _ in tuple(self._spans))

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Returns the offset of a tensor's first byte in the memfd.

        Raises:
            KeyError: the tensor is not in this memory.
        """
        address = tensor.data_ptr()
        for begin, end, offset in tuple(self._spans):
            if begin <= address < end:
                return offset + address - begin
        raise KeyError(address)

    def move_to_huge_pages(self, tensor: torch.Tensor) -> None:
        """Asks the Linux kernel to move a written tensor of this memory into huge pages."""
        _libc.madvise(tensor.data_ptr(), _round_up_to_huge_pages(tensor.nbytes), _MADV_COLLAPSE)

    def move_all_to_huge_pages(self) -> None:
        """Asks the Linux kernel to move all tensors of this memory into huge pages, if possible."""
        for address, end, _ in tuple(self._spans):
            _libc.madvise(address, end - address, _MADV_COLLAPSE)


def _unmap(spans: list[tuple[int, int, int]], span: tuple[int, int, int]) -> None:
    """Ends the mapping of a freed tensor. Another mapping may get its addresses, so `spans` forgets them."""
    spans.remove(span)
    begin, end, _ = span
    _libc.munmap(begin, end - begin)


_memory_in_use: ContextVar[WeightMemory | None] = ContextVar("weight_memory", default=None)


@contextlib.contextmanager
def place_weights_in(memory: WeightMemory) -> Iterator[None]:
    """Places all weights that are packed inside this context in `memory` instead of private memory."""
    token = _memory_in_use.set(memory)
    try:
        yield
    finally:
        _memory_in_use.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor for packed weights.

    Inside of `place_weights_in`, the tensor is in the memory of this context, otherwise in private memory.
    """
    memory = _memory_in_use.get()
    return torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)


def _round_up_to_huge_pages(num_bytes: int) -> int:
    """Rounds a size or an address up to whole huge pages."""
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE


def _map_aligned(fd: int, offset: int, length: int) -> int:
    """Maps `length` bytes of a file at a multiple of a huge page. Returns the address.

    First reserves addresses for one more huge page, because mmap() itself does not align to huge pages. At
    the end, releases the reserved addresses before and after the mapping.
    """
    reserved_address = _call_mmap(
        None,
        length + HUGE_PAGE,
        _PROT_NONE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        -1,
        0,
    )
    address = _round_up_to_huge_pages(reserved_address)
    _call_mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    mapped_end, reserved_end = address + length, reserved_address + length + HUGE_PAGE
    if address > reserved_address:
        _libc.munmap(reserved_address, address - reserved_address)
    if mapped_end < reserved_end:
        _libc.munmap(mapped_end, reserved_end - mapped_end)
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
    return address


def _call_mmap(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    """Calls mmap() and returns the address; raises OSError if Linux refuses the mapping."""
    mapped = _libc.mmap(address, length, protection, flags, fd, offset)
    if mapped is None or mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"weights: cannot map {length} bytes ({os.strerror(number)}). Raise the memory limit of this "
            "role",
        )
    return int(mapped)
