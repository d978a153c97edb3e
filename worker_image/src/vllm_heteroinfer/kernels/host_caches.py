"""Bytes that a measurement must read so that it times memory, not caches. Stdlib only; Linux only."""

import os
from collections.abc import Iterable
from pathlib import Path

MIN_SAMPLE_BYTES, MAX_SAMPLE_BYTES = 192 << 20, 768 << 20
"""Limits of the bytes that a measurement reads: 192 MiB and 768 MiB."""


def bytes_beyond_caches(
    cpus: Iterable[int] | None = None, folder: Path = Path("/sys/devices/system/cpu")
) -> int:
    """Returns the bytes that a measurement must read: twice the size of its cores' largest caches.

    The result is at least MIN_SAMPLE_BYTES and at most MAX_SAMPLE_BYTES. If groups of cores have caches of
    their own, the sizes of these caches are added, because each cache holds another part of the weights.

    Args:
        cpus: logical cores that read; if None, the cores that this process may use.
    """
    # The key is the list of the cores that share the cache, so that each cache counts once.
    largest_by_cores: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if cpus is None else cpus:
        caches = [_read_cache(file) for file in (folder / f"cpu{cpu}/cache").glob("index*/size")]
        if caches:
            size, sharing_cores = max(caches)
            largest_by_cores[sharing_cores or str(cpu)] = size
    return min(max(2 * sum(largest_by_cores.values()), MIN_SAMPLE_BYTES), MAX_SAMPLE_BYTES)


def _read_cache(size_file: Path) -> tuple[int, str]:
    """Returns the size of a cache in bytes, and the list of the cores that share the cache.

    The list is "" if Linux does not report it.
    """
    cores_file = size_file.with_name("shared_cpu_list")
    cores = cores_file.read_text().strip() if cores_file.exists() else ""
    return _parse_cache_size(size_file.read_text()), cores


def _parse_cache_size(text: str) -> int:
    """Returns the bytes of a size such as "32K" or "1M"; 0 for other texts."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    factor = {"K": 1 << 10, "M": 1 << 20}.get(unit, 0)
    return int(number) * factor if number.isdecimal() else 0
