"""Objects of other clients with any JSON are read or left out. No other error is raised."""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.kube import kept_calibrations, trim
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.own_clock import OwnClock
from heteroinfer_operator.manifests.drift import find_drift
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.manifests.service import build_client_service, build_group_service, client_ports
from heteroinfer_operator.nodes.demand import PodDemand, Taint, selects_node, selects_pod, tolerates
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import Obstacle, build_free_nodes, find_lasting_obstacle
from heteroinfer_operator.nodes.priorities import PriorityClassView, preempting_priority
from heteroinfer_operator.stored_fields import UnreadableError, as_moment, version_number

Manifest = dict[str, Any]
KEY = ResourceKey(namespace="ns", name="llama")
OWNER = Owner(key=KEY, uid="owner")
METADATA = {
    "name": "llama-0-1-0",
    "namespace": "ns",
    "uid": "u",
    "resourceVersion": "7",
    "generation": 2,
    "creationTimestamp": "2026-11-21T01:02:03Z",
    "deletionTimestamp": "2026-11-21T01:02:04Z",
    "deletionGracePeriodSeconds": 30,
    "finalizers": ["example.com/held"],
    "annotations": {names.ANNOTATION_IMAGES: "worker:1"},
    "labels": {names.LABEL_RESOURCE: "llama", names.LABEL_EPOCH: "1", "kueue.x-k8s.io/pod-group-name": "g"},
    "ownerReferences": [OWNER.reference],
}
REQUIREMENT = {"key": "zone", "operator": "In", "values": ["a"]}
FIELDS = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
TERM = {
    "topologyKey": "zone",
    "labelSelector": {"matchLabels": {"a": "b"}, "matchExpressions": [REQUIREMENT]},
}
REQUESTS = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1}}
STATUSES = [
    {"name": "worker", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}, "lastState": {}},
    {"name": "worker", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "m"}}},
]
POD: Manifest = {
    "metadata": METADATA,
    "spec": {
        "containers": [
            {
                "name": "worker",
                "ports": [{"name": names.PORT_HEALTH, "containerPort": 8081}],
                "env": [
                    {"name": names.ENV_GROUP_KEY, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
                ],
                "resources": REQUESTS,
            }
        ],
        "initContainers": [{"name": "proxy", "restartPolicy": "Always", "resources": REQUESTS}],
        "overhead": {"cpu": "1"},
        "resources": REQUESTS,
        "schedulingGates": [{"name": "gate"}],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [REQUIREMENT], **FIELDS}]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": FIELDS}],
            },
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
        },
    },
    "status": {
        "phase": "Running",
        "reason": "r",
        "message": "m",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "Ready", "status": "True"},
            {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"},
            {"type": "DisruptionTarget", "status": "True", "reason": "Preempted"},
        ],
        "containerStatuses": STATUSES,
        "initContainerStatuses": STATUSES,
    },
}
NODE: Manifest = {
    "metadata": {**METADATA, "name": "n1", "namespace": ""},
    "spec": {"unschedulable": True, "taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}]},
    "status": {
        "allocatable": {"cpu": "8", "memory": "64Gi"},
        "conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-11-21T01:02:03Z"}],
    },
}
PRIORITY_CLASS: Manifest = {
    "metadata": {**METADATA, "name": "urgent", "namespace": ""},
    "value": 1000,
    "preemptionPolicy": "Never",
    "globalDefault": True,
}
RESOURCE: Manifest = {"metadata": METADATA, "spec": {"replicas": 1}, "status": {"groups": []}}
CONFIG_MAP: Manifest = {"kind": "ConfigMap", "metadata": METADATA, "data": {"plan.json": "{}"}}
CHILDREN: dict[str, Manifest] = {
    "Service": {**build_client_service(OWNER, [8000]), "metadata": METADATA},
    "NetworkPolicy": {"metadata": METADATA, "spec": {"podSelector": {"matchLabels": {}}, "ingress": [{}]}},
    "ConfigMap": CONFIG_MAP,
    "PodDisruptionBudget": {"metadata": METADATA, "spec": {"minAvailable": 1, "selector": {}}},
    "PersistentVolumeClaim": {"metadata": METADATA, "spec": {"resources": REQUESTS}},
    "PodGroup": {"metadata": METADATA, "spec": {"minMember": 2}},
    "Workload": {"metadata": METADATA, "spec": {"podGroups": [{"name": "ranks"}]}},
}
KEPT_BY_API_SERVER = ("name", "namespace", "uid", "resourceVersion")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(
        ["1e1000", "10e999", "0" * 44 + "1", "True", "Unknown", "Failed", "0000-01-01T00:00:00Z"]
    )
    | st.sampled_from(["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-01-01T00:00:00"])
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the paths of all fields and items of an object, except fields that the API server writes."""
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for name, inner in items:
        if path == ("metadata",) and name in KEPT_BY_API_SERVER:
            continue
        if (*path, name) != ("metadata",):
            yield (*path, name)
        yield from places(inner, (*path, name))


@st.composite
def changed(draw: st.DrawFn, plausible: Manifest) -> Manifest:
    """Draws an object in which some fields are removed or replaced by any JSON."""
    stored = copy.deepcopy(plausible)
    for path in draw(st.lists(st.sampled_from(list(places(plausible))), min_size=1, max_size=3)):
        holder: Any = stored
        *parents, name = path
        try:
            for parent in parents:
                holder = holder[parent]
            holder[name] = draw(json_values)
            if isinstance(holder, dict) and draw(st.booleans()):
                del holder[name]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change removed this path
    return stored


EACH_TYPE: tuple[object, ...] = ([], {}, 0, -1.5, True, "text", None)


def single_changes(plausible: Manifest) -> Iterator[Manifest]:
    """Yields the object with one field as each JSON type, for all fields."""
    for *parents, name in places(plausible):
        for value in EACH_TYPE:
            stored = copy.deepcopy(plausible)
            holder: Any = stored
            for parent in parents:
                holder = holder[parent]
            holder[name] = value
            yield stored


def any_object(plausible: Manifest) -> st.SearchStrategy[Manifest]:
    """Draws an object of a kind, mostly valid, or with any JSON next to its metadata."""
    metadata = {name: plausible["metadata"][name] for name in KEPT_BY_API_SERVER}
    anything = st.dictionaries(st.sampled_from(["spec", "status", "data", "kind"]), json_values, max_size=4)
    return changed(plausible) | anything.map(lambda fields: {**fields, "metadata": metadata})


def check_types(value: Any) -> None:
    """Asserts that each field of a dataclass has its declared type."""
    hints = get_type_hints(type(value))
    for each in dataclasses.fields(value):
        found = getattr(value, each.name)
        if dataclasses.is_dataclass(found):
            check_types(found)
        elif not isinstance(found, tuple) or not found or not dataclasses.is_dataclass(found[0]):
            TypeAdapter(hints[each.name]).validate_python(found, strict=True)


def read(trimmed: Callable[[Manifest], Any], stored: Manifest) -> Any:
    """Returns the value of an object, or None if it is left out."""
    with contextlib.suppress(UnreadableError):
        return trimmed(stored)
    return None


@given(any_object(POD))
def test_any_pod_is_read_or_left_out(stored: Manifest) -> None:
    record = read(trim.pod_record, stored)
    if record is not None:
        check_types(record)
        check_types(record.view)
        assert isinstance(record.view.ended, bool)
    known = read(trim.unreadable_pod_record, stored)
    if known is not None:
        check_types(known.view)
        assert not known.view.ready
    requests = read(trim.pod_requests, stored)
    if requests is not None:
        assert all(isinstance(amount, float) and abs(amount) < 1e20 for amount in requests.requests.values())
    for unbound in ({"schedulingGates": None, "nodeName": None}, {}):
        waiting = copy.deepcopy(stored)
        if isinstance(waiting.get("spec"), dict):
            waiting["spec"] |= unbound
        waiting["metadata"].pop("deletionTimestamp", None)
        use_reservation(read(trim.pod_requests, waiting))


def use_reservation(requests: trim.PodRequests | None) -> None:
    """Uses the demand of a pod without a node like planning does."""
    if requests is None or requests.reservation is None:
        return
    demand = requests.reservation.demand
    check_types(demand)
    node = NodeView(name="n1", allocatable={"cpu": 1e9}, labels={"zone": "a"}, taints=(Taint(key="gpu"),))
    assert isinstance(selects_node(demand, "n1", {"zone": "a"}), bool)
    assert isinstance(tolerates(demand.tolerations, Taint(key="gpu")), bool)
    for term in (*demand.near, *demand.away):
        assert isinstance(selects_pod(term.get("labelSelector"), {"a": "b"}), bool)
    assert isinstance(find_lasting_obstacle(demand, node), Obstacle | None)
    assert build_free_nodes([node], [demand])


@given(any_object(PRIORITY_CLASS))
def test_any_priority_class_is_read_or_left_out(stored: Manifest) -> None:
    view = read(PriorityClassView.of, stored)
    if view is not None:
        check_types(view)
        assert isinstance(preempting_priority("", (view,)), int | None)


@given(any_object(NODE))
def test_any_node_is_read_or_left_out(stored: Manifest) -> None:
    view = read(trim.node_view, stored)
    if view is not None:
        check_types(view)
        for taint in view.taints:
            check_types(taint)
        assert build_free_nodes([view], [PodDemand(name="ns/p", requests={"cpu": 1.0, "memory": 1.0})])


@given(any_object(RESOURCE))
def test_any_resource_is_read_or_left_out(stored: Manifest) -> None:
    record = read(trim.resource_record, stored)
    if record is not None:
        check_types(record.view)
        assert record.key == ResourceKey(namespace="ns", name="llama-0-1-0")


@pytest.mark.parametrize("kind", CHILDREN)
def test_any_child_is_read_or_left_out(kind: str) -> None:
    without_port = copy.deepcopy(CHILDREN["Service"])
    null_port = copy.deepcopy(without_port)
    del without_port["spec"]["ports"][0]["port"]
    null_port["spec"]["ports"][0]["port"] = None

    @given(any_object(CHILDREN[kind]))
    @example(without_port)
    @example(null_port)
    def check(stored: Manifest) -> None:
        record = read(trim.child_record, stored)
        if record is None:
            return
        assert record.key.namespace == "ns"
        for wanted in (
            build_client_service(OWNER, [8000]),
            build_group_service(GroupRef(owner=OWNER, index=0)),
            CHILDREN[kind] | {"kind": kind},
        ):
            find_drift(record.stored, wanted)
        assert all(isinstance(port, int) for port in client_ports(record.stored, OWNER))
        assert all(isinstance(text, str) for text in (record.stored.get("data") or {}).values())
        json.dumps(record.stored)

    check()


@given(any_object(CONFIG_MAP))
def test_any_config_map_of_calibrations_is_read_or_left_out(stored: Manifest) -> None:
    entries = read(kept_calibrations.read_sorted_entries, stored)
    assert entries is None or all(isinstance(text, str) for entry in entries for text in entry)


moments = st.builds(
    lambda year, rest, zone: f"{year:04}-{rest}{zone}",
    st.integers(0, 9999),
    st.sampled_from(["01-01T00:00:00", "12-31T23:59:59", "06-15T12:00:00.123456"]),
    st.sampled_from(["Z", "+23:59", "-23:59", ""]),
)


@given(moments)
def test_every_time_that_go_can_write_is_read(text: str) -> None:
    moment = as_moment(text, "time")
    assert moment is not None
    assert moment.utcoffset() == timedelta(0)
    assert abs(moment.year - int(text[:4])) <= 2
    assert moment + timedelta(days=300) > moment - timedelta(days=300)


@given(st.integers(0, 2**63 - 1), st.datetimes(timezones=st.just(UTC)), st.integers(0, 2**40))
@example(300_000_000_000, datetime(2026, 11, 26, tzinfo=UTC), 0)
def test_a_grace_period_of_any_length_has_an_end(grace_s: int, now: datetime, passed_s: int) -> None:
    passed = [0.0]
    deletions = OwnClock(lambda: now, lambda: passed[0])
    deletions.record("pod", "stamp", later_s=float(grace_s))
    passed[0] = float(passed_s)
    moment = deletions.time_of("pod")
    assert moment is not None
    assert moment <= datetime.max.replace(tzinfo=UTC)


@given(any_object(POD))
def test_caches_accept_any_pod(stored: Manifest) -> None:
    """The caches' own work on values also accepts any pod: clocks, indexes and sums."""
    state = ClusterState(
        None,  # type: ignore[arg-type]  # no request is sent: the test adds the objects
        namespaces=(),
        touched=lambda key: None,
        nodes_changed=lambda: None,
    )
    written = {**stored, "apiVersion": "v1", "kind": "Pod"}
    for cache in state.awaited_caches():
        if cache.collection.path == "/api/v1/pods":
            cache.store_written(written)
    for pod in state.pods(KEY, "owner"):
        assert pod.view.uid == "u"
    assert state.nodes() == ()
    assert len(state.reserved_demands()) <= 1


@pytest.mark.parametrize(
    ("test", "plausible"),
    [
        (test_any_pod_is_read_or_left_out, POD),
        (test_caches_accept_any_pod, POD),
        (test_any_priority_class_is_read_or_left_out, PRIORITY_CLASS),
        (test_any_node_is_read_or_left_out, NODE),
        (test_any_resource_is_read_or_left_out, RESOURCE),
        (test_any_config_map_of_calibrations_is_read_or_left_out, CONFIG_MAP),
    ],
)
def test_each_field_may_have_each_type(test: Any, plausible: Manifest) -> None:
    """The drawn changes above seldom give one certain field one certain type."""
    for stored in single_changes(plausible):
        test.hypothesis.inner_test(stored)


def test_an_unreadable_pod_of_the_operator_exists_and_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    """Without the pod its epoch would end. With its last known state a dead rank could seem Ready."""
    state = ClusterState(None, namespaces=(), touched=lambda key: None, nodes_changed=lambda: None)  # type: ignore[arg-type]  # as above
    (cache,) = [each for each in state.awaited_caches() if each.collection.label.startswith("pods of")]
    stored = copy.deepcopy(POD) | {"apiVersion": "v1", "kind": "Pod"}
    del stored["metadata"]["deletionTimestamp"], stored["status"]["containerStatuses"]
    del stored["status"]["initContainerStatuses"]
    cache.store_written(stored)
    (pod,) = state.pods(KEY, "owner")
    assert (pod.view.ready, pod.view.ended) == (True, False)
    for version in ("8", "9"):
        stored["metadata"]["resourceVersion"] = version
        stored["status"]["phase"] = ["Failed"]
        cache.store_written(stored)
    (pod,) = state.pods(KEY, "owner")
    assert (pod.view.ready, pod.view.ended, pod.view.phase) == (False, False, "Unknown")
    assert [line.levelname for line in caplog.records] == ["ERROR"], "one line for one object"
    assert "the operator cannot read ns/llama-0-1-0 (phase must be a text (got a list))" in caplog.text


@given(st.text(max_size=8) | st.integers().map(str) | st.just("9" * 5000))
def test_any_resource_version_is_ordered_or_zero(text: str) -> None:
    number = version_number(text)
    assert number == 0 or text.lstrip("0") == str(number)


def test_the_unchanged_pod_is_read_by_every_function(caplog: pytest.LogCaptureFixture) -> None:
    """Every function reads the object that the tests change. Otherwise the tests would prove nothing."""
    record = trim.pod_record(POD)
    assert record is not None
    assert isinstance(record.view, PodView)
    assert (record.health_port, record.view.key_secret, record.view.disrupted) == (8081, "s", "Preempted")
    assert record.view.termination is not None
    assert trim.node_view(NODE).unreachable_since is not None
    assert all(trim.child_record(stored) is not None for stored in CHILDREN.values())
    ungated: Mapping[str, Any] = {**POD, "spec": {**POD["spec"], "schedulingGates": []}}
    ungated = {**ungated, "metadata": {k: v for k, v in METADATA.items() if k != "deletionTimestamp"}}
    requests = trim.pod_requests(ungated)
    assert requests is not None
    assert requests.reservation is not None
    assert requests.reservation.demand.preferred_node == "n1"
