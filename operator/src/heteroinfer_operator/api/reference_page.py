"""Builds the reference page of the resource: each field with its type, default and meaning. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator import quantity
from heteroinfer_operator.api.resource import HeteroInference

PAGE: Final = "docs/user/reference/api.md"
_HEAD: Final = f"""# API reference

<!-- Generated from heteroinfer_operator/api by `heteroinfer crd --write`; don't edit by hand. -->

All fields of the resource `{names.KIND}`, version `{names.API_GROUP}/{names.API_VERSION}`.
`kubectl explain {names.SHORT_NAME}.spec` prints the same texts. You may leave out every field that the tables
do not list as required.

A *quantity* is a Kubernetes quantity such as `80Gi`, `500m` or `2`. A *duration* is a text such as `30m`,
`1h30m` or `1500ms`. A *time* is a text in RFC 3339, such as `2026-01-02T15:04:05Z`.
"""
_INT32_MAX: Final = 2**31 - 1
_DEFAULT: Final = re.compile(r" ?Default: (.*)[.]$", re.S)


def render_page() -> str:
    """Returns the page as Markdown, with a section for each type that a field has."""
    raw = HeteroInference.model_json_schema(by_alias=True)
    definitions = raw["$defs"]
    sections = [_HEAD]
    for title, name in (("spec", "HeteroInferenceSpec"), ("status", "HeteroInferenceStatus")):
        sections.append(f"## {title}\n")
        sections += [_section(each, definitions, above=title) for each in _types(name, definitions)]
    return "\n".join(sections)


def _types(first: str, definitions: Mapping[str, Any]) -> list[str]:
    """Returns the object types that are reachable from a type, each once, in the order of the fields."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name in found or "properties" not in definitions[name]:
            return
        found.append(name)
        for field in definitions[name]["properties"].values():
            for reference in _references(field):
                visit(reference)

    visit(first)
    return found


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _section(name: str, definitions: Mapping[str, Any], *, above: str) -> str:
    schema = definitions[name]
    required = set(schema.get("required", ()))
    lines = [
        f"### {name}\n",
        f"{_one_line(schema['description'])}\n",
        "| field | type | default | meaning |" if above == "spec" else "| field | type | meaning |",
        "|---|---|---|---|" if above == "spec" else "|---|---|---|",
    ]
    for field, node in schema["properties"].items():
        target = definitions.get(_without_null(node).get("$ref", "").rpartition("/")[2], {})
        described = {"description": target.get("description", ""), **node}
        default, meaning = _default_and_meaning(described, is_required=field in required)
        cells = [f"`{field}`", _type(node, definitions), *([default] if above == "spec" else []), meaning]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default_and_meaning(node: Mapping[str, Any], *, is_required: bool) -> tuple[str, str]:
    meaning = _one_line(node["description"])
    stated = _DEFAULT.search(meaning)
    if stated is not None:
        meaning = meaning[: stated.start()]
    default = node.get("default")
    if is_required:
        return "required", meaning
    if stated is not None:
        return stated[1], meaning
    if default in (None, [], "") or isinstance(default, dict):
        return "", meaning
    return f"`{default if isinstance(default, str) else json.dumps(default)}`", meaning


def _type(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Returns a field's type in words, with links to the sections of object types."""
    node = _without_null(node)
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        target = definitions[name]
        if "properties" in target:
            return f"[{name}](#{name.lower()})"
        return ", ".join(f"`{value}`" if value else '`""`' for value in target["enum"])
    if node["type"] == "array":
        return f"list of {_type(node['items'], definitions)}"
    if node["type"] == "object":
        return f"map of {_type(node['additionalProperties'], definitions)}"
    return _scalar_type(node)


def _scalar_type(node: Mapping[str, Any]) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if node.get("pattern") == quantity.DURATION_PATTERN:
        return "duration"
    if node.get("format") == "date-time":
        return "time"
    if node["type"] == "integer" and node["maximum"] < _INT32_MAX:
        return f"integer, {node['minimum']} to {node['maximum']}"
    return str(node["type"])


def _without_null(node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "anyOf" not in node:
        return node
    (option,) = (each for each in node["anyOf"] if each != {"type": "null"})
    return dict(option)


def _one_line(text: str) -> str:
    return " ".join(text.split())
