"""Converts Kubernetes quantities (`80Gi`, `500m`) and durations (`1h30m`) to numbers and back.

Also formats sizes for messages. Pure. Imports nothing from this project.
"""

import functools
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
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
"""Pattern of a size in bytes in the resource's schema."""
RESOURCE_PATTERN: Final = r"^[0-9]{1,15}([.][0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Pattern of a container resource in the resource's schema."""
DURATION_PATTERN: Final = r"^([0-9]{1,5}(h|m|s|ms)|[0-9]{6}s){1,4}$"
"""Pattern of a duration in the resource's schema.

The pattern is that of GEP-2257 (Gateway API), plus seconds of six digits, which version 0.1.0 accepted.
"""
_UNITS: Final = "k, M, G, T, P, Ki, Mi, Gi, Ti, Pi"
PATTERN_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        BYTES_PATTERN: f"must be a size in bytes such as 80Gi (units: {_UNITS})",
        RESOURCE_PATTERN: f"must be an amount such as 64Gi, 500m or 2 (units: m, {_UNITS})",
        DURATION_PATTERN: "must be a duration such as 30m, 1h30m or 1500ms",
    }
)
"""Error message for a text that does not match the pattern."""

_QUANTITY: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*+)(?:[.](?P<decimals>[0-9]*+))?+"
    r"(?:[eE](?P<exponent>[+-]?[0-9]++)|(?P<suffix>[a-zA-Z]*+))"
)
_MAX_QUANTITY: Final = Fraction(2**63 - 1)
_MIN_QUANTITY: Final = Fraction(1, 10**9)
_DIGITS_READ: Final = 80
"""Number of significant digits that are parsed. The two bounds of a quantity need 28 digits."""
_MAX_EXPONENT: Final = 10**9
_MAX_CACHED_LENGTH: Final = 64
"""Longest text whose value is cached, in characters. Other clients may store texts of a megabyte."""
_DURATION: Final = re.compile(DURATION_PATTERN)
_DURATION_PART: Final = re.compile("([0-9]+)(ms|h|m|s)")
_MILLISECONDS: Final[Mapping[str, int]] = MappingProxyType({"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1})


def parse_quantity(text: object) -> Fraction:
    """Parses a quantity such as `3920m`, `80Gi`, `.5` or `1e9`.

    Accepts every form that the API server stores (`k8s.io/apimachinery/pkg/api/resource.ParseQuantity`), with
    any number of digits and any exponent. The schema of HeteroInference accepts fewer forms (BYTES_PATTERN,
    RESOURCE_PATTERN). Rounds away from zero to a billionth, as Kubernetes does. Larger numbers become
    2**63 - 1, as in Kubernetes with binary suffixes.

    Raises:
        ValueError: the text is not a quantity.
    """
    written = str(text)
    # `__wrapped__` is the function without its cache.
    parse = _parse_bounded if len(written) <= _MAX_CACHED_LENGTH else _parse_bounded.__wrapped__
    value = parse(written)
    if value is None:
        shown = written[:_MAX_CACHED_LENGTH]
        raise ValueError(f"{shown!r} must be a quantity such as 80Gi, 500m or 2")
    return value


@functools.lru_cache(maxsize=4096)  # many pods share few texts
def _parse_bounded(text: str) -> Fraction | None:
    """Returns the value of a quantity within the bounds, or None if the text is not a quantity."""
    match = _QUANTITY.fullmatch(text)
    if match is None or not (match["whole"] or match["decimals"]):
        return None
    factor = _SUFFIX.get(match["suffix"] or "")
    if factor is None:
        return None
    exponent = _bounded_integer(match["exponent"] or "0")
    amount = _bounded_amount(match["whole"], match["decimals"] or "", exponent, factor)
    return -amount if match["sign"] == "-" else amount


def _bounded_integer(text: str) -> int:
    """Parses an integer of any length, bounded by _MAX_EXPONENT on both sides."""
    digits = text.lstrip("+-").lstrip("0")
    size = int(digits or "0") if len(digits) < len(str(_MAX_EXPONENT)) else _MAX_EXPONENT
    return -size if text.startswith("-") else size


def _bounded_amount(whole: str, decimals: str, exponent: int, factor: Fraction) -> Fraction:
    """Returns `whole.decimals` * 10**`exponent` * `factor`, from _MIN_QUANTITY to _MAX_QUANTITY.

    Returns 0 for zero. The texts may have any number of digits.
    """
    digits = (whole + decimals).lstrip("0")
    if not digits:
        return Fraction(0)
    # The number is 0.DIGITS * 10**power, so `power` gives its size. The factor is from 10**-9 (n) to 1024**6
    # (Ei). Beyond this power, no factor brings the number back within the bounds.
    power = len(digits) - len(decimals) + exponent
    decisive_power = len(str(_MAX_QUANTITY)) + len(str(10**9))
    if power > decisive_power:
        return _MAX_QUANTITY
    if power < -decisive_power:
        return _MIN_QUANTITY
    significant = digits[:_DIGITS_READ]
    amount = Fraction(int(significant)) * Fraction(10) ** (power - len(significant)) * factor
    return min(max(math.ceil(amount / _MIN_QUANTITY) * _MIN_QUANTITY, _MIN_QUANTITY), _MAX_QUANTITY)


def exact_quantity(text: str) -> Fraction:
    """Parses a quantity of RESOURCE_PATTERN to the value with which the API server compares it.

    `parse_quantity` caps every number at 2**63 - 1. The API server and this function cap only numbers with a
    binary suffix (k8s.io/apimachinery/pkg/api/resource/quantity.go, ParseQuantity).

    Raises:
        ValueError: the text is not a quantity.
    """
    value = parse_quantity(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or match["exponent"]:  # never for a text of RESOURCE_PATTERN
        return value
    suffix = match["suffix"] or ""
    is_capped = value >= _MAX_QUANTITY
    is_binary = suffix.endswith("i")
    if not is_capped or is_binary:
        return value
    return Fraction(f"{match['whole']}.{match['decimals'] or 0}") * _SUFFIX[suffix]


def parse_bytes(text: str) -> int:
    """Parses a quantity in bytes, rounded down; raises ValueError like parse_quantity."""
    return int(parse_quantity(text))


def parse_duration_s(text: str) -> float:
    """Parses a duration such as `1h30m` or `1500ms` to seconds.

    Raises:
        ValueError: `text` is not a duration.
    """
    if _DURATION.fullmatch(text) is None:
        raise ValueError(f"{text!r} must be a duration such as 30m, 1h30m or 1500ms")
    parts = _DURATION_PART.findall(text)
    return sum(int(amount) * _MILLISECONDS[unit] for amount, unit in parts) / 1000


def format_quantity(value: Fraction) -> str:
    """Formats a number as a quantity, rounded up to thousandths. Whole Gi or Mi get this suffix."""
    if value.denominator != 1:
        return f"{math.ceil(value * 1000)}m"
    for suffix in ("Gi", "Mi"):
        if value and value % _SUFFIX[suffix] == 0:
            return f"{value / _SUFFIX[suffix]}{suffix}"
    return str(value)


def gigabytes_per_s(bytes_per_s: float, digits: int = 0) -> str:
    """Formats a rate for messages, with `digits` decimals."""
    return f"{bytes_per_s / 1e9:.{digits}f} GB/s"


def mebibytes(size: int) -> str:
    """Formats a size as a quantity in Mi, rounded up, so that users can compare it with a limit."""
    return f"{-(-size // 2**20)}Mi"
