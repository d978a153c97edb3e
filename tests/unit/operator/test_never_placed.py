"""Remembers the pods that were deleted before they had a node, by their last state in the watch."""

from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.nodes.node_assignment import Gang

KEY = ResourceKey(namespace="default", name="demo")
OWNER = Owner(key=KEY, uid="uid-demo")
NAME = "demo-0-7-1"


class Watched:
    """The operator's caches, and the events of the watch of pods."""

    def __init__(self) -> None:
        self.version = 10
        self.touched: list[ResourceKey] = []
        self.state = ClusterState(
            None,  # type: ignore[arg-type]  # nothing is read
            namespaces=("default",),
            touched=self.touched.append,
            nodes_changed=lambda: None,
        )

    def event(self, kind: str, stored: dict[str, Any]) -> None:
        cache = self.state.cache_of(POD, "default")
        assert cache is not None
        self.version += 1
        metadata = {**stored["metadata"], "resourceVersion": str(self.version)}
        cache._apply_event(kind, {**stored, "metadata": metadata})

    def names(self, *, owner: Owner = OWNER, epoch: int = 7) -> frozenset[str]:
        return self.state.never_placed.names(owner, {0: epoch})


@pytest.fixture
async def watched() -> Watched:
    return Watched()


def pod(name: str = NAME, *, uid: str = "u", node: str = "", gang: str = "", **spec: Any) -> dict[str, Any]:
    owner = {"apiVersion": HETERO_INFERENCE.api_version, "kind": names.KIND, "name": "demo", "uid": OWNER.uid}
    labels = {names.LABEL_RESOURCE: "demo"} | ({names.LABEL_GANG: gang} if gang else {})
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels,
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"containers": [], **({"nodeName": node} if node else {}), **spec},
        "status": {"phase": "Pending"},
    }


async def test_a_pod_deleted_without_a_node_is_remembered_until_a_new_pod_has_its_name(
    watched: Watched,
) -> None:
    watched.event("ADDED", pod())
    assert not watched.names()
    watched.event("DELETED", pod())
    assert watched.names() == {NAME}
    assert watched.touched[-1] == KEY
    watched.event("ADDED", pod(uid="next"))
    assert not watched.names()


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(pod(node="node"), id="placed"),
        pytest.param(pod(gang=Gang.KUEUE.value), id="Kueue keeps its name"),
        pytest.param(pod(nodeName=8), id="unreadable"),
    ],
)
async def test_a_deleted_pod_is_not_remembered_if_it_had_or_may_have_had_a_node(
    watched: Watched, last: dict[str, Any]
) -> None:
    watched.event("ADDED", pod())  # a relist or another watch would still show it without a node
    watched.event("DELETED", last)
    assert not watched.names()


async def test_the_end_of_an_older_pod_does_not_affect_a_newer_pod(watched: Watched) -> None:
    cache = watched.state.cache_of(POD, "default")
    assert cache is not None
    newer = pod(uid="next")
    newer["metadata"]["resourceVersion"] = "100"
    cache.store_written(newer)
    watched.event("DELETED", pod())
    assert not watched.names()
    assert cache.get(next(iter(cache._entries))) is not None


async def test_pods_of_other_resources_and_of_epochs_that_are_over_are_forgotten(watched: Watched) -> None:
    for name in (NAME, "demo-0-8-0", "demo-fetch-1", "demo-x-7-1"):
        watched.event("DELETED", pod(name))
    assert watched.names(epoch=8) == {"demo-0-8-0"}
    assert watched.names(epoch=7) == {"demo-0-8-0"}
    assert not watched.names(owner=Owner(key=KEY, uid="another"))
    watched.event("DELETED", pod())
    watched.state.never_placed.forget(KEY)
    assert not watched.names()
