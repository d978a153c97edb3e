"""Damage by other users: webhooks that change pods, damaged statuses, forged objects."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from heteroinfer_contract import names

Webhook: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
_CRD: Final = yaml.safe_load((Path(__file__).parents[3] / "crds/heteroinference.yaml").read_text())
_SCHEMA: Final = _CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
_TIMES: Final = (
    "9999-12-31T23:59:59Z",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00Z",
    "2026-01-01t00:00:00z",
    "2125-01-01T00:00:00Z",
    "1970-01-01T00:00:00Z",
)
_TEXTS: Final = ("", "a b", "\x1b[31mred", "True", "0", "x" * 64)
_NUMBERS: Final = (0, 1, 7, 2**31 - 1, 10**15 - 1, 2**53)
_OTHER_OWNER: Final = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "name": "x",
    "uid": "uid-of-another",
    "controller": True,
}
Path_: TypeAlias = tuple[str | int, ...]


def _with(pod: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {**pod, "metadata": {**pod["metadata"], **metadata}}


def without_label(pod: dict[str, Any]) -> dict[str, Any]:
    """Removes the label by which the operator watches pods."""
    labels = {key: value for key, value in pod["metadata"]["labels"].items() if key != names.LABEL_RESOURCE}
    return _with(pod, labels=labels)


def without_labels(pod: dict[str, Any]) -> dict[str, Any]:
    """Removes all labels."""
    return _with(pod, labels={})


def without_owner(pod: dict[str, Any]) -> dict[str, Any]:
    """Removes the owner."""
    return _with(pod, ownerReferences=[])


def with_another_controller(pod: dict[str, Any]) -> dict[str, Any]:
    """Sets another owner as the controller."""
    return _with(pod, ownerReferences=[_OTHER_OWNER])


def without_annotations(pod: dict[str, Any]) -> dict[str, Any]:
    """Removes all annotations; the operator still recognizes the pod."""
    return _with(pod, annotations={})


HIDING: Final[tuple[Webhook, ...]] = (
    without_label,
    without_labels,
    without_owner,
    with_another_controller,
)
"""Webhooks whose pods the operator does not recognize as its own."""


def damages(status: dict[str, Any]) -> list[tuple[Path_, Any]]:
    """Yields each leaf of a status with each value that the CRD's schema accepts there."""
    return [
        (path, value)
        for path, before in _leaves(status)
        for value in _values(_schema(path))
        if value != before
    ]


def with_damage(status: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    """Replaces the value at a path of the status."""
    damaged = copy.deepcopy(status)
    parent: Any = damaged
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = value
    return damaged


def _leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, index))
    else:
        yield path, value


def _schema(path: Path_) -> dict[str, Any]:
    schema: dict[str, Any] = _SCHEMA
    for part in path:
        schema = schema["items"] if isinstance(part, int) else schema.get("properties", {}).get(part, {})
    return schema


def _values(schema: dict[str, Any]) -> list[Any]:
    if schema.get("format") == "date-time":
        return [*_TIMES]
    if "enum" in schema:
        return [*schema["enum"]]
    match schema.get("type"):
        case "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", 10**9)
            texts = [text for text in _TEXTS if least <= len(text) <= most]
            return [text for text in texts if re.search(schema.get("pattern", ""), text)]
        case "integer" | "number":
            least, most = schema.get("minimum", -1), schema.get("maximum", 10**20)
            return [number for number in _NUMBERS if least <= number <= most]
        case "boolean":
            return [True, False]
    return []
