"""Finds the resources that use the claim of a cache, so that no fetch removes their models."""

import json
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import CONFIRMED_S, CacheCleanup
from heteroinfer_operator.api.model_source import ModelCache
from heteroinfer_operator.cluster import CleanupPod, PodView, ResourceKey
from heteroinfer_operator.kube.confirmed_cleanups import ConfirmedCleanups
from heteroinfer_operator.kube.paths import CONFIG_MAP, HETERO_INFERENCE, POD
from heteroinfer_operator.kube.trim import find_cleanup_rule
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.revision_record import KEY as REVISION_KEY
from heteroinfer_operator.stored_fields import EARLIEST
from tests.unit.operator.caches import Caches

FETCHES = {"model": {"uri": "hf://acme/llama", "cache": {"claimName": "shared", "keep": 1}}, "roles": []}
MOVED = {"model": {"uri": "hf://acme/llama", "cache": {"claimName": "other"}}, "roles": []}


class Namespace(Caches):
    """The caches of a namespace in which resource `one` fetches a model."""

    def __init__(self) -> None:
        super().__init__()
        self.show_resource("one", FETCHES)

    def show_resource(self, name: str, spec: dict[str, Any]) -> None:
        metadata = {"namespace": "ns", "name": name, "uid": name}
        self.show(HETERO_INFERENCE.path(), {"metadata": metadata, "spec": spec})

    def _child(self, name: str) -> dict[str, Any]:
        owner = Owner(key=ResourceKey(namespace="ns", name=name), uid=name)
        labels = {names.LABEL_RESOURCE: name}
        return {
            "namespace": "ns",
            "name": f"{name}-0-1-0",
            "uid": f"{name}-0",
            "labels": labels,
            "creationTimestamp": "2026-11-26T00:00:00Z",
            "ownerReferences": [owner.reference],
        }

    def show_pod(self, name: str, claim: str) -> None:
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim}}
        spec = {"nodeName": "a", "containers": [], "volumes": [volume]}
        self.show(POD.path(), {"metadata": self._child(name), "spec": spec})

    def show_fetch(self, name: str, claim: str, **status: Any) -> None:
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim}}
        cleanup = CacheCleanup(keep=1, in_use=("a" * 40, "b" * 40), listed_s=1.0)
        variable = {"name": names.ENV_CACHE_CLEANUP, "value": cleanup.to_json()}
        container = {"name": names.CONTAINER_WORKER, "env": [variable]}
        spec = {"nodeName": "a", "containers": [container], "volumes": [volume]}
        self.show(POD.path(), {"metadata": self._child(name), "spec": spec, "status": status})

    def cleanup_pods(self) -> list[tuple[str, ...] | None]:
        found = self.state.cleanup_pods("ns", {"shared"})
        return [None if each.pod.cleanup is None else each.pod.cleanup.in_use for each in found]

    def show_revision(self, name: str, spec: dict[str, Any]) -> None:
        data = {REVISION_KEY: json.dumps({"spec": spec, "commit": "b" * 40})}
        self.show(CONFIG_MAP.path(), {"kind": "ConfigMap", "metadata": self._child(name), "data": data})

    def other_cache_users(self, claim: str = "shared") -> list[str] | None:
        found = self.state.other_cache_users(ResourceKey(namespace="ns", name="one"), claim)
        return None if found is None else [each.resource.key.name for each in found]


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


def test_a_resource_that_does_not_use_the_claim_is_not_a_cache_user(namespace: Namespace) -> None:
    namespace.show_resource("two", MOVED)
    namespace.show_pod("two", "other")
    namespace.show_pod("one", "shared")
    assert namespace.other_cache_users() == []


def test_a_resource_is_a_cache_user_if_its_pods_mount_the_claim(namespace: Namespace) -> None:
    namespace.show_resource("two", MOVED)
    namespace.show_pod("two", "shared")
    assert namespace.other_cache_users() == ["two"]


def test_a_resource_is_a_cache_user_if_its_revision_names_the_claim(namespace: Namespace) -> None:
    """The group of this resource restarts with that revision while the model of the spec is not available."""
    namespace.show_resource("two", MOVED)
    namespace.show_revision("two", FETCHES)
    (found,) = namespace.state.other_cache_users(ResourceKey(namespace="ns", name="one"), "shared") or ()
    assert [each["kind"] for each in found.objects] == ["ConfigMap"]


def test_a_resource_for_which_the_claim_was_created_is_a_cache_user(namespace: Namespace) -> None:
    """A suspended resource has no pods, and neither its spec nor its status names the claim."""
    namespace.show_resource("two", {"model": {"uri": "hf://acme/llama", "cache": {"size": "1Gi"}}})
    owner = Owner(key=ResourceKey(namespace="ns", name="two"), uid="two")
    assert namespace.other_cache_users(identity.model_claim(owner, ModelCache(size="1Gi"))) == ["two"]


def test_users_of_a_claim_are_unknown_while_pods_of_a_deleted_resource_mount_it(namespace: Namespace) -> None:
    namespace.show_pod("gone", "shared")
    assert namespace.other_cache_users() is None


def test_only_running_fetch_pods_of_the_claim_may_remove_commits(namespace: Namespace) -> None:
    namespace.show_pod("one", "shared")
    assert namespace.cleanup_pods() == []
    namespace.show_fetch("one", "other")
    assert namespace.cleanup_pods() == []
    namespace.show_fetch("one", "shared")
    assert namespace.cleanup_pods() == [("a" * 40, "b" * 40)]
    ended = {"name": names.CONTAINER_WORKER, "state": {"terminated": {"exitCode": 0, "message": ""}}}
    namespace.show_fetch("one", "shared", phase="Succeeded", containerStatuses=[ended])
    assert namespace.cleanup_pods() == []


def test_a_pod_with_an_unreadable_cleanup_rule_removes_nothing() -> None:
    for value in ("", "[", '{"keep": 0, "in_use": [], "listed_s": 1.0}'):
        variable = {"name": names.ENV_CACHE_CLEANUP, "value": value}
        stored = {"spec": {"containers": [{"name": names.CONTAINER_WORKER, "env": [variable]}]}}
        assert find_cleanup_rule(stored) is None


def test_a_confirmation_expires_and_each_pod_counts_as_confirmed_at_the_start_of_the_operator() -> None:
    now_s = 100.0
    confirmed = ConfirmedCleanups(lambda: now_s)
    pods = [
        CleanupPod(pod=PodView(name=uid, uid=uid, labels={}, created=EARLIEST), claims=("shared",))
        for uid in ("one", "two")
    ]

    def valid() -> list[str]:
        return [each.pod.uid for each in confirmed.among(pods)]

    assert valid() == ["one", "two"]
    now_s += CONFIRMED_S
    assert valid() == []
    confirmed.add("two")
    now_s += CONFIRMED_S - 1
    assert valid() == ["two"]
    confirmed.add("one")
    now_s += 1
    assert valid() == ["one"]
