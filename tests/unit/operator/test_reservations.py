"""Capacity is reserved for the operator's pods for a limited time, and messages name these pods."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest, ResourceKey
from heteroinfer_operator.kube.cluster_state import RESERVATION_S
from heteroinfer_operator.kube.kept import PendingRequest, ResourceMemory
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD, PRIORITY_CLASS, NamespacedName
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.nodes.demand import preferred_node
from heteroinfer_operator.nodes.placement import build_free_nodes
from heteroinfer_operator.reconcile.group_planner import describe_reserving_pods
from heteroinfer_operator.reconcile.refusals import ActionPermits
from tests.unit.operator.caches import Caches

OWNER = Owner(key=ResourceKey(namespace="ns", name="llama"), uid="owner")
NAME = "llama-0-7-0"


class ReservationCaches(Caches):
    """The caches with a resource whose pods wait for a node."""

    def show_resource(self, uid: str = OWNER.uid) -> None:
        metadata = {"namespace": "ns", "name": "llama", "uid": uid}
        self.show(HETERO_INFERENCE.path(), {"metadata": metadata, "spec": {}})

    @property
    def reserved(self) -> list[str]:
        return [demand.name for demand in self.state.reserved_demands()]


def waiting_pod(name: str = NAME, uid: str = "u", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "ns",
            "name": name,
            "uid": uid,
            "creationTimestamp": "2026-11-26T00:00:00Z",
            "labels": {names.LABEL_RESOURCE: "llama"},
            "ownerReferences": [OWNER.reference],
        },
        "spec": {"containers": [{"name": "worker", "resources": {"requests": {"cpu": "30"}}}], **spec},
        "status": {"phase": "Pending"},
    }


@pytest.fixture
def caches() -> ReservationCaches:
    caches = ReservationCaches()
    caches.show_resource()
    return caches


def test_capacity_is_reserved_for_a_pod_for_a_limited_time(caches: ReservationCaches) -> None:
    caches.show(POD.path(), waiting_pod())
    assert caches.reserved == [f"ns/{NAME}"]
    caches.now += RESERVATION_S - 1
    caches.show(POD.path(), waiting_pod(priority=1))
    assert caches.reserved == [f"ns/{NAME}"]
    caches.now += 1
    assert caches.reserved == [], "a change of the pod does not prolong its reservation"
    caches.show(POD.path(), waiting_pod(uid="another"))
    assert caches.reserved == [f"ns/{NAME}"]


def test_the_reservation_of_a_gated_pod_begins_when_the_scheduler_may_place_the_pod(
    caches: ReservationCaches,
) -> None:
    caches.show(POD.path(), waiting_pod(schedulingGates=[{"name": "kueue.x-k8s.io/admission"}]))
    caches.now += 100 * RESERVATION_S
    assert caches.reserved == []
    caches.show(POD.path(), waiting_pod())
    assert caches.reserved == [f"ns/{NAME}"]


@pytest.mark.parametrize("name", ["squat", "llama", "llama-0-7", "llama-0-7-0-copy", "other-0-7-0"])
def test_no_capacity_is_reserved_for_a_pod_of_another_name(caches: ReservationCaches, name: str) -> None:
    caches.show(POD.path(), waiting_pod(name))
    assert caches.reserved == []


def test_no_capacity_is_reserved_for_a_pod_of_a_missing_resource() -> None:
    caches = ReservationCaches()
    caches.show(POD.path(), waiting_pod())
    assert caches.reserved == [], "no such resource exists"
    caches.show_resource("another")
    assert caches.reserved == [], "another resource has that name"
    caches.show_resource()
    assert caches.reserved == [f"ns/{NAME}"]


@given(st.lists(st.tuples(st.integers(0, int(RESERVATION_S)), st.booleans(), st.booleans()), max_size=8))
def test_changes_of_a_pod_do_not_prolong_its_reservation(
    events: Sequence[tuple[int, bool, bool]],
) -> None:
    """The pod changes and its resource is written. The time of the pod's reservation continues."""
    caches, waited_s = ReservationCaches(), 0
    caches.show_resource()
    caches.show(POD.path(), waiting_pod())
    for seconds, change, write in events:
        caches.now += seconds
        waited_s += seconds
        if change:
            caches.show(POD.path(), waiting_pod(priority=int(caches.now)))
        if write:
            caches.show_resource()
        assert (caches.reserved == []) == (waited_s >= RESERVATION_S)


def test_a_pod_with_a_preferred_node_counts_once_on_that_node(caches: ReservationCaches) -> None:
    for name in ("a", "b"):
        caches.show("/api/v1/nodes", node_of(name))
    hint = hint_at("b")
    caches.show(POD.path(), waiting_pod(affinity=hint))

    def free() -> dict[str, float]:
        nodes = caches.state.nodes() or ()
        return {
            each.node.name: each.free_amount("cpu")
            for each in build_free_nodes(nodes, caches.state.reserved_demands())
        }

    assert free() == {"a": 32, "b": 2}
    with caches.state.reserving([manifest_of("llama-0-7-1", hint)]):
        assert free() == {"a": 2, "b": 2}, "both do not fit on b"
    assert free() == {"a": 32, "b": 2}
    caches.show(POD.path(), waiting_pod(nodeName="a"))
    assert free() == {"a": 2, "b": 32}


@pytest.mark.parametrize(("value", "counted"), [(5, True), (-10, False)], ids=["higher", "the same"])
def test_a_new_pod_of_higher_priority_reserves_its_node_before_the_cache_has_it(
    caches: ReservationCaches, value: int, counted: bool
) -> None:
    """The manifest names only a priority class, and the API server fills in the number.

    So the operator looks up the number.
    """
    caches.show("/api/v1/nodes", node_of("a"))
    metadata = {"namespace": "ns", "name": "placeholder", "uid": "p"}
    containers = [{"name": "pause", "resources": {"requests": {"cpu": "30"}}}]
    caches.show(
        POD.path(),
        {"metadata": metadata, "spec": {"nodeName": "a", "priority": -10, "containers": containers}},
    )
    pod = manifest_of(NAME, hint_at("a"))
    kind = {"metadata": {"name": "high", "uid": "high"}, "value": value, "globalDefault": True}
    caches.show(PRIORITY_CLASS.path(), kind)
    with caches.state.reserving([pod]):
        assert (
            build_free_nodes(caches.state.nodes() or (), caches.state.reserved_demands())[0].is_overfull
            == counted
        )


@pytest.mark.parametrize(
    ("requested", "existing", "is_counted"),
    [([], [], False), ([NAME], [], True), (["llama-0-7-1"], [], True), ([], ["llama-0-7-1"], True)],
    ids=["nothing was sent", "it was requested", "another pod was requested", "another pod exists"],
)
def test_a_resource_counts_its_own_pods_unless_nothing_of_their_epoch_was_sent(
    requested: list[str], existing: list[str], is_counted: bool, caches: ReservationCaches
) -> None:
    """The status is written before the pods. If it must wait, the next decision needs the same capacity."""
    memory = ResourceMemory("owner", 1, ActionPermits("llama", (), datetime.now(UTC)))
    pod = manifest_of(NAME, {})
    memory.reserved_pods = frozenset({NamespacedName.from_object(pod)})
    for name in requested:
        memory.pending_requests[POD.name, name] = PendingRequest(None)  # type: ignore[arg-type]
    with caches.state.reserving([pod]):
        own = [demand.name for demand in caches.state.reserved_demands(memory.unsent_pods(existing))]
        assert (own == [f"ns/{NAME}"]) == is_counted
        assert caches.reserved == [f"ns/{NAME}"], "other resources do not plan this capacity"


def node_of(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": name},
        "status": {
            "allocatable": {"cpu": "32", "pods": "10"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def hint_at(node: str) -> Manifest:
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred_node(node)]}}


def manifest_of(name: str, affinity: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "Pod", **waiting_pod(name, affinity=affinity)}


def test_a_message_names_only_pods_of_the_readers_namespace() -> None:
    assert describe_reserving_pods([], "ns") == ""
    words = "some of the capacity is reserved for pods that are not scheduled yet: "
    assert describe_reserving_pods(["ns/b", "ns/a"], "ns") == f"{words}a, b"
    assert describe_reserving_pods(["other/secret"], "ns") == f"{words}1 pod of other namespaces"
    many = [*(f"ns/p{index}" for index in range(5)), "other/secret", "other/hidden"]
    assert (
        describe_reserving_pods(many, "ns") == f"{words}p0, p1, p2, 2 more pods, 2 pods of other namespaces"
    )
