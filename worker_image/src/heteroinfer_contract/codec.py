"""Converts frozen dataclasses to JSON and back, and checks each field.

Stdlib only; pure. Supports the types of the contract: str, int, float, bool, enums, optional values, tuples
of one type, and nested dataclasses. Input is not trusted: numbers that JSON or Kubernetes cannot hold are
refused, and every decoded text can be encoded again.
"""

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Self, TypeVar

from heteroinfer_contract.errors import ContractError

T = TypeVar("T")

MAX_INT: Final = 2**53
"""Largest absolute value of a whole number; readers of JSON that use doubles would change larger numbers."""
_SHOWN_CHARS: Final = 200
_KIND_NAMES: Final[Mapping[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
SAME_VERSION: Final = "Use the same version of operator and worker"
"""Fix for a value that this version cannot read."""


def to_json(value: Any) -> str:
    """Returns the canonical JSON text of a contract dataclass: keys sorted, no spaces."""
    return as_json_text(as_json_types(value))


def as_json_types(value: Any) -> Any:
    """Converts a contract value to the types that `json` writes: dataclasses to dicts, tuples to lists."""
    if isinstance(value, tuple | list):
        return [as_json_types(item) for item in value]
    kind: Any = type(value)
    if hasattr(kind, "__dataclass_fields__"):
        fields = _fields_of(kind)
        return {field.name: as_json_types(getattr(value, field.name)) for field in fields}
    return value


class JsonValue:
    """Base of contract dataclasses that are sent or stored as one JSON text."""

    __slots__ = ()
    reads_tolerantly: ClassVar[bool] = False
    """Whether readers ignore unknown fields, and replace bad fields by their default if they have one."""

    def to_json(self) -> str:
        """Returns the canonical JSON text of this value."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses `text` and checks the value; raises ContractError that names the field."""
        value = from_json(cls, text, tolerant=cls.reads_tolerantly)
        value.check()
        return value

    def check(self) -> None:
        """Checks the properties that every reader relies on; raises ContractError that names the field."""


def as_json_text(raw: Mapping[str, Any]) -> str:
    """Returns the canonical JSON text of an object: keys sorted, no spaces."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"))


def from_json(cls: type[T], text: str, *, where: str = "", tolerant: bool = False) -> T:
    """Parses `text` as the dataclass `cls`.

    Args:
        where: name of the value in errors; the class name if empty.
        tolerant: whether to ignore unknown fields, and to replace bad fields by their default if they have
            one.

    Raises:
        ContractError: the text is not JSON, or a field is missing, unknown, of another type or not a finite
            number. The message names the field.
    """
    where = where or cls.__name__
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{where}: must be JSON ({error})") from error
    try:
        return typing.cast("T", _decode(cls, raw, where))
    except ContractError:
        if not tolerant:
            raise
    return typing.cast("T", _decode(cls, _without_bad_fields(cls, raw), where))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A field of a dataclass with its resolved type; resolving a type costs more than decoding a value.

    Attributes:
        is_required: whether the field has no default.
    """

    name: str
    kind: Any
    is_required: bool


@cache
def _fields_of(kind: type) -> tuple[_Field, ...]:
    """Returns the fields of a dataclass that its constructor accepts."""
    hints = typing.get_type_hints(kind)
    return tuple(
        _Field(
            name=field.name,
            kind=hints[field.name],
            is_required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
        if field.init
    )


def _without_bad_fields(kind: Any, raw: Any) -> Any:
    """Removes the fields that a tolerant reader does not know or cannot decode."""
    if typing.get_origin(kind) is tuple and isinstance(raw, list):
        item = typing.get_args(kind)[0]
        return [_without_bad_fields(item, value) for value in raw]
    if not dataclasses.is_dataclass(kind) or not isinstance(raw, Mapping):
        return raw
    good_fields = {}
    for field in _fields_of(typing.cast("type", kind)):
        if field.name not in raw:
            continue
        value = _without_bad_fields(field.kind, raw[field.name])
        try:
            _decode(field.kind, value, field.name)
        except ContractError:
            if not field.is_required:
                continue  # a bad required field stays, so that decoding the whole value names it
        good_fields[field.name] = value
    return good_fields


def from_mapping(cls: type[T], raw: Mapping[str, Any], *, where: str = "") -> T:
    """Converts a parsed JSON object to the dataclass `cls`; raises the same errors as from_json."""
    return typing.cast("T", _decode(cls, raw, where or cls.__name__))


def _decode(kind: Any, raw: Any, where: str) -> Any:
    """Converts a parsed JSON value to the type `kind`; raises ContractError that begins with `where`."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):  # an optional value: a type, or None
        if raw is None:
            return None
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return _decode(inner, raw, where)
    if origin is tuple:
        if not isinstance(raw, list | tuple):
            raise ContractError(f"{where}: must be a list (got {_shortened_repr(raw)}). {SAME_VERSION}")
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, value, f"{where}[{i}]") for i, value in enumerate(raw))
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, raw, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(raw)
        except ValueError as error:
            choices = ", ".join(str(choice.value) for choice in kind)
            raise ContractError(
                f"{where}: must be one of {choices} (got {_shortened_repr(raw)}). {SAME_VERSION}"
            ) from error
    return _decode_scalar(kind, raw, where)


def _decode_scalar(kind: Any, raw: Any, where: str) -> Any:
    """Converts a parsed JSON value to a str, int, float or bool; raises ContractError."""
    # JSON may write a whole number for a float. Python counts True and False as whole numbers.
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) <= MAX_INT:
        return float(raw)
    if not isinstance(raw, kind) or (kind is int and isinstance(raw, bool)):
        raise ContractError(
            f"{where}: must be {_KIND_NAMES[kind]} (got {_shortened_repr(raw)}). {SAME_VERSION}"
        )
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ContractError(f"{where}: must be a finite number (got {raw}). {SAME_VERSION}")
    if isinstance(raw, int) and abs(raw) > MAX_INT:
        raise ContractError(
            f"{where}: must be from -{MAX_INT} to {MAX_INT} (got a number of {raw.bit_length()} bits). "
            f"{SAME_VERSION}"
        )
    # JSON can escape a lone surrogate, but UTF-8 cannot encode it.
    return raw.encode(errors="replace").decode() if isinstance(raw, str) else raw


def at_least(least: float, where: str, **values: float) -> None:
    """Checks that numbers of a decoded value are at least `least`.

    Args:
        where: name of the value in errors.
        values: numbers, by the name of their field.

    Raises:
        ContractError: a number is smaller; the message names its field.
    """
    for name, value in values.items():
        if value < least:
            raise ContractError(f"{where}.{name}: must be at least {least} (got {value})")


def at_most(most: float, where: str, **values: float) -> None:
    """Checks that numbers of a decoded value are at most `most`.

    The other arguments and the error are the same as in `at_least`.
    """
    for name, value in values.items():
        if value > most:
            raise ContractError(f"{where}.{name}: must be at most {most} (got {value})")


def _shortened_repr(raw: Any) -> str:
    """Returns the repr of a value, cut to _SHOWN_CHARS, for messages."""
    text = repr(raw)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _decode_dataclass(kind: Any, raw: Any, where: str) -> Any:
    """Converts a parsed JSON object to a dataclass; raises ContractError."""
    if not isinstance(raw, Mapping):
        raise ContractError(f"{where}: must be a JSON object (got {_shortened_repr(raw)}). {SAME_VERSION}")
    fields = _fields_of(kind)
    unknown = sorted(set(raw) - {field.name for field in fields})
    if unknown:
        raise ContractError(f"{where}: has unknown field {_shortened_repr(unknown[0])}. {SAME_VERSION}")
    values: dict[str, Any] = {}
    for field in fields:
        if field.name in raw:
            values[field.name] = _decode(field.kind, raw[field.name], f"{where}.{field.name}")
        elif field.is_required:
            raise ContractError(f"{where}: field {field.name!r} is missing. {SAME_VERSION}")
    return kind(**values)
