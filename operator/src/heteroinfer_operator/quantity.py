"""Kubernetes quantities (`80Gi`, `500m`) and durations (`1h30m`) to numbers and back, and sizes for people.

Pure. Imports nothing of this project.
"""

import functools
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

_SUFFIX: Final = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{name: Fraction(1000) ** (i + 1) for i, name in enumerate("kMGTPE")},
    **{f"{name}i": Fraction(1024) ** (i + 1) for i, name in enumerate("KMGTPE")},
}

BYTES_PATTERN: Final = r"^[0-9]{1,15}([.][0-9]{1,3})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""A size in bytes, as the schema of the resource has it."""
RESOURCE_PATTERN: Final = r"^[0-9]{1,15}([.][0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Any resource of a container, as the schema of the resource has it."""
DURATION_PATTERN: Final = r"^([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$"
"""A duration, as the schema of the resource has it (together with a length of at least 2)."""

_QUANTITY: Final = re.compile(r"([+-]?[0-9]{1,30}(?:[.][0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?)([a-zA-Z]*)")
_DURATION = re.compile(r"(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")


@functools.lru_cache(maxsize=4096)  # few texts, of many pods
def _parse(text: str) -> Fraction | None:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _SUFFIX:
        return None
    return Fraction(Decimal(match[1])) * _SUFFIX[match[2]]


def parse_quantity(text: object) -> Fraction:
    """Returns the exact number that a quantity means, such as `3920m`, `80Gi` or `1e9`.

    All forms of `k8s.io/apimachinery/pkg/api/resource.Quantity` that begin with a digit or a sign: those
    that the API server stores. The schema of the resource takes fewer (BYTES_PATTERN, RESOURCE_PATTERN).

    Raises:
        ValueError: it is not a quantity.
    """
    value = _parse(str(text))
    if value is None:
        raise ValueError(f"got {text!r}, expected a quantity such as 80Gi, 500m or 2")
    return value


def parse_bytes(text: str) -> int:
    """Returns a quantity in bytes, rounded down; raises ValueError as parse_quantity."""
    return int(parse_quantity(text))


def parse_duration_s(text: str) -> float:
    """Returns a duration such as `1h30m` in seconds.

    Raises:
        ValueError: `text` is not a duration.
    """
    match = _DURATION.fullmatch(text) if text else None
    if match is None:
        raise ValueError(f"got {text!r}, expected a duration such as 30m, 60s or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def format_quantity(value: Fraction) -> str:
    """Returns a quantity of this number, rounded up to thousandths; whole ones in Gi or Mi if even."""
    if value.denominator != 1:
        return f"{math.ceil(value * 1000)}m"
    for suffix in ("Gi", "Mi"):
        if value and value % _SUFFIX[suffix] == 0:
            return f"{value / _SUFFIX[suffix]}{suffix}"
    return str(value)


def gigabytes_per_s(bytes_per_s: float, digits: int = 0) -> str:
    """Returns a rate for people, with so many digits after the point."""
    return f"{bytes_per_s / 1e9:.{digits}f} GB/s"


def mebibytes(size: int) -> str:
    """Returns a size as a quantity in Mi, rounded up: what a person compares with a limit."""
    return f"{-(-size // 2**20)}Mi"
