"""Kubernetes quantities (`80Gi`, `500m`) and durations (`1h30m`) to numbers and back.

Pure. Imports nothing of this project.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

_SUFFIX: Final = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{name: Fraction(1000) ** (i + 1) for i, name in enumerate("kMGTP")},
    **{f"{name}i": Fraction(1024) ** (i + 1) for i, name in enumerate("KMGTP")},
}

BYTES_PATTERN: Final = r"^[0-9]{1,15}([.][0-9]{1,3})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""A size in bytes, as the schema of the resource has it."""
RESOURCE_PATTERN: Final = r"^[0-9]{1,15}([.][0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Any resource of a container, as the schema of the resource has it."""
DURATION_PATTERN: Final = r"^([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$"
"""A duration, as the schema of the resource has it (together with a length of at least 2)."""

_QUANTITY = re.compile(r"([0-9]{1,15}(?:[.][0-9]{1,3})?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_DURATION = re.compile(r"(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")


def parse_quantity(text: str) -> Fraction:
    """Returns the exact number that a Kubernetes quantity means.

    Raises:
        ValueError: `text` is not a quantity; exponents and signs are not accepted.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"got {text!r}, expected a quantity such as 80Gi, 512Mi or 2")
    number, suffix = match.groups()
    return Fraction(Decimal(number)) * _SUFFIX[suffix or ""]


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


def format_bytes(size: int) -> str:
    """Returns a size as a quantity in Mi, rounded up: what a person compares with a limit."""
    return f"{-(-size // 2**20)}Mi"
