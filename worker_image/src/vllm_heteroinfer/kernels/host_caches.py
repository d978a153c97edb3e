"""How much must be read for memory to be timed, not caches. Stdlib only; Linux only."""

from pathlib import Path

LEAST_BYTES, MOST_BYTES = 192 << 20, 768 << 20


def bytes_beyond_caches(cache: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Returns how many bytes of weights a round reads, twice what the largest cache holds."""
    sizes = [_cache_bytes(file.read_text()) for file in cache.glob("index*/size")]
    return min(max(2 * max(sizes, default=0), LEAST_BYTES), MOST_BYTES)


def _cache_bytes(text: str) -> int:
    number, unit = text.strip()[:-1], text.strip()[-1:]
    factor = {"K": 1 << 10, "M": 1 << 20}.get(unit, 0)
    return int(number) * factor if number.isdecimal() else 0
