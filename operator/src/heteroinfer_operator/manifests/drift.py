"""Finds differences between a stored child and its manifest, and the patch that removes them. Pure.

A stored object must have all values of the manifest. In a spec it must not have more, because one more key in
a selector or in a rule of a policy can let other pods in. Fields that the API server adds are listed by name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_operator.manifests.service import LEFT_TO_OTHER_PROXIES

_FILLED_IN: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
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
"""By kind: fields of the spec that the API server adds. Kinds that are not listed belong to other projects,
and may have any additional field."""


_ONLY_MADE_SO: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"Service": frozenset({"ipFamilies", "ipFamilyPolicy"})}
)
"""By kind: fields of the spec that are set only in new objects. In an existing object an administrator of the
network, or an older version, chose them."""

_TAKEN_OFF: Final[Mapping[str, frozenset[str]]] = MappingProxyType({"Service": LEFT_TO_OTHER_PROXIES})
"""By kind: labels that disable an object. The operator removes them."""


def find_drift(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON merge patch that makes a stored object match its manifest; {} if it matches."""
    patch: dict[str, Any] = {}
    for key, value in wanted.items():
        if key == "metadata":
            found = _metadata_drift(stored.get(key) or {}, value, _TAKEN_OFF.get(wanted["kind"], frozenset()))
        elif key == "spec" and wanted["kind"] in _FILLED_IN:
            made = _ONLY_MADE_SO.get(wanted["kind"], frozenset())
            compared = {field: each for field, each in value.items() if field not in made}
            found = _spec_drift(stored.get(key) or {}, compared, _FILLED_IN[wanted["kind"]])
        elif says(stored.get(key), value):
            continue
        else:
            found = value
        if found:
            patch[key] = found
    return patch


def as_made(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a manifest for a stored object, with the stored values of fields that only new objects get."""
    spec, stored_spec = wanted.get("spec"), stored.get("spec") or {}
    made = _ONLY_MADE_SO.get(wanted["kind"])
    if not made or spec is None:
        return wanted
    kept = {field: stored_spec[field] for field in sorted(made) if field in stored_spec}
    return {**wanted, "spec": {**{field: v for field, v in spec.items() if field not in made}, **kept}}


def _metadata_drift(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], taken_off: frozenset[str]
) -> dict[str, Any]:
    drift = {key: value for key, value in wanted.items() if not says(stored.get(key), value)}
    extra = dict.fromkeys(sorted(taken_off & (stored.get("labels") or {}).keys()))
    return drift | ({"labels": {**wanted["labels"], **extra}} if extra else {})


def _spec_drift(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], filled_in: frozenset[str]
) -> dict[str, Any]:
    changed = {key: _replacing(stored.get(key), value) for key, value in wanted.items()}
    extra = {key: None for key in stored if key not in wanted and key not in filled_in}
    return {key: value for key, value in changed.items() if value is not _SAME} | extra


_SAME: Final = object()


def _replacing(stored: Any, wanted: Any) -> Any:
    """Returns the part of a merge patch that makes a stored value equal a wanted value, or _SAME."""
    if stored == wanted:
        return _SAME
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        changed = {key: _replacing(stored.get(key), value) for key, value in wanted.items()}
        gone = {key: None for key in stored if key not in wanted}
        return {key: value for key, value in changed.items() if value is not _SAME} | gone
    return wanted


def says(stored: Any, wanted: Any) -> bool:
    """Whether a stored value contains a wanted value; it may contain more.

    Lists are compared item by item and must have the same length: the API server adds defaults to fields, but
    no items to the operator's lists.
    """
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(
            key in stored and says(stored[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(stored, list | tuple)
            and len(stored) == len(wanted)
            and all(says(a, b) for a, b in zip(stored, wanted, strict=True))
        )
    return bool(stored == wanted)
