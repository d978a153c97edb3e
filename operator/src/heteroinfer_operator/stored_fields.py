"""Reads fields of stored objects, and JSON of the chart, as the types that they must have. Pure.

The API server checks most objects, but not all of them against the schema that this operator was written
for. So each field of another party's object is read here: a wrong type is an UnreadableError, never a
TypeError later.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.quantity import parse_quantity

_MOST_INTEGER: Final = 2**63 - 1
EARLIEST: Final = datetime(2, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9998, 1, 1, tzinfo=UTC)
"""A year from what `datetime` can hold: a time zone or a wait may be added to a moment that was read."""
_YEAR_0: Final = "0000-"
"""Kubernetes stores this year, and `datetime` has none."""
_VERSION_DIGITS: Final = 20
_SHOWN: Final = 60


class UnreadableError(HeteroInferError):
    """A stored object has a field of another type than expected: leave the object out."""

    reason = "Unreadable"


def _unreadable(field: str, value: object, expected: str) -> UnreadableError:
    # A list or object may nest too deep for repr().
    nests = isinstance(value, list | tuple | Mapping)
    shown = f"a {type(value).__name__}" if nests else repr(value)[:_SHOWN]
    return UnreadableError(f"{field}: got {shown}, expected {expected}")


def as_object(value: object, field: str) -> Mapping[str, Any]:
    """Returns an object, empty if there is none; raises UnreadableError."""
    if value is None:
        return {}
    if isinstance(value, dict):  # far cheaper than a Mapping, and all that JSON has
        return value
    if not isinstance(value, Mapping):
        raise _unreadable(field, value, "an object")
    return value


def as_objects(value: object, field: str) -> Sequence[Mapping[str, Any]]:
    """Returns a list of objects, empty if there is none; raises UnreadableError."""
    found = _as_list(value, field)
    for item in found:
        if not isinstance(item, dict | Mapping):
            raise _unreadable(field, item, "an object")
    return found


def as_text(value: object, field: str) -> str:
    """Returns a text, "" if there is none; raises UnreadableError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _unreadable(field, value, "a text")
    return value


def as_name(value: object, field: str) -> str:
    """Returns a text that must be there; raises UnreadableError."""
    name = as_text(value, field)
    if not name:
        raise _unreadable(field, value, "a text that is not empty")
    return name


def as_texts(value: object, field: str) -> tuple[str, ...]:
    """Returns a list of texts, empty if there is none; raises UnreadableError."""
    return tuple(as_text(item, field) for item in _as_list(value, field))


def as_text_map(value: object, field: str) -> Mapping[str, str]:
    """Returns texts by name, such as labels; empty if there are none; raises UnreadableError."""
    found = as_object(value, field)
    for name, text in found.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise _unreadable(f"{field}.{name}", text, "a text")
    return found


def as_integer(value: object, field: str) -> int:
    """Returns an integer of 64 bits, 0 if there is none; raises UnreadableError."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST_INTEGER:
        raise _unreadable(field, value, "an integer of 64 bits")
    return value


def as_moment(value: object, field: str) -> datetime | None:
    """Returns a time in UTC, None if there is none; raises UnreadableError.

    A time outside of the years 2 to 9997 becomes the nearest time inside: Go stores the years 0 to 9999, with
    any offset.
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
    # Compared without the zone first: it may lead out of what `datetime` can hold.
    bare = moment.replace(tzinfo=UTC)
    if not EARLIEST < bare < _LATEST:
        return min(max(bare, EARLIEST), _LATEST)
    return bare if moment.tzinfo is None else moment.astimezone(UTC)


def as_amounts(value: object, field: str) -> dict[str, float]:
    """Returns quantities by name as numbers, empty if there are none; raises UnreadableError."""
    return {name: _as_amount(amount, f"{field}.{name}") for name, amount in as_object(value, field).items()}


def _as_amount(value: object, field: str) -> float:
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        try:
            return float(parse_quantity(value))
        except ValueError:
            pass
    raise _unreadable(field, value, "a quantity such as 80Gi, 500m or 2")


def version_number(text: str) -> int:
    """Returns a resourceVersion as a number that grows with each change, or 0 for any other text.

    Kubernetes counts since KEP-5504 (1.35), and did so before without a promise. An API server that does not
    count is served, too: the last event of the watch stands, and a write is known once the watch shows it.
    """
    counts = text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS
    return int(text) if counts else 0


def _as_list(value: object, field: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _unreadable(field, value, "a list")
    return value


def read_json_parts(text: str, parts: Collection[str]) -> dict[str, Any]:
    """Returns the JSON object that the chart gives in an environment variable; an empty one for "".

    Raises:
        ValueError: the text is no JSON object, or has a part of another name. The message has the text.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got {text[:200]!r}, expected JSON") from error
    if not isinstance(found, dict) or found.keys() - set(parts):
        raise ValueError(f"got {text[:200]!r}, expected an object with {', '.join(parts)}")
    return found
