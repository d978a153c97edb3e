"""Finds differences between a stored object and its manifest, and builds the patch against them. Pure.

A stored object must have all values of the manifest. The stored spec must not have more values: one more key
in a selector or in a rule of a policy can let other pods in. Exceptions are the fields that the API server
adds.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_operator.manifests.service import LEFT_TO_OTHER_PROXIES

_FIELDS_OF_API_SERVER: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "Service": frozenset(
            {
                "clusterIP",
                "clusterIPs",
                "internalTrafficPolicy",
                "ipFamilies",
                "ipFamilyPolicy",
                "sessionAffinity",
                "sessionAffinityConfig",
                "trafficDistribution",
            }
        ),
        "NetworkPolicy": frozenset(),
        "PodDisruptionBudget": frozenset(),
    }
)
"""Fields of the spec that the API server adds, by kind. The kinds of gang schedulers are defined by other
projects, so their objects may have any additional field."""


_SET_ON_CREATION_ONLY: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"Service": frozenset({"ipFamilies", "ipFamilyPolicy"})}
)
"""Fields of the spec that are set only in new objects, by kind. In an existing object, these fields stay,
because an administrator of the network, or an older version of the operator, chose their values."""

_FORBIDDEN_LABELS: Final[Mapping[str, frozenset[str]]] = MappingProxyType({"Service": LEFT_TO_OTHER_PROXIES})
"""Labels that disable an object, by kind. The operator removes them."""


def find_drift(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON merge patch that makes a stored object match its manifest; {} if it matches."""
    kind = wanted["kind"]
    patch: dict[str, Any] = {}
    difference: Any
    for key, value in wanted.items():
        if key == "metadata":
            forbidden_labels = _FORBIDDEN_LABELS.get(kind, frozenset())
            difference = _find_metadata_drift(stored.get(key) or {}, value, forbidden_labels)
        elif key == "spec" and kind in _FIELDS_OF_API_SERVER:
            creation_fields = _SET_ON_CREATION_ONLY.get(kind, frozenset())
            compared_fields = {field: each for field, each in value.items() if field not in creation_fields}
            difference = _find_spec_drift(stored.get(key) or {}, compared_fields, _FIELDS_OF_API_SERVER[kind])
        else:
            difference = None if contains_value(stored.get(key), value) else value
        if difference:
            patch[key] = difference
    return patch


def with_creation_fields(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a manifest that keeps the stored values of fields that are set only in new objects."""
    spec, stored_spec = wanted.get("spec"), stored.get("spec") or {}
    creation_fields = _SET_ON_CREATION_ONLY.get(wanted["kind"])
    if not creation_fields or spec is None:
        return wanted
    other_fields = {field: value for field, value in spec.items() if field not in creation_fields}
    stored_fields = {field: stored_spec[field] for field in sorted(creation_fields) if field in stored_spec}
    return {**wanted, "spec": {**other_fields, **stored_fields}}


def _find_metadata_drift(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], forbidden: frozenset[str]
) -> dict[str, Any]:
    """Returns the merge patch of an object's metadata.

    The patch sets values that are missing or different, and removes the labels in `forbidden`, which disable
    the object.
    """
    drift = {key: value for key, value in wanted.items() if not contains_value(stored.get(key), value)}
    forbidden_labels = sorted(forbidden & (stored.get("labels") or {}).keys())
    if forbidden_labels:
        removals = dict.fromkeys(forbidden_labels)  # a merge patch removes a key by the value None
        drift["labels"] = {**wanted["labels"], **removals}
    return drift


def _find_spec_drift(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], added_by_server: frozenset[str]
) -> dict[str, Any]:
    """Returns the merge patch of an object's spec.

    The patch sets values that differ, and removes fields that the manifest lacks. Fields in `added_by_server`
    stay.
    """
    changed = {key: _patch_between(stored.get(key), value) for key, value in wanted.items()}
    removals = {key: None for key in stored if key not in wanted and key not in added_by_server}
    return {key: value for key, value in changed.items() if value is not _SAME} | removals


_SAME: Final = object()
"""Result of `_patch_between` for equal values. (None would remove the field.)"""


def _patch_between(stored: Any, wanted: Any) -> Any:
    """Returns the part of a merge patch that makes a stored value equal a wanted value, or _SAME."""
    if stored == wanted:
        return _SAME
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        changed = {key: _patch_between(stored.get(key), value) for key, value in wanted.items()}
        removals = {key: None for key in stored if key not in wanted}
        return {key: value for key, value in changed.items() if value is not _SAME} | removals
    return wanted


def contains_value(stored: Any, wanted: Any) -> bool:
    """Reports whether a stored value contains a wanted value. A stored object may have more keys.

    Lists are compared item by item and must have the same length: the API server adds defaults to objects,
    but no items to the operator's lists.
    """
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(
            key in stored and contains_value(stored[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(stored, list | tuple)
            and len(stored) == len(wanted)
            and all(
                contains_value(item, wanted_item) for item, wanted_item in zip(stored, wanted, strict=True)
            )
        )
    return bool(stored == wanted)
