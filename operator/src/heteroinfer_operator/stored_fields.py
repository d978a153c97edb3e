"""Reads fields of stored objects, and JSON from the chart, with type checks. Pure.

The API server does not check all objects against the schemas that this operator assumes. So the operator
reads their fields with these functions: a wrong type raises UnreadableError here, and not a TypeError later.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.quantity import parse_quantity

_MAX_INTEGER: Final = 2**63 - 1
EARLIEST: Final = datetime(2, 1, 1, tzinfo=UTC)
"""Earliest time that is read. This time and _LATEST are well within the range of `datetime`, so that code can
add waits."""
_LATEST: Final = datetime(9998, 1, 1, tzinfo=UTC)
"""Latest time that is read."""
_YEAR_0: Final = "0000-"
"""Beginning of a time in the year 0, which Kubernetes stores and `datetime` does not support."""
_VERSION_DIGITS: Final = 20
"""Maximum number of digits of a resourceVersion, a number of 64 bits."""
_SHOWN: Final = 60
"""Maximum number of characters of a wrong value that a message quotes."""


class UnreadableError(HeteroInferError):
    """A field of a stored object has an unexpected type. The operator ignores such an object."""

    reason = "Unreadable"


def _unreadable(field: str, value: object, expected: str) -> UnreadableError:
    # Do not quote a list or an object, because its nesting may be too deep for repr().
    nests = isinstance(value, list | tuple | Mapping)
    shown = f"a {type(value).__name__}" if nests else repr(value)[:_SHOWN]
    return UnreadableError(f"{field} must be {expected} (got {shown})")


def as_object(value: object, field: str) -> Mapping[str, Any]:
    """Returns an object, empty for null; raises UnreadableError."""
    if value is None:
        return {}
    if isinstance(value, dict):  # JSON has only dicts, and a check for dict is much faster
        return value
    if not isinstance(value, Mapping):
        raise _unreadable(field, value, "an object")
    return value


def as_objects(value: object, field: str) -> Sequence[Mapping[str, Any]]:
    """Returns a list of objects, empty for null; raises UnreadableError."""
    items = _as_list(value, field)
    for item in items:
        if not isinstance(item, dict | Mapping):  # JSON has only dicts, which are checked much faster
            raise _unreadable(field, item, "an object")
    return items


def as_text(value: object, field: str) -> str:
    """Returns a text, "" for null; raises UnreadableError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _unreadable(field, value, "a text")
    return value


def as_name(value: object, field: str) -> str:
    """Returns a text that must not be empty; raises UnreadableError."""
    name = as_text(value, field)
    if not name:
        raise _unreadable(field, value, "a text that is not empty")
    return name


def as_texts(value: object, field: str) -> tuple[str, ...]:
    """Returns a list of texts, empty for null; raises UnreadableError."""
    return tuple(as_text(item, field) for item in _as_list(value, field))


def as_text_map(value: object, field: str) -> Mapping[str, str]:
    """Returns texts by name, such as labels, empty for null; raises UnreadableError."""
    texts = as_object(value, field)
    for name, text in texts.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise _unreadable(f"{field}.{name}", text, "a text")
    return texts


def as_integer(value: object, field: str) -> int:
    """Returns an integer of 64 bits, 0 for null; raises UnreadableError."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_INTEGER:
        raise _unreadable(field, value, "an integer of 64 bits")
    return value


def as_moment(value: object, field: str) -> datetime | None:
    """Returns a time in UTC, None for null or ""; raises UnreadableError.

    A time outside the years 2 to 9997 becomes the nearest time within these years: Go, and so Kubernetes,
    stores the years 0 to 9999 with any offset.
    """
    text = as_text(value, field)
    if not text:
        return None
    if text.startswith(_YEAR_0):
        return EARLIEST
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _unreadable(field, value, "a time such as 2026-01-31T12:00:00Z") from None
    # Compare without the time zone, because a conversion to UTC may leave the range of `datetime`.
    without_zone = moment.replace(tzinfo=UTC)
    if not EARLIEST < without_zone < _LATEST:
        return min(max(without_zone, EARLIEST), _LATEST)
    return without_zone if moment.tzinfo is None else moment.astimezone(UTC)


def as_amounts(value: object, field: str) -> dict[str, float]:
    """Returns quantities by name as numbers, empty for null; raises UnreadableError."""
    return {name: _as_amount(amount, f"{field}.{name}") for name, amount in as_object(value, field).items()}


def _as_amount(value: object, field: str) -> float:
    """Reads a quantity as a number; raises UnreadableError for another type."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        try:
            return float(parse_quantity(value))
        except ValueError:
            pass
    raise _unreadable(field, value, "a quantity such as 80Gi, 500m or 2")


def version_number(text: str) -> int:
    """Returns a resourceVersion as a number that increases with each change, or 0 if it is not a number.

    Kubernetes guarantees such numbers since KEP-5504 (1.35), and used them before. With an API server that
    does not use numbers, caches keep the newest event of the watch, and a write counts once the watch shows
    the write.
    """
    is_number = text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS
    return int(text) if is_number else 0


def _as_list(value: object, field: str) -> Sequence[Any]:
    """Returns a list, empty for null; raises UnreadableError."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _unreadable(field, value, "a list")
    return value


def read_json_parts(text: str, parts: Collection[str]) -> dict[str, Any]:
    """Parses a JSON object that the chart sets in an environment variable; "" gives an empty object.

    Raises:
        ValueError: the text is not a JSON object, or has a key that is not in `parts`. The message quotes the
            beginning of the text.
    """
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON (got {text[:200]!r})") from error
    if not isinstance(parsed, dict) or parsed.keys() - set(parts):
        raise ValueError(f"must be an object with only the keys {', '.join(parts)} (got {text[:200]!r})")
    return parsed
