"""Which commits of a cache resources use, so that a fetch may remove the others. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import HUB_SCHEME, CacheCleanup, is_commit
from heteroinfer_operator.api import HeteroInferenceSpec, ModelPhase, parse_stored_spec
from heteroinfer_operator.cluster import Manifest, ResourceObservation, ResourceView
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.revision_record import KEY as REVISION_KEY

DEFAULT_KEEP: Final = 2
"""Commits that stay in a claim that was made for the resource."""
_CLAIM_SCHEME: Final = "pvc://"
_COMMIT_OF_CLAIM: Final = re.compile(r"pvc://[^/]+/[^/]+/([0-9a-f]{40,64})/?")


def claim_to_clean(resource: ResourceView) -> str:
    """Returns the claim of a resource from which a fetch that begins now may remove commits, or "".

    It costs little: it is asked at each reconcile.
    """
    uri = _at(resource.spec, "model", "uri")
    settled = _at(resource.status, "model", "phase") == ModelPhase.READY.value
    is_current = resource.status.get("observedGeneration") == resource.generation
    if not (isinstance(uri, str) and uri.startswith(HUB_SCHEME)) or (settled and is_current):
        return ""
    try:
        spec = parse_stored_spec(resource.spec)
    except SpecError:
        return ""
    cache = spec.model.cache
    if cache is None or _keep(spec) is None:
        return ""
    return cache.claim_name or identity.model_claim(Owner(key=resource.key, uid=resource.uid), cache)


def find_cleanup(
    spec: HeteroInferenceSpec, observation: ResourceObservation, now: datetime
) -> CacheCleanup | None:
    """Returns what a fetch may remove from its cache; None if it is not known which commits are in use."""
    keep = _keep(spec)
    if keep is None or observation.neighbours is None:
        return None
    own = _use(observation.resource, observation.objects)
    uses = [own, *(_use(each.resource, each.objects) for each in observation.neighbours)]
    waiting = [_waits(each.resource, spec.model.uri) for each in observation.neighbours]
    known = [use for use in uses if use is not None]
    if len(known) < len(uses) or any(waiting):
        return None
    return CacheCleanup(keep=keep, in_use=tuple(sorted(set().union(*known))), listed_s=now.timestamp())


def _keep(spec: HeteroInferenceSpec) -> int | None:
    """Returns how many commits stay, or None if nothing may be removed."""
    cache = spec.model.cache
    if cache is None or not identity.is_hub_model(spec):
        return None
    return cache.keep or (DEFAULT_KEEP if cache.size is not None else None)


def _use(resource: ResourceView, objects: Sequence[Manifest]) -> set[str] | None:
    """Returns the commits that a resource, its plans and its revisions name; None if that cannot be read."""
    found = {_at(resource.status, "model", "commit"), _at(resource.spec, "model", "revision")}
    uri = _at(resource.spec, "model", "uri")
    if isinstance(uri, str) and uri.startswith(_CLAIM_SCHEME):
        match = _COMMIT_OF_CLAIM.fullmatch(uri)
        if match is None:  # it may be a link to any commit
            return None
        found.add(match[1])
    for stored in objects:
        if stored["kind"] == "ConfigMap":
            try:
                found |= _named_by(stored.get("data") or {})
            except (ValueError, RecursionError):
                return None
    return {commit for commit in found if is_commit(commit)}


def _named_by(data: Mapping[str, str]) -> set[Any]:
    """Returns the commits that a stored plan or revision names; raises ValueError."""
    found: set[Any] = set()
    if text := data.get(REVISION_KEY):
        found.add(_at(json.loads(text), "commit"))
    if text := data.get(names.PLAN_KEY):
        path = _at(json.loads(text), "engine", "model")
        found |= set(path.split("/")) if isinstance(path, str) else set()
    return found


def _waits(resource: ResourceView, uri: str) -> bool:
    """Returns whether a resource may use a commit of a model that its status does not name yet."""
    is_current = resource.status.get("observedGeneration") == resource.generation
    is_same = _at(resource.spec, "model", "uri") == uri
    return is_same and not (is_current and is_commit(_at(resource.status, "model", "commit")))


def _at(value: object, *path: str) -> Any:
    """Returns what stands at a path of stored JSON, or None; a text or a number, if anything."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str | int) else None
