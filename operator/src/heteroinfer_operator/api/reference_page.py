"""Builds the reference page of the resource: each field with its type, default and meaning. Pure."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator import quantity
from heteroinfer_operator.api.resource import HeteroInference

PAGE: Final = "docs/user/reference/api.md"
_HEAD: Final = f"""# API reference

<!-- Generated from heteroinfer_operator/api by `heteroinfer crd --write`; don't edit by hand. -->

All fields of the resource `{names.KIND}`, version `{names.API_GROUP}/{names.API_VERSION}`.
`kubectl explain {names.SHORT_NAME}.spec` prints the same texts. You must set only the fields that the tables
mark as required.

A *quantity* is a Kubernetes quantity such as `80Gi`, `500m` or `2`. A *duration* is a text such as `30m`,
`1h30m` or `1500ms`. A *time* is a text in RFC 3339, such as `2026-01-02T15:04:05Z`.

A default in `code` is a value that the field gets. Other defaults are descriptions; *none* means that nothing
is set. A field that is *immutable* keeps the value with which the resource was created. *Rules* are checks
(CEL) that concern several fields or need a computation. The API server makes these checks when you apply a
resource.
"""
_INT32_MAX: Final = 2**31 - 1
_DEFAULT: Final = re.compile(r" ?Default: (.*)[.]$", re.S)
_VALUE: Final = re.compile(r"(?!(?:none|empty)$)[\w./:-]+")
"""Pattern of a stated default that is a value, not a description."""
_RULES: Final = "x-kubernetes-validations"


def render_page() -> str:
    """Returns the page as Markdown, with a section for each type that a field has."""
    raw = HeteroInference.model_json_schema(by_alias=True)
    definitions = raw["$defs"]
    sections = [_HEAD]
    for title, name in (("spec", "HeteroInferenceSpec"), ("status", "HeteroInferenceStatus")):
        sections.append(f"## {title}\n")
        sections += [
            _render_section(type_name, definitions, above=title)
            for type_name in _reachable_types(name, definitions)
        ]
    return "\n".join(sections)


def _reachable_types(first: str, definitions: Mapping[str, Any]) -> list[str]:
    """Returns the object types that are reachable from a type, each once, in the order of the fields."""
    names: list[str] = []

    def visit(name: str) -> None:
        """Adds a type and the types of its fields, unless the list has the type already."""
        if name in names or "properties" not in definitions[name]:
            return
        names.append(name)
        for field in definitions[name]["properties"].values():
            for reference in _referenced_names(field):
                visit(reference)

    visit(first)
    return names


def _referenced_names(node: object) -> Iterator[str]:
    """Yields the names of the definitions that a part of a schema refers to."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from _referenced_names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _referenced_names(value)


def _render_section(name: str, definitions: Mapping[str, Any], *, above: str) -> str:
    """Returns the section of one type in Markdown: its description, and a table of its fields.

    Args:
        above: heading above the section, "spec" or "status". Only tables of the spec have a column of
            defaults.
    """
    schema = definitions[name]
    required = set(schema.get("required", ()))
    rules = schema.get(_RULES, ())
    # Only a rule that makes a field immutable compares the field with its stored value (`oldSelf`).
    immutable = {rule["fieldPath"].removeprefix(".") for rule in rules if "oldSelf" in rule["rule"]}
    lines = [
        f"### {name}\n",
        f"{_join_lines(schema['description'])}\n",
        "| field | type | default | meaning |" if above == "spec" else "| field | type | meaning |",
        "|---|---|---|---|" if above == "spec" else "|---|---|---|",
    ]
    for field, node in schema["properties"].items():
        # A field without a description of its own gets the description of its type.
        type_schema = definitions.get(_without_null(node).get("$ref", "").rpartition("/")[2], {})
        node_with_description = {"description": type_schema.get("description", ""), **node}
        default, meaning = _default_and_meaning(node_with_description, is_required=field in required)
        cells = [
            f"`{field}`",
            _describe_type(node, definitions) + (", immutable" if field in immutable else ""),
            *([default] if above == "spec" else []),
            meaning,
        ]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    if rules:
        lines += ["", "Rules:", "", *(f"- {_describe_rule(rule)}" for rule in rules)]
    return "\n".join(lines) + "\n"


def _describe_rule(rule: Mapping[str, str]) -> str:
    """Returns the field and the text of a rule."""
    field = rule.get("fieldPath", "").removeprefix(".")
    return f"{f'`{field}`' if field else 'this object'}: {rule['message']}"


def _default_and_meaning(node: Mapping[str, Any], *, is_required: bool) -> tuple[str, str]:
    """Returns the default and the meaning of a field, for the cells of the table.

    A default that the description states ("Default: ...") takes precedence over the default of the schema.
    The meaning is the description without this statement.
    """
    meaning = _join_lines(node["description"])
    stated_default = _DEFAULT.search(meaning)
    if stated_default is not None:
        meaning = meaning[: stated_default.start()]
    if is_required:
        return "required", meaning
    if stated_default is not None:
        text = stated_default[1]
        return f"`{text}`" if _VALUE.fullmatch(text) else text, meaning
    value = node.get("default")
    is_empty_or_object = value in (None, [], "") or isinstance(value, dict)
    if is_empty_or_object:
        return "", meaning
    return f"`{value if isinstance(value, str) else json.dumps(value)}`", meaning


def _describe_type(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Returns the type of a field in words, with links to the sections of object types."""
    node = _without_null(node)
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        target = definitions[name]
        if "properties" in target:
            return f"[{name}](#{name.lower()})"
        return _describe_enum(target["enum"])
    if node["type"] == "array":
        return f"list of {_describe_type(node['items'], definitions)}"
    if node["type"] == "object":
        return f"map of {_describe_type(node['additionalProperties'], definitions)}"
    return _describe_scalar(node)


def _describe_enum(values: Iterable[str]) -> str:
    """Returns the allowed values of a field, separated by commas."""
    return ", ".join(f"`{value}`" if value else '`""`' for value in values)


def _describe_scalar(node: Mapping[str, Any]) -> str:
    """Returns in words the type of a field that has no fields of its own."""
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if node.get("pattern") == quantity.DURATION_PATTERN:
        return "duration"
    if node.get("format") == "date-time":
        return "time"
    if "enum" in node:
        return _describe_enum(node["enum"])
    if node["type"] == "integer" and node["maximum"] < _INT32_MAX:
        return f"integer, {node['minimum']} to {node['maximum']}"
    return str(node["type"])


def _without_null(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a field's value if the field is set."""
    if "anyOf" not in node:
        return node
    (option,) = (option for option in node["anyOf"] if option != {"type": "null"})
    return dict(option)


def _join_lines(text: str) -> str:
    """Returns a text on one line."""
    return " ".join(text.split())
