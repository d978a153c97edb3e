"""Sleep and wake of a rank: what it gives back to its machine, and its phase meanwhile.

`SleepMixin` comes before vLLM's worker on either device; `CpuSleepMixin` between them on a
CPU, where vLLM 0.32.0 only logs. Must not import the CPU worker (see group_worker.py).
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
from vllm_heteroinfer.group.engine_calls import check_level
from vllm_heteroinfer.rank.context import RankContext

KV_CACHE = "kv_cache"
"""vLLM's tag of the KV cache (vllm/v1/executor/abstract.py::SLEEP_TAGS@v0.32.0)."""
MADV_DONTNEED = 4
"""asm-generic/mman-common.h: the pages are free at once, and zero when they are touched again."""

_logger = logging.getLogger(__name__)


class SleepMixin:
    """Reports the rank as Sleeping while any of its memory is given back."""

    context: RankContext
    _loaded_bytes: int
    _asleep: frozenset[str] = frozenset()

    def sleep(self, level: int = 1) -> None:
        """Gives back the KV cache, and on a GPU that of the weights, which move to host memory.

        Raises:
            ValueError: the level is one that a group does not have.
        """
        check_level(level)
        super().sleep(level)  # type: ignore[misc]
        self._set_asleep(SLEEP_TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes back what `tags` name, all of it by default; the KV cache comes back empty."""
        super().wake_up(tags)  # type: ignore[misc]
        self._set_asleep(frozenset() if tags is None else self._asleep - set(tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Gives back what `tags` name."""
        super().discard(tags)  # type: ignore[misc]
        self._set_asleep(self._asleep | set(tags))

    def _set_asleep(self, tags: frozenset[str]) -> None:
        self._asleep = tags
        phase = RankPhase.SLEEPING if tags else RankPhase.READY
        self.context.reporter.phase(phase, self._loaded_bytes, self._loaded_bytes)


class CpuSleepMixin:
    """Gives the pages of the KV cache back to the kernel; the weights stay, being in host memory already."""

    model_runner: Any

    def sleep(self, level: int = 1) -> None:
        """Gives back the KV cache, at once."""
        freed = release_pages(self.model_runner.kv_caches)
        _logger.info("asleep at level %d: %s of KV cache given back", level, format_bytes(freed))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Does nothing: pages come back, as zeros, when they are used."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Gives back the KV cache if `tags` name it; weights are never dropped on a CPU."""
        if KV_CACHE in tags:
            release_pages(self.model_runner.kv_caches)


def release_pages(tensors: Iterable[Any]) -> int:
    """Gives the memory of CPU tensors back to the kernel and returns its size, in bytes.

    The tensors stay what they are, all zeros. Memory is given back by whole pages.

    Args:
        tensors: views of one or several storages, each in private memory.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    freed = 0
    for address, size in storages.items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_DONTNEED) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"madvise: {os.strerror(number)}")
        freed += length
    return freed
