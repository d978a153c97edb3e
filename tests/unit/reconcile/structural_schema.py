"""Checks a value against a structural schema like the API server, without CEL rules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def find_problems(schema: Mapping[str, Any], value: Any, path: str = "status") -> Iterator[str]:
    """Yields the path of each part that the schema refuses, with the reason."""
    kind, is_typed = schema["type"], isinstance(value, _TYPES[schema["type"]])
    if not is_typed or isinstance(value, bool) != (kind == "boolean"):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not in the enum"
    if kind == "object":
        yield from _of_object(schema, value, path)
    elif kind == "array":
        yield from _of_list(schema, value, path)
    elif kind == "string":
        yield from _of_text(schema, value, path)
    elif kind != "boolean" and not schema["minimum"] <= value <= schema["maximum"]:
        yield f"{path}: {value} is out of range"


def _of_object(schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> Iterator[str]:
    fields = schema["properties"]
    yield from (f"{path}.{name}: missing" for name in schema.get("required", ()) if name not in value)
    yield from (f"{path}.{name}: unknown" for name in value.keys() - fields.keys())
    for name in value.keys() & fields.keys():
        yield from find_problems(fields[name], value[name], f"{path}.{name}")


def _of_list(schema: Mapping[str, Any], value: Sequence[Any], path: str) -> Iterator[str]:
    if len(value) > schema.get("maxItems", len(value)):
        yield f"{path}: {len(value)} items"
    keys = schema.get("x-kubernetes-list-map-keys", ())
    entries = [tuple(item.get(key) for key in keys) for item in value] if keys else []
    if len(set(entries)) < len(entries):
        yield f"{path}: an entry twice"
    for index, item in enumerate(value):
        yield from find_problems(schema["items"], item, f"{path}[{index}]")


def _of_text(schema: Mapping[str, Any], value: str, path: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{path}: {len(value)} characters"
    if "pattern" in schema and re.search(schema["pattern"].replace("$", r"\Z"), value) is None:
        yield f"{path}: {value!r} does not match"
    if schema.get("format") == "date-time" and _TIME.fullmatch(value) is None:
        yield f"{path}: {value!r} is no time"
