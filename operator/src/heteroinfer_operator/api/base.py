"""What every model of the resource is made of: the base class, rules said twice, bounded types.

A rule that spans fields is declared once as a Rule: its CEL text goes into the CRD,
its `problem` runs here. Pure; imports nothing of Kubernetes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel, to_snake
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from heteroinfer_operator import quantity

AS_STORED: Final = "as stored"
"""Validation context in which rules are not checked: a rule may be younger than what is stored."""
LIST_MAP_KEYS: Final = "x-kubernetes-list-map-keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRule:
    """A condition over the fields of one model, in CEL and in Python.

    Attributes:
        cel: true for a good value; `self` is the model (x-kubernetes-validations).
        holds: the same in Python.
        message: what was expected and what to do.
        got: printf-style format of what was got, appended to the message; empty for none.
        got_cel: its arguments in CEL.
        got_values: its arguments in Python.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    got: str = ""
    got_cel: tuple[str, ...] = ()
    got_values: Callable[[Any], tuple[object, ...]] = lambda _: ()

    def problem(self, model: object) -> str | None:
        """Returns the message for a bad model, None for a good one."""
        if self.holds(model):
            return None
        return f"{self.message}: got {self.got % self.got_values(model)}" if self.got else self.message

    @property
    def message_cel(self) -> str:
        """Returns CEL for the message with what was got, or nothing if there is nothing to add.

        By `format`, since the API server takes the length of `string(int)` for unbounded
        and refuses it for its cost (seen with Kubernetes 1.35.4).
        """
        text = cel_text(f"{self.message}: got {self.got}")
        return f"{text}.format([{', '.join(self.got_cel)}])" if self.got else ""


def cel_text(text: str) -> str:
    """Returns a CEL string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Model(BaseModel):
    """Base of the spec's models: frozen, camelCase, unknown fields refused, nothing coerced."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[ValidationRule, ...]] = ()
    first_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults that fields had when they came, of those whose default was changed later."""

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        if info.context == AS_STORED:
            return self
        problems = [*self._repeated_keys(), *filter(None, (rule.problem(self) for rule in self.rules))]
        if problems:
            raise PydanticCustomError("rule", "{message}", {"message": "; ".join(problems)})
        return self

    def _repeated_keys(self) -> Iterator[str]:
        # The API server checks the same by x-kubernetes-list-map-keys.
        for name, alias, keys in _keyed_lists(type(self)):
            fields = [to_snake(key) for key in keys]
            entries = Counter(tuple(getattr(item, key) for key in fields) for item in getattr(self, name))
            for entry in (entry for entry, count in entries.items() if count > 1):
                what, got = "/".join(keys), "/".join(map(str, entry))
                yield f"{alias}: expected each {what} once, rename or remove one: got {got} twice"

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Returns the JSON schema with the rules as x-kubernetes-validations."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [
                {"rule": rule.cel, "message": rule.message}
                | ({"messageExpression": rule.message_cel} if rule.message_cel else {})
                for rule in cls.rules
            ]
        return schema

    def changed(self, **fields: Any) -> Self:
        """Returns a copy with other values of some fields, unchecked at run time.

        mypy checks names and types of the fields (tests/typed_changes.py).
        """
        return self.model_copy(update=fields)

    def dump(self) -> dict[str, Any]:
        """Returns the model as JSON values in the resource's own spelling, without nulls."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def given(self) -> dict[str, Any]:
        """Returns as JSON values what differs from the defaults that fields had when they came.

        A field that a later version adds is in no resource of before, and a default that it changes
        is stored in each as it was: neither is a change of what the user asked for.
        """
        found: dict[str, Any] = {}
        dumped = self.model_dump(mode="json", by_alias=True)
        for name, alias, first_default in _first_defaults(type(self)):
            value = getattr(self, name)
            if value != first_default:
                found[alias] = _given(value) if _holds_models(value) else dumped[alias]
        return found


@cache
def _keyed_lists(cls: type[Model]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Returns name, name in the resource and keys of each list whose entries have keys of their own."""
    found = []
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra
        keys = extra.get(LIST_MAP_KEYS) if isinstance(extra, dict) else None
        if isinstance(keys, list):
            found.append((name, str(field.alias), tuple(map(str, keys))))
    return tuple(found)


@cache
def _first_defaults(cls: type[Model]) -> tuple[tuple[str, str, Any], ...]:
    """Returns of each field its name, its name in the resource, and the default that it had when it came."""
    return tuple(
        (
            name,
            str(field.alias),
            cls.first_defaults.get(name, field.get_default(call_default_factory=True)),
        )
        for name, field in cls.model_fields.items()
    )


def _holds_models(value: object) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    return bool(items) and all(isinstance(item, Model) for item in items)


def _given(value: Any) -> Any:
    return value.given() if isinstance(value, Model) else [item.given() for item in value]


class StatusModel(Model):
    """Base of the status's models.

    Unknown fields are dropped, since the status may have been written by a newer
    operator and is computed anew on each reconcile.
    """

    model_config = ConfigDict(extra="ignore")


class When(StrEnum):
    """Whether a feature is used."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


def _integer_to_text(value: object) -> object:
    if isinstance(value, bool):
        return value
    # 2.0 is the integer 2 to the API server.
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return str(int(value)) if whole else value  # type: ignore[call-overload]  # a number, as was just seen


_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)


def _in_seconds(value: datetime) -> datetime:
    """Returns a time in UTC and whole seconds, within a range in which no sum with a duration overflows."""
    if value.tzinfo is None:
        raise ValueError("got a time without a zone, expected UTC")
    # Compared first: a time of year 1 or 9999 cannot be converted from every zone.
    return min(max(value, _EARLIEST), _LATEST).astimezone(UTC).replace(microsecond=0)


def _quantity(pattern: str) -> Any:
    # The validator comes last, so that it runs before the pattern is checked; the
    # integer form has no sign either.
    extra: dict[str, Any] = {"x-kubernetes-int-or-string": True}
    return Field(pattern=pattern, max_length=24, json_schema_extra=extra), BeforeValidator(_integer_to_text)


ByteSize = Annotated[str, *_quantity(quantity.BYTES_PATTERN)]
"""A size in bytes such as 80Gi; quantity.parse_bytes gives the number."""
ResourceQuantity = Annotated[str, *_quantity(quantity.RESOURCE_PATTERN)]
"""An amount of a container's resource such as 500m or 64Gi."""
Duration = Annotated[str, Field(pattern=quantity.DURATION_PATTERN, min_length=2, max_length=20)]
"""A duration such as 30m; quantity.parse_duration_s gives seconds."""
Time = Annotated[
    datetime,
    AfterValidator(_in_seconds),
    PlainSerializer(
        lambda value: value.isoformat(timespec="seconds").replace("+00:00", "Z"),
        return_type=str,
        when_used="json",
    ),
]
"""A moment in UTC, in whole seconds as Kubernetes writes it, so that it equals itself when read back."""
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)]
"""Name of a Kubernetes object."""
MAX_TEXT: Final = 1024
Text = Annotated[str, Field(max_length=MAX_TEXT)]
"""A short text."""
Port = Annotated[int, Field(ge=1024, le=65535)]
"""A TCP port that a process without privileges may open."""


ATOMIC: Final = {"x-kubernetes-list-type": "atomic"}
"""The field setting of a list of objects without a key of their own."""


def map_list(*keys: str) -> Any:
    """Returns the field setting of a list of objects merged by `keys` (x-kubernetes-list-map-keys)."""
    return {"x-kubernetes-list-type": "map", LIST_MAP_KEYS: list(keys)}


def duration_rule(name: str, attribute: str, *, least: str, most: str) -> ValidationRule:
    """Returns the rule that a duration keeps within bounds.

    Args:
        least: the shortest that is allowed.
        most: the longest.
    """
    low, high = quantity.parse_duration_s(least), quantity.parse_duration_s(most)

    def holds(model: object) -> bool:
        text = getattr(model, attribute)
        return text is None or low <= quantity.parse_duration_s(text) <= high

    # The pattern of the field refuses any other form in its own words; the conversion would fail here.
    own, form = f"self.{name}", cel_text(quantity.DURATION_PATTERN)
    return ValidationRule(
        cel=f"!has({own}) || {own} == '' || !{own}.matches({form}) || "
        f"(duration({own}) >= duration('{least}') && duration({own}) <= duration('{most}'))",
        message=f"{name}: expected a duration from {least} to {most}; change it",
        holds=holds,
        got="%s",
        got_cel=(own,),
        got_values=lambda model: (getattr(model, attribute),),
    )
