"""Sleep and wake of a rank: releases memory to the machine and reports the phase.

`SleepMixin` precedes vLLM's worker in the bases on both devices. On a CPU, `CpuSleepMixin` stands between
them, because vLLM 0.32.0's CPU worker only logs. Must not import the CPU worker (see group_worker.py).
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable
from typing import Any

from vllm.v1.executor.abstract import SLEEP_TAGS

from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.group.engine_calls import check_sleep_level
from vllm_heteroinfer.rank.context import RankContext

KV_CACHE = "kv_cache"
"""vLLM's tag of the KV cache (vllm/v1/executor/abstract.py::SLEEP_TAGS@v0.32.0)."""
MADV_DONTNEED = 4
"""asm-generic/mman-common.h: frees the pages immediately; they read as zeros afterwards."""

_logger = logging.getLogger(__name__)


class SleepMixin:
    """Reports the rank as Sleeping while any of its memory is released."""

    context: RankContext
    _loaded_bytes: int
    _asleep: frozenset[str] = frozenset()

    def sleep(self, level: int = 1) -> None:
        """Releases the KV cache. On a GPU, also moves the weights to host memory.

        Raises:
            ValueError: groups do not support this level.
        """
        check_sleep_level(level)
        super().sleep(level)  # type: ignore[misc]
        self._set_asleep(SLEEP_TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restores the memory that `tags` name, by default all. The KV cache is empty afterwards."""
        super().wake_up(tags)  # type: ignore[misc]
        self._set_asleep(frozenset() if tags is None else self._asleep - set(tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Releases the memory that `tags` name."""
        super().discard(tags)  # type: ignore[misc]
        self._set_asleep(self._asleep | set(tags))

    def _set_asleep(self, tags: frozenset[str]) -> None:
        """Stores the tags of the released memory. Reports the rank as Sleeping, or as Ready without tags."""
        self._asleep = tags
        phase = RankPhase.SLEEPING if tags else RankPhase.READY
        self.context.reporter.set_phase(phase, self._loaded_bytes, self._loaded_bytes)


class CpuSleepMixin:
    """Releases the pages of the KV cache to the kernel.

    The weights stay, because they already are in host memory.
    """

    model_runner: Any

    def sleep(self, level: int = 1) -> None:
        """Releases the KV cache."""
        freed = release_pages(self.model_runner.kv_caches)
        _logger.info("asleep at level %d: released %s of KV cache", level, format_bytes(freed))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Does nothing, because the kernel maps pages of zeros when the KV cache is used."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Releases the KV cache if `tags` name it. A CPU rank never drops its weights."""
        if KV_CACHE in tags:
            release_pages(self.model_runner.kv_caches)


def release_pages(tensors: Iterable[Any]) -> int:
    """Releases the memory of CPU tensors to the kernel. Returns the released bytes.

    The tensors stay valid. Released pages contain zeros. Only whole pages are released, so the parts of pages
    at both ends of a storage keep their values.

    Args:
        tensors: views of one or several storages, each in private memory.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    freed_bytes = 0
    for address, num_bytes in storages.items():
        first_page = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE  # rounded up
        length = (address + num_bytes - first_page) // mmap.PAGESIZE * mmap.PAGESIZE
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(length), MADV_DONTNEED) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"madvise: {os.strerror(number)}")
        freed_bytes += length
    return freed_bytes
