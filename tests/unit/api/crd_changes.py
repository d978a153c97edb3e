"""Finds changes between two CRDs that can break stored objects or the manifests and programs of users.

The kinds of change are those of crdify (sigs.k8s.io/crdify) with the settings of Gateway API: descriptions
may change, and an enum may get new values.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_UPPER: Final = ("maximum", "maxLength", "maxItems", "maxProperties")
_LOWER: Final = ("minimum", "minLength", "minItems", "minProperties")
_EQUAL: Final = (
    "type",
    "pattern",
    "format",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "default",
)


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the changes of a CRD that are not additions: a line with path and kind for each."""
    found = [
        f"names.{key}" for key, value in old["spec"]["names"].items() if new["spec"]["names"][key] != value
    ]
    found += [f"{key}" for key in ("group", "scope") if new["spec"][key] != old["spec"][key]]
    versions = {version["name"]: version for version in new["spec"]["versions"]}
    for version in old["spec"]["versions"]:
        now = versions.get(version["name"])
        if now is None or not now["served"]:
            found.append(f"version {version['name']}: not served")
            continue
        found += _schema_changes(_schema(version), _schema(now), "")
    return sorted(found)


def _schema(version: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _schema_changes(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _own_changes(old, new, path)
    for name, field in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{path}.{name}: removed"
        else:
            yield from _schema_changes(field, new["properties"][name], f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if key in old and key in new:
            yield from _schema_changes(old[key], new[key], path + suffix)


def _own_changes(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yields the changes of a node without its fields and items."""
    yield from (f"{path}: {key}" for key in _EQUAL if key in old and old[key] != new.get(key))
    if "pattern" in new and "pattern" not in old:
        yield f"{path}: pattern added"
    upper = [key for key in _UPPER if key in new and _is_less(new[key], old.get(key))]
    lower = [key for key in _LOWER if key in new and _is_more(new[key], old.get(key))]
    yield from (f"{path}: {key} tightened" for key in (*upper, *lower))
    if "enum" in new and not {*old.get("enum", ["any"])} <= {*new["enum"]}:
        yield f"{path}: enum value removed"
    needed = {*new.get("required", ())} - {*old.get("required", ())}
    yield from (f"{path}.{name}: required" for name in sorted(needed & {*old.get("properties", {})}))


def _is_less(new: float, old: float | None) -> bool:
    return old is None or new < old


def _is_more(new: float, old: float | None) -> bool:
    return new > old if old is not None else new > 0
