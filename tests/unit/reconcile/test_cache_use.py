"""The commits of a cache that are in use by any resource that names the claim."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.group_key import KEY_BYTES, CleanupKey
from heteroinfer_contract.model_fetch import MAX_QUESTIONS, CacheCleanup, hash_token
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.cluster import (
    CacheUser,
    CleanupPod,
    PodView,
    ResourceKey,
    ResourceObservation,
    ResourceView,
)
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.model_pods import model_pod_name
from heteroinfer_operator.manifests.revision_record import KEY as REVISION_KEY
from heteroinfer_operator.reconcile.cache_use import (
    claim_to_clean,
    claims_without_fetch,
    find_blocking_cleanup,
    find_cleanup,
    find_token,
    is_list_complete,
)

NOW = datetime(2026, 11, 26, tzinfo=UTC)
KEY = CleanupKey.of_operator(b"k" * KEY_BYTES)
URI = "hf://acme/llama"
A, B, C, D = (letter * 40 for letter in "abcd")


def resource(
    name: str = "one", uri: str = URI, status: dict[str, Any] | None = None, **model: Any
) -> ResourceView:
    return ResourceView(
        key=ResourceKey(namespace="team", name=name),
        uid=name,
        generation=2,
        resource_version="1",
        finalizers=(),
        deleting=False,
        spec={"model": {"uri": uri, **model}, "roles": [{"name": "cpu", "device": "CPU"}]},
        status=status if status is not None else {},
    )


def serving(commit: str, phase: str = "Ready") -> dict[str, Any]:
    return {"observedGeneration": 2, "model": {"phase": phase, "commit": commit}}


def kept(**data: Any) -> dict[str, Any]:
    return {"kind": "ConfigMap", "data": {key: json.dumps(value) for key, value in data.items()}}


def in_use(
    own: ResourceView, *other_cache_users: ResourceView, objects: tuple[dict[str, Any], ...] = ()
) -> tuple[str, ...] | None:
    others = tuple(CacheUser(resource=each, objects=objects) for each in other_cache_users)
    observation = ResourceObservation(resource=own, objects=objects, other_cache_users=others)
    cleanup = find_cleanup(parse_spec(own.spec), observation, NOW, KEY)
    return None if cleanup is None else cleanup.in_use


CACHE: dict[str, Any] = {"cache": {"claimName": "models", "keep": 3}}


def test_commits_in_plans_revisions_and_statuses_are_in_use() -> None:
    objects = (
        kept(**{REVISION_KEY: {"spec": {}, "commit": B}}),
        kept(**{names.PLAN_KEY: {"engine": {"model": f"/model/acme--llama/{C}"}}}),
        {"kind": "Service"},
    )
    found = in_use(resource(status=serving(A), **CACHE), objects=objects)
    assert found is not None
    assert {A, B, C} <= set(found)
    other_cache_users = (
        resource("two", status=serving(D)),
        resource("three", uri=f"pvc://models/acme--llama/{B}"),
    )
    found = in_use(resource(status=serving(A), **CACHE), *other_cache_users)
    assert found is not None
    assert {A, B, D} <= set(found)


@pytest.mark.parametrize(
    "user",
    [
        resource("two", cache={"claimName": "models"}),
        resource("two", status={**serving(D), "observedGeneration": 1}, cache={"claimName": "models"}),
        resource("two", uri="pvc://models/current"),
        resource("two", uri="pvc://models/acme--llama/current"),
    ],
    ids=["no commit yet", "another spec", "a folder that may be a link", "a commit that may be a link"],
)
def test_nothing_is_removed_while_another_resources_commit_is_unknown(user: ResourceView) -> None:
    assert in_use(resource(status=serving(A), **CACHE), user) is None


def test_nothing_is_removed_if_a_plan_cannot_be_read() -> None:
    broken = {"kind": "ConfigMap", "data": {names.PLAN_KEY: "["}}
    assert in_use(resource(**CACHE), objects=(broken,)) is None


@pytest.mark.parametrize(
    "model", [{"uri": "hf://acme/other", "cache": {"claimName": "elsewhere"}}, {"uri": "pvc://models/small"}]
)
def test_nothing_is_removed_from_a_claim_mounted_by_a_template(model: dict[str, Any]) -> None:
    """An argument of the engine may name any path in the volume."""
    volume = {"name": "m", "persistentVolumeClaim": {"claimName": "models"}}
    roles = [{"name": "cpu", "device": "CPU", "template": {"volumes": [volume]}}]
    two = resource("two", status=serving(D), **CACHE)
    assert in_use(resource(**CACHE), two) is not None
    assert in_use(resource(**CACHE), replace(two, spec={"model": model, "roles": roles})) is None
    record = kept(**{REVISION_KEY: {"spec": {"model": model, "roles": roles}, "commit": B}})
    assert in_use(resource(**CACHE), two, objects=(record,)) is None, "a group restarts with it"
    own = resource(**CACHE)
    assert in_use(replace(own, spec={**own.spec, "roles": roles})) is None


def test_a_group_of_an_earlier_spec_may_use_any_commit_of_its_path() -> None:
    record = kept(**{REVISION_KEY: {"spec": {"model": {"uri": "pvc://models/current"}}, "commit": None}})
    assert in_use(resource(**CACHE), resource("two", uri="hf://acme/other"), objects=(record,)) is None


def test_a_model_in_another_claim_does_not_block_cleanup() -> None:
    """The old group serves a commit that a plan names; the new claim is a different one."""
    plan = kept(**{names.PLAN_KEY: {"engine": {"model": f"/model/acme--llama/{B}"}}})
    moved = resource("two", status={**serving(D), "observedGeneration": 1}, cache={"claimName": "elsewhere"})
    found = in_use(resource(**CACHE), moved, objects=(plan,))
    assert found is not None
    assert {B, D} <= set(found)


def test_a_fetch_of_another_model_does_not_block_cleanup() -> None:
    assert in_use(resource(**CACHE), resource("two", uri="hf://acme/other")) is not None


def test_a_users_claim_is_cleaned_only_on_request() -> None:
    assert in_use(resource(cache={"claimName": "models"})) is None
    made = ResourceObservation(resource=resource(cache={"size": "1Gi"}), other_cache_users=())
    cleanup = find_cleanup(parse_spec(made.resource.spec), made, NOW, KEY)
    assert cleanup is not None
    assert cleanup.keep == 2


def test_only_a_resource_whose_fetch_may_begin_names_a_claim_to_clean() -> None:
    assert claim_to_clean(resource(**CACHE)) == "models"
    assert claim_to_clean(resource(status=serving(A), **CACHE)) == ""
    assert claim_to_clean(resource(status={**serving(A), "observedGeneration": 1}, **CACHE)) == "models"
    assert claim_to_clean(resource(status=serving(A, "Failed"), **CACHE)) == "models"
    assert claim_to_clean(resource(uri="pvc://models/small")) == ""
    assert claim_to_clean(resource(cache={"size": "1Gi"})).startswith("one-model-")


def test_keep_changes_neither_claim_nor_revision() -> None:
    without, given = (parse_spec(resource(cache={"size": "1Gi", **keep}).spec) for keep in ({}, {"keep": 5}))
    assert identity.model_key(without) == identity.model_key(given)
    assert identity.revision(without) == identity.revision(given)
    owner = identity.Owner(key=ResourceKey(namespace="team", name="one"), uid="one")
    claims = {identity.model_claim(owner, spec.model.cache) for spec in (without, given) if spec.model.cache}
    assert len(claims) == 1


# Uses that begin while a fetch runs


def fetch_pod(*commits: str) -> PodView:
    cleanup = CacheCleanup(keep=1, in_use=commits, listed_s=1.0)
    return PodView(name="one-fetch", uid="p", labels={}, created=NOW, cleanup=cleanup)


def is_complete(*other_cache_users: ResourceView, objects: tuple[dict[str, Any], ...] = ()) -> bool:
    others = tuple(CacheUser(resource=each, objects=objects) for each in other_cache_users)
    observation = ResourceObservation(resource=resource(**CACHE), other_cache_users=others)
    return is_list_complete(observation, fetch_pod(A, B))


def mounting(claim: str) -> ResourceView:
    volume = {"name": "m", "persistentVolumeClaim": {"claimName": claim}}
    roles = [{"name": "cpu", "device": "CPU", "template": {"volumes": [volume]}}]
    return replace(resource("two"), spec={"model": {"uri": "file:///m"}, "roles": roles})


def test_a_list_is_complete_if_it_has_all_commits_that_resources_use_now() -> None:
    assert is_complete()
    assert is_complete(resource("two", uri=f"pvc://models/acme--llama/{B}"))
    assert not is_complete(resource("two", uri=f"pvc://models/acme--llama/{C}"))
    assert is_complete(resource("two", uri=f"pvc://elsewhere/acme--llama/{C}"))
    assert not is_complete(resource("two", uri="pvc://models/current"))
    assert not is_complete(mounting("models"))
    assert is_complete(mounting("elsewhere"))
    assert not is_complete(resource("two", **CACHE)), "its commit is unknown"
    assert is_complete(resource("two", status=serving(A), **CACHE))
    assert not is_complete(resource("two", status=serving(C), **CACHE))
    record = kept(**{REVISION_KEY: {"spec": {"model": {"uri": f"pvc://models/acme--llama/{C}"}}}})
    assert not is_complete(resource("two", uri="hf://acme/other"), objects=(record,))


def test_an_unknown_list_or_unknown_users_confirm_nothing() -> None:
    observation = ResourceObservation(resource=resource(**CACHE), other_cache_users=())
    assert not is_list_complete(observation, replace(fetch_pod(), cleanup=None))
    assert not is_list_complete(replace(observation, other_cache_users=None), fetch_pod())
    refused = replace(resource(**CACHE), spec={"model": 1})
    assert not is_list_complete(replace(observation, resource=refused), fetch_pod())


def test_a_new_use_waits_for_a_fetch_that_may_remove_its_commit() -> None:
    def blocking(user: ResourceView) -> PodView | None:
        cleanup_pods = (CleanupPod(pod=fetch_pod(A, B), claims=("models",)),)
        return find_blocking_cleanup(ResourceObservation(resource=user, cleanup_pods=cleanup_pods))

    user = resource("two", uri=f"pvc://models/acme--llama/{C}")
    assert claims_without_fetch(user.spec) == claims_without_fetch(mounting("models").spec) == {"models"}
    assert claims_without_fetch(resource(**CACHE).spec) == set()
    assert blocking(user) == blocking(mounting("models")) == fetch_pod(A, B)
    assert blocking(resource("two", uri=f"pvc://models/acme--llama/{B}")) is None
    assert blocking(resource("two", **CACHE)) is None, "its fetch marks its commit in the cache"


def test_zero_keeps_all_commits() -> None:
    assert in_use(resource(cache={"size": "1Gi"})) is not None
    assert in_use(resource(cache={"size": "1Gi", "keep": 0})) is None
    assert claim_to_clean(resource(cache={"size": "1Gi", "keep": 0})) == ""


# Tokens of the operator


def created_fetch(own: ResourceView, now: datetime = NOW, key: CleanupKey = KEY, **model: Any) -> PodView:
    """Returns the fetch pod that the operator creates for a resource."""
    spec = parse_spec({**own.spec, "model": {**own.spec["model"], **model}})
    observation = ResourceObservation(resource=own, other_cache_users=())
    cleanup = find_cleanup(spec, observation, now, key)
    assert cleanup is not None
    stored = CacheCleanup.from_json(cleanup.to_json())  # as the operator reads it from the pod
    name = model_pod_name(spec, Owner(key=own.key, uid=own.uid))
    return PodView(name=name, uid="p", labels={}, created=now, cleanup=stored)


def test_each_question_of_each_pod_has_its_own_token() -> None:
    own = resource(**CACHE)
    pod = created_fetch(own)
    assert pod.cleanup is not None
    tokens = [find_token(KEY, own.uid, pod, number) for number in range(MAX_QUESTIONS)]
    assert [hash_token(token or "") for token in tokens] == list(pod.cleanup.token_hashes)
    others = [
        created_fetch(own, NOW + timedelta(seconds=1)),  # a later pod of the same name
        created_fetch(own, revision="main"),
        created_fetch(replace(own, uid="recreated")),
    ]
    assert others[0].name == pod.name
    found = {find_token(KEY, "recreated" if pod is others[2] else own.uid, pod, 0) for pod in others}
    assert None not in found
    assert len({*tokens, *found}) == MAX_QUESTIONS + 3
    assert all(token not in pod.cleanup.to_json() for token in tokens if token)


def test_the_operator_gives_no_token_that_the_pod_does_not_know() -> None:
    own = resource(**CACHE)
    pod = created_fetch(own)
    assert find_token(KEY, own.uid, pod, MAX_QUESTIONS) is None
    assert find_token(KEY, "another resource", pod, 0) is None
    assert find_token(KEY, own.uid, replace(pod, name="another-pod"), 0) is None
    assert find_token(CleanupKey.of_operator(b"n" * KEY_BYTES), own.uid, pod, 0) is None
    assert pod.cleanup is not None
    other_list = replace(pod.cleanup, in_use=(A,))
    assert find_token(KEY, own.uid, replace(pod, cleanup=other_list), 0) is None
    grown = replace(pod.cleanup, keep=pod.cleanup.keep + 1)
    assert find_token(KEY, own.uid, replace(pod, cleanup=grown), 0) is None
    earlier = replace(pod.cleanup, token_hashes=())  # an operator without tokens created the pod
    assert find_token(KEY, own.uid, replace(pod, cleanup=earlier), 0) is None


def test_without_a_key_a_fetch_removes_no_commit() -> None:
    observation = ResourceObservation(resource=resource(**CACHE), other_cache_users=())
    assert find_cleanup(parse_spec(observation.resource.spec), observation, NOW, None) is None
