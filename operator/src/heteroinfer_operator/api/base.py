"""Building blocks of the resource's models: the base class, validation rules, and bounded types.

A rule that spans fields is declared once, as a ValidationRule. The API server evaluates the rule's CEL
expression from the CRD, and the operator evaluates the same condition in Python. Pure; imports no Kubernetes
client.
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
"""Validation context of stored resources: all rules are skipped, because a rule may be newer than a
resource."""
LIST_MAP_KEYS: Final = "x-kubernetes-list-map-keys"


RULE_ERROR: Final = "rule"
"""Type of the validation error that a model raises for its rules."""
PROBLEMS: Final = "problems"
"""Key in the context of a RULE_ERROR; its value are pairs of a field's path and a message."""


class RuleReason(StrEnum):
    """Kinds of problem that the API server distinguishes."""

    INVALID = "FieldValueInvalid"
    FORBIDDEN = "FieldValueForbidden"
    REQUIRED = "FieldValueRequired"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRule:
    """A condition over the fields of one model, in CEL and in Python.

    Attributes:
        cel: expression that is true for a valid value; `self` is the model (x-kubernetes-validations).
        holds: Python function that checks the condition of `cel`.
        field: path of the invalid field below the model, such as `network.interface`; "" for the model.
        message: requirement without the name of the field, such as "must be at least 1".
        fix: sentence in the imperative that follows the message; "" for none.
        reason: kind of problem in the API server's answer.
        got: printf-style format of the invalid value, which follows the message; "" for none.
        got_cel: arguments of `got` in CEL.
        got_values: arguments of `got` in Python.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    field: str = ""
    fix: str = ""
    reason: RuleReason = RuleReason.INVALID
    got: str = ""
    got_cel: tuple[str, ...] = ()
    got_values: Callable[[Any], tuple[object, ...]] = lambda _: ()

    def problem(self, model: object) -> str | None:
        """Returns the message for an invalid model; None for a valid one."""
        if self.holds(model):
            return None
        got = self.got % self.got_values(model) if self.got else ""
        return self._format_message(got)

    def _format_message(self, got: str) -> str:
        """Returns the message with the invalid value and the fix, as far as they exist."""
        got_text = f" (got {got})" if got else ""
        return f"{self.message}{got_text}. {self.fix}" if self.fix else f"{self.message}{got_text}"

    @property
    def schema(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        entry = {"rule": self.cel, "message": self._format_message(""), "reason": self.reason.value}
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        if self.got:
            # The expression uses `format` instead of `string(int)`: the API server assumes an unbounded
            # length for `string(int)` and refuses the rule because of its cost (Kubernetes 1.35.4).
            text = cel_text(self._format_message(self.got))
            entry["messageExpression"] = f"{text}.format([{', '.join(self.got_cel)}])"
        return entry


def cel_text(text: str) -> str:
    """Returns a text as a string literal of CEL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Model(BaseModel):
    """Base of the spec's models: frozen, camelCase, refuses unknown fields, and converts no types."""

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
    """For each field whose default a later version changed: its default in the first version with the field,
    by attribute."""

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        """Raises a RULE_ERROR with all broken rules, except for a stored resource."""
        if info.context == AS_STORED:
            return self
        problems = list(self._repeated_keys())
        for rule in self.rules:
            problem = rule.problem(self)
            if problem is not None:
                problems.append((rule.field, problem))
        if problems:
            message = "; ".join(f"{field}: {text}" if field else text for field, text in problems)
            raise PydanticCustomError(RULE_ERROR, "{message}", {"message": message, PROBLEMS: problems})
        return self

    def _repeated_keys(self) -> Iterator[tuple[str, str]]:
        """Yields the field and a message for each set of keys that several entries of a list have."""
        # The API server makes the same check because of x-kubernetes-list-map-keys.
        for name, alias, keys in _lists_with_keys(type(self)):
            attributes = [to_snake(key) for key in keys]
            counts = Counter(tuple(getattr(item, key) for key in attributes) for item in getattr(self, name))
            for values, count in counts.items():
                if count > 1:
                    keys_text, got = "/".join(keys), "/".join(map(str, values))
                    problem = f"each {keys_text} must be unique (got {got} twice). Rename or remove one entry"
                    yield alias, problem

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Adds the rules to the JSON schema as x-kubernetes-validations."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.schema for rule in cls.rules]
        return schema

    def changed(self, **fields: Any) -> Self:
        """Returns a copy with other values of some fields, without validation.

        mypy checks names and types of the fields (tests/typed_changes.py).
        """
        return self.model_copy(update=fields)

    def dump(self) -> dict[str, Any]:
        """Returns the model as JSON values with camelCase keys, without nulls."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def fields_unlike_first_default(self) -> dict[str, Any]:
        """Returns, as JSON, the fields whose values differ from their first default.

        The *first default* of a field is its default in the version that added the field. A hash of the
        result does not change with an upgrade of the operator: resources of an older version lack the fields
        that a newer version adds, and they store the old default of a field whose default changed.
        """
        fields: dict[str, Any] = {}
        all_fields = self.model_dump(mode="json", by_alias=True)
        for name, alias, first_default in _first_defaults(type(self)):
            value = getattr(self, name)
            if value != first_default:
                fields[alias] = _dump_inner_fields(value) if _contains_models(value) else all_fields[alias]
        return fields


@cache
def _lists_with_keys(cls: type[Model]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Returns attribute, field name and keys of each list with x-kubernetes-list-map-keys."""
    lists = []
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra
        keys = extra.get(LIST_MAP_KEYS) if isinstance(extra, dict) else None
        if isinstance(keys, list):
            lists.append((name, str(field.alias), tuple(map(str, keys))))
    return tuple(lists)


@cache
def _first_defaults(cls: type[Model]) -> tuple[tuple[str, str, Any], ...]:
    """Returns the attribute, the JSON name and the first default of each field.

    The first default is that of the first version with the field. Later versions may change a default, but
    stored resources keep the first one.
    """
    return tuple(
        (
            name,
            str(field.alias),
            cls.first_defaults.get(name, field.get_default(call_default_factory=True)),
        )
        for name, field in cls.model_fields.items()
    )


def _contains_models(value: object) -> bool:
    """Reports whether a value is a model or a list of models."""
    items = value if isinstance(value, tuple) else (value,)
    return bool(items) and all(isinstance(item, Model) for item in items)


def _dump_inner_fields(value: Any) -> Any:
    """Returns `fields_unlike_first_default` of a model, or of each model of a list."""
    if isinstance(value, Model):
        return value.fields_unlike_first_default()
    return [item.fields_unlike_first_default() for item in value]


class StatusModel(Model):
    """Base of the status's models.

    Unknown fields are dropped: a newer operator may have written the status, and each reconcile computes
    the whole status again.
    """

    model_config = ConfigDict(extra="ignore")


class When(StrEnum):
    """When a feature is used."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


def _integer_to_text(value: object) -> object:
    """Returns an integer as text; any other value stays the same."""
    if isinstance(value, bool):  # in Python, a bool is an int
        return value
    # A float counts as an integer if it is whole, because the API server accepts 2.0 as the integer 2.
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return str(int(value)) if is_whole else value  # type: ignore[call-overload]  # a number, by the line above


_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)


def _to_whole_seconds(value: datetime) -> datetime:
    """Returns a time in UTC and whole seconds, limited so that the sum with a duration never overflows."""
    if value.tzinfo is None:
        raise ValueError("must have a time zone, such as Z for UTC")
    # The bounds apply before the conversion to UTC, which fails for a time of year 1 or 9999 in some zones.
    return min(max(value, _EARLIEST), _LATEST).astimezone(UTC).replace(microsecond=0)


def _quantity_settings(pattern: str) -> Any:
    """Returns the settings of a field that takes a quantity as a text or as an integer.

    Args:
        pattern: pattern of the text.
    """
    # The validator is the last annotation, so that it runs before the pattern is checked. A negative integer
    # becomes a text with a sign, which the pattern refuses.
    extra: dict[str, Any] = {"x-kubernetes-int-or-string": True}
    return Field(pattern=pattern, max_length=24, json_schema_extra=extra), BeforeValidator(_integer_to_text)


ByteSize = Annotated[str, *_quantity_settings(quantity.BYTES_PATTERN)]
"""A size in bytes such as 80Gi; quantity.parse_bytes gives the number."""
ResourceQuantity = Annotated[str, *_quantity_settings(quantity.RESOURCE_PATTERN)]
"""An amount of a container's resource such as 500m or 64Gi."""
Duration = Annotated[str, Field(pattern=quantity.DURATION_PATTERN, min_length=2, max_length=20)]
"""A duration such as 30m or 1500ms; quantity.parse_duration_s gives seconds."""
Time = Annotated[
    datetime,
    AfterValidator(_to_whole_seconds),
    PlainSerializer(
        lambda value: value.isoformat(timespec="seconds").replace("+00:00", "Z"),
        return_type=str,
        when_used="json",
    ),
]
"""A time in UTC and whole seconds, as Kubernetes stores times: a stored time is equal to the written time."""
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)]
"""Name of a Kubernetes object."""
MAX_TEXT: Final = 1024
Text = Annotated[str, Field(max_length=MAX_TEXT)]
"""A text of at most MAX_TEXT characters."""
Port = Annotated[int, Field(ge=1024, le=65535)]
"""A TCP port that an unprivileged process may open."""


ATOMIC: Final = {"x-kubernetes-list-type": "atomic"}
"""Schema setting of a list that each write replaces as a whole."""


def map_list(*keys: str) -> Any:
    """Returns the schema setting of a list whose entries are identified by these keys.

    The setting is x-kubernetes-list-map-keys.
    """
    return {"x-kubernetes-list-type": "map", LIST_MAP_KEYS: list(keys)}


def duration_rule(name: str, attribute: str, *, least: str, most: str) -> ValidationRule:
    """Returns the rule that a duration must be between `least` and `most`.

    Args:
        name: name of the field in the resource.
        attribute: name of the field in Python.
        least: smallest valid duration.
        most: largest valid duration.
    """
    least_s, most_s = quantity.parse_duration_s(least), quantity.parse_duration_s(most)

    def holds(model: object) -> bool:
        text = getattr(model, attribute)
        return text is None or least_s <= quantity.parse_duration_s(text) <= most_s

    # The field's pattern already refuses a text that is not a duration. Without `matches`, the function
    # `duration` would fail for such a text, and the API server would report this second error, too.
    field_cel, pattern = f"self.{name}", cel_text(quantity.DURATION_PATTERN)
    return ValidationRule(
        field=name,
        cel=f"!has({field_cel}) || {field_cel} == '' || !{field_cel}.matches({pattern}) || "
        f"(duration({field_cel}) >= duration('{least}') && duration({field_cel}) <= duration('{most}'))",
        message=f"must be between {least} and {most}",
        holds=holds,
        got="%s",
        got_cel=(field_cel,),
        got_values=lambda model: (getattr(model, attribute),),
    )
