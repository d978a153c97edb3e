"""Host memory that all ranks of a process group map, with a test that all ranks map the same memory.

The memory is a memfd of the first rank, which the other ranks open through /proc. It has no name in any
file system, so nothing remains after the processes end, even after a crash. It does not count against
/dev/shm (64 MiB in a container by default). The ranks must share a PID namespace: one pod, or one machine
under `heteroinfer up`.
"""

import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.distributed.bridge.bridge_link import (
    MESSAGE_BYTES,
    PART_BYTES,
    Buffer,
    ProcessGroupRanks,
)
from vllm_heteroinfer.distributed.bridge.header import HEADER_BYTES
from vllm_heteroinfer.pod.memory_files import open_memfd

PARTS = 2
"""Buffers for each rank: see `BridgeLink`."""
MAX_UNREAD = 16
"""Number of announcements that may be unread."""
WORDS = 16
"""Words of 8 bytes in a rank's line, the control words that this rank writes and the others read."""
WRITTEN, CLOSED, READ, ANNOUNCED, PROOF = range(5)
"""Indexes of the words in a rank's line.

WRITTEN: number of published parts. CLOSED: 1 after the rank has left. READ, ANNOUNCED: numbers of the
announcements that the rank has read and sent. PROOF: a value for `StreamSignal`'s test.
"""
_NONCE = 8
"""Index of the first word of the rank's nonce in its line."""
_NONCE_BYTES = 16
_ANNOUNCEMENT_BYTES = 8 + MESSAGE_BYTES
_PAGE_BYTES = 4096
_T = TypeVar("_T")


class BridgeSlab:
    """One rank's mapping of the process group's shared memory.

    Attributes:
        words: int64 view of the ranks' lines, WORDS words for each rank.
        parts: PARTS buffers for each rank, by rank in the process group.
        headers: the headers of these buffers, by rank in the process group.
        announcements: the announcements of the first rank: 8 bytes of length, then the message.
        unlock: undoes `lock_pages`; further calls do nothing.
    """

    unlock: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, fd: int, num_ranks: int) -> None:
        """Maps the memory of a descriptor, and creates the views of its regions."""
        self._memory = mmap.mmap(fd, slab_bytes(num_ranks), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        view = memoryview(self._memory)
        lines_bytes = num_ranks * WORDS * 8
        self.words = view[:lines_bytes].cast("q")
        headers_bytes = num_ranks * PARTS * HEADER_BYTES
        self.headers = [
            [view[start : start + HEADER_BYTES] for start in _starts(lines_bytes, index, PARTS, HEADER_BYTES)]
            for index in range(num_ranks)
        ]
        self.announcements = [
            view[start : start + _ANNOUNCEMENT_BYTES]
            for start in _starts(lines_bytes + headers_bytes, 0, MAX_UNREAD, _ANNOUNCEMENT_BYTES)
        ]
        first_part = _parts_offset(num_ranks)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.parts = [
            [
                Buffer(self.bytes[start : start + PART_BYTES])
                for start in _starts(first_part, index, PARTS, PART_BYTES)
            ]
            for index in range(num_ranks)
        ]

    def write_nonce(self, index: int, nonce: bytes) -> None:
        """Writes a rank's nonce into its line."""
        start = (index * WORDS + _NONCE) * 8
        self._memory[start : start + _NONCE_BYTES] = nonce

    def read_nonce(self, index: int) -> bytes:
        """Reads a rank's nonce from its line."""
        start = (index * WORDS + _NONCE) * 8
        return self._memory[start : start + _NONCE_BYTES]


def _starts(offset: int, index: int, count: int, size: int) -> list[int]:
    """Returns the first bytes of `count` regions of `size` bytes that belong to rank `index`.

    The regions of all ranks follow each other from `offset` on.
    """
    return [offset + (index * count + slot) * size for slot in range(count)]


def _parts_offset(num_ranks: int) -> int:
    """Returns the first byte of the parts: after lines, headers and announcements, at the start of a page."""
    control = num_ranks * (WORDS * 8 + PARTS * HEADER_BYTES) + MAX_UNREAD * _ANNOUNCEMENT_BYTES
    return -(-control // _PAGE_BYTES) * _PAGE_BYTES


def slab_bytes(num_ranks: int) -> int:
    """Returns the size of a process group's shared memory."""
    return _parts_offset(num_ranks) + num_ranks * PARTS * PART_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlabOffer:
    """Address of the first rank's memory, or the error that prevented its creation."""

    name: str = ""
    pid: int = 0
    fd: int = -1
    error: str = ""


@dataclass(slots=True)
class _Attempt:
    """Result of this rank's attempt to map the memory: the slab or an error, and the rank's nonce."""

    slab: BridgeSlab | None = None
    error: str = ""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))


def share_slab(process_group: ProcessGroupRanks, cpu_group: Any, device: torch.device) -> BridgeSlab:
    """Creates the process group's shared memory, and tests that all ranks map the same memory.

    All ranks must call it at the same time. A GPU rank locks the pages, so that the device can
    copy from and to the memory.

    Raises:
        ContractError: on every rank, if any rank does not map the memory.
    """
    fd, offer = -1, _SlabOffer()
    try:
        if process_group.index == 0:
            fd, offer = _create(len(process_group.ranks))
        offer = gather_values(offer, cpu_group)[0]
        attempt = _try_to_map(offer, process_group, device)
        nonces_and_errors = gather_values((attempt.nonce, attempt.error), cpu_group)
        problems = gather_values(_own_problem(attempt, nonces_and_errors, process_group), cpu_group)
    finally:
        if fd >= 0:  # the first rank: all ranks have opened the memory by now, or failed
            os.close(fd)
    failures = [problem for problem in problems if problem]
    if failures or attempt.slab is None:
        raise ContractError(
            f"process group {process_group.group}: ranks {list(process_group.ranks)} cannot share memory, "
            f"although the plan puts them on one host ({'; '.join(failures)}). Run them in one pod (or one "
            f"PID namespace of one machine), or set {names.ENV_BRIDGE}=gloo in engine.env"
        )
    return attempt.slab


def _create(num_ranks: int) -> tuple[int, _SlabOffer]:
    """Creates the memory of the first rank. Returns its descriptor and the offer to other ranks.

    The descriptor is -1 if the memory cannot be created; the offer then contains the error.
    """
    name = f"heteroinfer-bridge-{secrets.token_hex(16)}"
    try:
        fd = os.memfd_create(name)
    except OSError as error:
        return -1, _SlabOffer(error=f"cannot create shared memory: {error}")
    try:
        os.posix_fallocate(fd, 0, slab_bytes(num_ranks))
    except OSError as error:
        os.close(fd)
        return -1, _SlabOffer(
            error=f"cannot allocate {slab_bytes(num_ranks)} bytes of shared memory: {error}"
        )
    return fd, _SlabOffer(name=name, pid=os.getpid(), fd=fd)


def _try_to_map(offer: _SlabOffer, process_group: ProcessGroupRanks, device: torch.device) -> _Attempt:
    """Maps the offered memory and writes this rank's nonce into it. The result contains any error."""
    attempt = _Attempt(error=offer.error)
    if offer.error:
        return attempt
    try:
        attempt.slab = _open(offer, len(process_group.ranks))
        if device.type == "cuda":
            lock_pages(attempt.slab, device)
    except OSError as error:
        attempt.error = str(error)
    else:
        attempt.slab.write_nonce(process_group.index, attempt.nonce)
    return attempt


def _open(offer: _SlabOffer, num_ranks: int) -> BridgeSlab:
    """Maps the offered memory. Raises OSError if its descriptor leads to another file."""
    fd = open_memfd(offer.pid, offer.fd, offer.name, "the memory of the process group's first rank")
    try:
        return BridgeSlab(fd, num_ranks)
    finally:
        os.close(fd)


def _own_problem(
    attempt: _Attempt, nonces_and_errors: list[tuple[bytes, str]], process_group: ProcessGroupRanks
) -> str:
    """Returns this rank's problem with the memory; "" if the rank can read every rank's nonce."""
    prefix = f"rank {process_group.own_rank}"
    if attempt.error or attempt.slab is None:
        return f"{prefix}: {attempt.error}"
    # A rank with an error wrote no nonce, and reports its own problem.
    unreadable = [
        process_group.ranks[index]
        for index, (nonce, error) in enumerate(nonces_and_errors)
        if not error and attempt.slab.read_nonce(index) != nonce
    ]
    return f"{prefix} cannot read the data of ranks {unreadable}" if unreadable else ""


def lock_pages(slab: BridgeSlab, device: torch.device) -> None:
    """Locks the slab's pages, so that the GPU can copy from and to them.

    `BridgeSlab.unlock` or the slab's finalizer unlocks the pages. If memory is freed while it is locked,
    its address can never be locked again.

    Raises:
        OSError: CUDA refuses the memory.
    """
    address, num_bytes = slab.bytes.data_ptr(), slab.bytes.numel()
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(status) != 0:
        raise OSError(f"cudaHostRegister of {num_bytes} bytes failed with CUDA error {status}")
    unlock = weakref.finalize(slab, torch.cuda.cudart().cudaHostUnregister, address)
    unlock.atexit = False  # the lock ends with the process
    slab.unlock = unlock


def gather_values(value: _T, cpu_group: Any) -> list[_T]:
    """Gathers every rank's value, in the process group's order."""
    values: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(values, value, group=cpu_group)
    return values
