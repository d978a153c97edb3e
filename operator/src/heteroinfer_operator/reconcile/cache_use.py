"""Finds the used commits of a model cache, so that a fetch may remove the other commits. Pure.

A fetch pod gets the list of used commits when it is created. Before it removes commits, it asks the operator
whether the list is still complete (a *question*, with a number). The operator confirms with a secret token.
The pod knows only the hash of each token, so no other program can confirm.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.group_key import CleanupKey
from heteroinfer_contract.model_fetch import HUB_SCHEME, MAX_QUESTIONS, CacheCleanup, hash_token, is_commit
from heteroinfer_operator.api import HeteroInferenceSpec, ModelPhase, parse_stored_spec
from heteroinfer_operator.cluster import Manifest, PodView, ResourceObservation, ResourceView
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.model_pods import model_pod_name
from heteroinfer_operator.manifests.revision_record import KEY as REVISION_KEY

DEFAULT_KEEP: Final = 2
"""Default number of commits that stay in a claim that the operator created for the resource."""
_CLAIM_SCHEME: Final = "pvc://"
_COMMIT_OF_CLAIM: Final = re.compile(r"pvc://[^/]+/[^/]+/([0-9a-f]{40,64})/?")


def claim_to_clean(resource: ResourceView) -> str:
    """Returns the claim from which a fetch that begins now may remove commits, or "".

    Each reconcile calls this function, so it parses the spec only after cheap checks.
    """
    uri = _read_path(resource.spec, "model", "uri")
    is_ready = _read_path(resource.status, "model", "phase") == ModelPhase.READY.value
    is_current = resource.status.get("observedGeneration") == resource.generation
    is_hub_model = isinstance(uri, str) and uri.startswith(HUB_SCHEME)
    is_fetched = is_ready and is_current  # so no fetch begins now
    if not is_hub_model or is_fetched:
        return ""
    try:
        spec = parse_stored_spec(resource.spec)
    except SpecError:
        return ""
    return "" if _num_kept_commits(spec) is None else _cache_claim(resource, spec)


def find_cleanup(
    spec: HeteroInferenceSpec, observation: ResourceObservation, now: datetime, key: CleanupKey | None
) -> CacheCleanup | None:
    """Returns which old commits a fetch may remove from its cache, or None if it may remove none.

    Args:
        key: key of the tokens; None if the operator has no key and so cannot confirm a removal.
    """
    num_kept, in_use = _num_kept_commits(spec), _find_all_commits(spec, observation)
    if num_kept is None or in_use is None or key is None:
        return None
    cleanup = CacheCleanup(keep=num_kept, in_use=tuple(sorted(in_use)), listed_s=now.timestamp())
    owner = Owner(key=observation.resource.key, uid=observation.resource.uid)
    pod_name = model_pod_name(spec, owner)
    tokens = [_build_token(key, owner.uid, pod_name, cleanup, number) for number in range(MAX_QUESTIONS)]
    return replace(cleanup, token_hashes=tuple(map(hash_token, tokens)))


def find_token(key: CleanupKey, owner_uid: str, pod: PodView, number: int) -> str | None:
    """Returns the token that confirms a question of a fetch pod, or None if the pod does not know this token.

    The pod does not know the token if, for example, the operator's key was replaced after the creation of the
    pod, or if another program created the pod.

    Args:
        number: number of the question.
    """
    cleanup = pod.cleanup
    if cleanup is None or number >= len(cleanup.token_hashes):
        return None
    token = _build_token(key, owner_uid, pod.name, cleanup, number)
    return token if cleanup.token_hashes[number] == hash_token(token) else None


def _build_token(key: CleanupKey, owner_uid: str, pod_name: str, cleanup: CacheCleanup, number: int) -> str:
    """Returns the token for a question of a pod about its list of commits.

    The list contains the time of its creation, so a later pod of the same name has other tokens.
    """
    text = replace(cleanup, token_hashes=()).to_json()
    return key.token(owner_uid, pod_name, text, str(number))


def is_list_complete(observation: ResourceObservation, pod: PodView) -> bool:
    """Reports whether the list of commits in a fetch pod still has all commits that resources use."""
    try:
        in_use = _find_all_commits(parse_stored_spec(observation.resource.spec), observation)
    except SpecError:
        return False
    return in_use is not None and pod.cleanup is not None and in_use <= {*pod.cleanup.in_use}


def find_blocking_cleanup(observation: ResourceObservation) -> PodView | None:
    """Returns a fetch pod that may now remove a commit that the resource wants to use, or None.

    The resource must wait for this pod. Only a resource that uses a claim without a fetch has to wait,
    because a fetch marks its own commit as used in the cache.
    """
    for cleanup_pod in observation.cleanup_pods:
        cleanup = cleanup_pod.pod.cleanup
        kept_commits = () if cleanup is None else cleanup.in_use
        for claim in cleanup_pod.claims:
            try:
                commit = _commit_of_claim(observation.resource.spec, claim)
            except _UnknownUseError:  # the resource may use a commit that the pod removes
                return cleanup_pod.pod
            if commit is not None and commit not in kept_commits:
                return cleanup_pod.pod
    return None


def claims_without_fetch(spec: Mapping[str, Any]) -> set[str]:
    """Returns the claims that a stored spec uses by `pvc://` or by the volumes of a template."""
    uri = _read_path(spec, "model", "uri")
    claims = set(_mounted_claims(spec))
    if isinstance(uri, str) and uri.startswith(_CLAIM_SCHEME):
        claims.add(uri.removeprefix(_CLAIM_SCHEME).partition("/")[0])
    return claims


class _UnknownUseError(Exception):
    """A resource may use any commit of the claim."""


def _find_all_commits(spec: HeteroInferenceSpec, observation: ResourceObservation) -> set[str] | None:
    """Returns the commits in the cache of a spec that any resource uses; None if not all are known."""
    users = observation.other_cache_users
    if users is None:
        return None
    claim = _cache_claim(observation.resource, spec)
    if any(_may_use_unnamed_commit(user.resource, spec.model.uri, claim) for user in users):
        return None
    try:
        in_use = _find_commits(observation.resource, observation.objects, claim)
        for user in users:
            in_use |= _find_commits(user.resource, user.objects, claim)
    except (_UnknownUseError, ValueError, RecursionError):
        return None
    return in_use


def _cache_claim(resource: ResourceView, spec: HeteroInferenceSpec) -> str:
    """Returns the name of the claim with a model's cache, or "" without a cache."""
    cache = spec.model.cache
    if cache is None:
        return ""
    return cache.claim_name or identity.model_claim(Owner(key=resource.key, uid=resource.uid), cache)


def _num_kept_commits(spec: HeteroInferenceSpec) -> int | None:
    """Returns the number of commits that stay, or None if a fetch may not remove commits."""
    cache = spec.model.cache
    if cache is None or not identity.is_hub_model(spec):
        return None
    default = DEFAULT_KEEP if cache.size is not None else 0
    num_kept = default if cache.keep is None else cache.keep
    return num_kept or None  # 0: no commit is ever removed


def _find_commits(resource: ResourceView, objects: Sequence[Manifest], claim: str) -> set[str]:
    """Returns the commits that a resource, its plans and its revisions name.

    Raises:
        _UnknownUseError: the resource may use any commit of the claim.
        ValueError, RecursionError: a plan or a revision cannot be read.
    """
    values = {_read_path(resource.status, "model", "commit"), *_commits_in_spec(resource.spec, claim)}
    for stored in objects:
        if stored["kind"] != "ConfigMap":
            continue
        data = stored.get("data") or {}
        if text := data.get(REVISION_KEY):
            record = json.loads(text)
            values.add(_read_path(record, "commit"))
            values |= _commits_in_spec(record.get("spec") if isinstance(record, Mapping) else None, claim)
        if text := data.get(names.PLAN_KEY):
            path = _read_path(json.loads(text), "engine", "model")
            if isinstance(path, str):
                values |= set(path.split("/"))  # one folder of the path has the name of the commit
    return {commit for commit in values if is_commit(commit)}


def _commits_in_spec(spec: object, claim: str) -> set[Any]:
    """Returns the values of the fields of a stored spec that may name a commit: commits, tags or None.

    Raises:
        _UnknownUseError: the spec may use any commit of the claim.
    """
    return {_read_path(spec, "model", "revision"), _commit_of_claim(spec, claim)}


def _commit_of_claim(spec: object, claim: str) -> str | None:
    """Returns the commit of a claim that a stored spec uses without a fetch, or None.

    Raises:
        _UnknownUseError: the spec may use any commit of the claim.
    """
    # If pods mount the volume, an argument of the engine may name any path in it, so the use is unknown.
    if claim in _mounted_claims(spec):
        raise _UnknownUseError
    uri = _read_path(spec, "model", "uri")
    if not isinstance(uri, str) or not uri.startswith(f"{_CLAIM_SCHEME}{claim}/"):
        return None
    match = _COMMIT_OF_CLAIM.fullmatch(uri)
    if match is None:  # the path may be a link to any commit
        raise _UnknownUseError
    return match[1]


def _mounted_claims(spec: object) -> Iterator[str]:
    """Yields the claims that templates of roles mount."""
    roles = spec.get("roles") if isinstance(spec, Mapping) else None
    for role in roles if isinstance(roles, list) else ():
        template = role.get("template") if isinstance(role, Mapping) else None
        volumes = template.get("volumes") if isinstance(template, Mapping) else None
        for volume in volumes if isinstance(volumes, list) else ():
            claim = _read_path(volume, "persistentVolumeClaim", "claimName")
            if isinstance(claim, str):
                yield claim


def _may_use_unnamed_commit(resource: ResourceView, uri: str, claim: str) -> bool:
    """Reports whether a resource may use a commit of this model that its status does not name yet.

    This is so if the resource fetches the same model into the same claim, and its status has no commit of the
    current spec.
    """
    claim_name = _read_path(resource.spec, "model", "cache", "claimName")
    is_same_claim = claim_name == claim if claim_name else identity.is_model_claim_of(resource.key, claim)
    is_same_model = _read_path(resource.spec, "model", "uri") == uri
    is_status_current = resource.status.get("observedGeneration") == resource.generation
    names_commit = is_status_current and is_commit(_read_path(resource.status, "model", "commit"))
    return is_same_claim and is_same_model and not names_commit


def _read_path(value: object, *path: str) -> Any:
    """Returns the text or number at a path of stored JSON; None for another value or without the path."""
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str | int) else None
