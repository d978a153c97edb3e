"""Pods on nodes, compared with all possible placements, and the message if there is none."""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from heteroinfer_operator.nodes.demand import (
    Manifest,
    PodDemand,
    Taint,
    pod_demand,
    preferred_node,
    selects_node,
    tolerates,
)
from heteroinfer_operator.nodes.group_placement import Placement, assign_nodes
from heteroinfer_operator.nodes.missing_capacity import describe_missing_capacity
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode, build_free_nodes, device_memory_mib, find_obstacle

GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"


def node(name: str, **fields: Any) -> NodeView:
    gpus = fields.pop("gpus", 0)
    allocatable = {"cpu": 8.0, "memory": 32 * 2**30, "pods": 110.0} | ({GPU: float(gpus)} if gpus else {})
    labels = {**IMAGE_PLATFORM, **fields.pop("labels", {})}
    return NodeView(
        name=name, allocatable={**allocatable, **fields.pop("allocatable", {})}, labels=labels, **fields
    )


def pod(**requests: float) -> PodDemand:
    gpus = {GPU: requests.pop("gpus")} if "gpus" in requests else {}
    return PodDemand(name="role gpu" if gpus else "role cpu", requests={**requests, **gpus, "pods": 1.0})


# Against every possible way

ZONED = {ZONE: st.sampled_from("12")}
LABELS = st.fixed_dictionaries(ZONED, optional={"a": st.sampled_from("xy")}) | st.fixed_dictionaries(
    {}, optional={"a": st.sampled_from("xy"), **ZONED}
)
TAINTS = st.lists(
    st.builds(Taint, key=st.sampled_from("kl"), effect=st.sampled_from(["NoSchedule", "PreferNoSchedule"])),
    max_size=1,
).map(tuple)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeView]:
    return [
        node(
            f"n{index}",
            allocatable={"cpu": float(draw(st.integers(2, 6))), "pods": float(draw(st.integers(1, 3)))},
            gpus=draw(st.integers(0, 3)),
            requested={"cpu": float(draw(st.integers(0, 1))), GPU: float(draw(st.integers(0, 1)))},
            labels=draw(LABELS),
            taints=draw(TAINTS),
            schedulable=draw(st.sampled_from([True, True, True, False])),
        )
        for index in range(draw(st.sampled_from([0, 1, 2, 3, 3, 4, 4, 4])))
    ]


OWN = "own"
NAMESPACES: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"namespaces": [OWN, "another"]},
    {"namespaces": ["another"]},
    {"namespaceSelector": {}},
    {"namespaces": ["another"], "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": OWN}}},
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "another"}}},
]


@st.composite
def term(draw: st.DrawFn) -> dict[str, Any]:
    selector = draw(
        st.sampled_from([{"app": "0"}, {"app": "1"}, {"app": "stranger"}, {"all": "yes"}, {"all": "yes"}])
    )
    return {
        "topologyKey": draw(st.sampled_from([ZONE, ZONE, "a"])),
        "labelSelector": {"matchLabels": selector},
        **draw(st.sampled_from(NAMESPACES)),
    }


def terms(chance: int) -> st.SearchStrategy[tuple[dict[str, Any], ...]]:
    """Returns no terms, or one time in `chance` one or two."""
    some = st.lists(term(), min_size=1, max_size=2).map(tuple)
    return st.integers(1, chance).flatmap(lambda number: some if number == 1 else st.just(()))


@st.composite
def groups(draw: st.DrawFn) -> list[PodDemand]:
    demands: list[PodDemand] = []
    for index in range(draw(st.integers(1, 2))):
        demand = PodDemand(
            name=f"role {index}",
            requests={
                "cpu": float(draw(st.integers(0, 3))),
                "pods": 1.0,
                **draw(st.sampled_from([{}, {}, {}, {GPU: 1.0}, {GPU: 2.0}])),
            },
            labels={"app": str(index), "all": "yes"},
            namespace=OWN,
            node_selector=draw(st.sampled_from([{}, {}, {}, {}, {"a": "x"}])),
            tolerations=draw(st.sampled_from([(), ({"key": "k", "operator": "Exists"},)])),
            near=draw(terms(2)),
            away=draw(terms(4)),
        )
        demands += [demand] * draw(st.integers(1, 2))
    return demands


def allowed(demands: list[PodDemand], nodes: tuple[NodeView, ...], topology_key: str) -> bool:
    """Says what the scheduler would, for a whole assignment at the same time."""
    placed = list(zip(demands, nodes, strict=True))
    values = {n.labels.get(topology_key) for n in nodes}
    return (
        all(fits(n, [d for d, there in placed if there.name == n.name]) for n in nodes)
        and all(is_open(d, n) for d, n in placed)
        and (not topology_key or (len(values) == 1 and None not in values))
        and all(
            scheduled([placed[position] for position in order])
            for order in itertools.permutations(range(len(placed)))
        )
    )


def fits(where: NodeView, demands: list[PodDemand]) -> bool:
    return all(
        sum(d.requests.get(name, 0.0) for d in demands)
        <= where.allocatable.get(name, 0.0) - where.requested.get(name, 0.0)
        for name in {name for d in demands for name in d.requests}
    )


def is_open(demand: PodDemand, where: NodeView) -> bool:
    taints = [t for t in where.taints if t.keeps_away and not tolerates(demand.tolerations, t)]
    return where.schedulable and not taints and selects_node(demand, where.name, where.labels)


# What follows is written from kube-scheduler's interpodaffinity/filtering.go@v1.35.4, not from our code.

Placed = tuple[PodDemand, NodeView]


def scheduled(queue: list[Placed]) -> bool:
    """Says whether kube-scheduler places all pods where they are to be, in this order and then again."""
    existing: list[Placed] = []
    unschedulable, before = queue, -1
    while unschedulable and len(existing) != before:
        before, again = len(existing), []
        for incoming in unschedulable:
            known = [peer for peer, _ in queue]
            if passes(incoming, existing, known):
                existing.append(incoming)
            else:
                again.append(incoming)
        unschedulable = again
    return not unschedulable


def passes(incoming: Placed, existing: list[Placed], group: list[PodDemand]) -> bool:
    """Filter: satisfyPodAffinity, satisfyPodAntiAffinity and satisfyExistingPodsAntiAffinity."""
    own, where = incoming
    affinity: Counter[tuple[str, str]] = Counter()
    anti_affinity: Counter[tuple[str, str]] = Counter()
    of_existing: Counter[tuple[str, str]] = Counter()
    for peer, there in existing:
        if matches_all(own.near, peer):
            affinity.update(pairs(own.near, there))
        anti_affinity.update(pairs([each for each in own.away if matches(each, peer)], there))
        of_existing.update(pairs([each for each in peer.away if matches(each, own)], there))
    here = set(where.labels.items())
    if here & {*anti_affinity} or here & {*of_existing}:
        return False
    wanted = {each["topologyKey"] for each in own.near}
    if not wanted <= where.labels.keys():
        return False
    if own.near and not any(matches_all(own.near, peer) for peer in group):
        return True  # strangers, whom nobody here knows: one may be anywhere
    if all(affinity[key, where.labels[key]] > 0 for key in wanted):
        return True
    return not affinity and matches_all(own.near, own)


def pairs(those: Iterable[Manifest], where: NodeView) -> list[tuple[str, str]]:
    keys = [each["topologyKey"] for each in those]
    return [(key, where.labels[key]) for key in keys if key in where.labels]


def matches_all(those: Sequence[Manifest], demand: PodDemand) -> bool:
    return bool(those) and all(matches(each, demand) for each in those)


def matches(each: Manifest, demand: PodDemand) -> bool:
    named = [*each.get("namespaces", ())]
    selector = each.get("namespaceSelector")
    if selector is None:
        in_namespace = not named or demand.namespace in named
    else:
        by_name = selector.get("matchLabels", {}).get("kubernetes.io/metadata.name", demand.namespace)
        in_namespace = demand.namespace in (*named, by_name)
    return in_namespace and bool(each["labelSelector"]["matchLabels"].items() <= demand.labels.items())


@settings(deadline=None, max_examples=300)
@given(groups(), clusters(), st.sampled_from(["", "", ZONE]))
def test_finds_a_node_exactly_if_one_fits(
    demands: list[PodDemand], nodes: list[NodeView], topology_key: str
) -> None:
    free_nodes = build_free_nodes(nodes)
    before = [dict(free_node.free) for free_node in free_nodes]
    found = assign_nodes(demands, free_nodes, topology_key)
    assert [free_node.free for free_node in free_nodes] == before, "looking takes nothing"
    possible = any(
        allowed(demands, way, topology_key) for way in itertools.product(nodes, repeat=len(demands))
    )
    event(f"fits: {possible}")
    assert (found is not None) == possible
    if found is not None:
        by_name = {n.name: n for n in nodes}
        assert allowed(demands, tuple(by_name[name] for name in found.nodes), topology_key)
        assert found.domain == (by_name[found.nodes[0]].labels[ZONE] if topology_key else "")
    else:
        assert describe_missing_capacity(demands, free_nodes, topology_key)


NEAR = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": ZONE}
HOST = "kubernetes.io/hostname"


def zone(name: str, pods: int, *, memory: int = 2**30) -> list[NodeView]:
    """Returns nodes for one pod each, all of them different, as real nodes with pods on them are."""
    return [
        NodeView(
            name=f"{name}{index}",
            allocatable={"cpu": 6.0, "memory": float(memory + index), "pods": 110.0},
            labels={ZONE: name, HOST: f"{name}{index}"},
        )
        for index in range(pods)
    ]


def app(count: int, **fields: Any) -> list[PodDemand]:
    requests = {"cpu": 4.0, "pods": 1.0}
    demand = PodDemand(name="role r", requests=requests, labels={"app": "x"}, namespace=OWN, **fields)
    return [demand] * count


@pytest.mark.parametrize(("held", "pods"), [((3, 4), 4), ((15, 16), 16), ((1, 8, 3), 8), ((20, 20, 21), 21)])
def test_pods_that_must_be_near_each_other_are_in_the_zone_that_holds_all(
    held: tuple[int, ...], pods: int
) -> None:
    """Earlier, pods beyond the first zone's capacity got nodes on which the scheduler never places them."""
    nodes = [each for name, count in zip("abc", held, strict=False) for each in zone(name, count)]
    found = assign_nodes(app(pods, near=(NEAR,)), build_free_nodes(nodes))
    assert found is not None
    assert {name[0] for name in found.nodes} == {"abc"[held.index(pods)]}


def test_reports_the_missing_capacity_if_no_zone_has_space_for_all_pods() -> None:
    assert reported(app(4, near=(NEAR,)), *zone("a", 3), *zone("b", 2)) == (
        f"no single value of {ZONE} has enough free capacity: "
        "a: needs 4 pods (role r) with 4 CPUs, and there is capacity for 3; "
        "nodes a0, a1, a2 have capacity for 1 (6 free of 6 CPUs); "
        "b: needs 4 pods (role r) with 4 CPUs, and there is capacity for 2; "
        "nodes b0, b1 have capacity for 1 (6 free of 6 CPUs); "
        "podAffinity requires one value for all pods"
    )
    assert reported(app(1, near=(NEAR,)), node("bare")) == (
        f"needs 1 pod (role r) with 4 CPUs; node bare has no label {ZONE}, which the pod's podAffinity names"
    )


def test_two_roles_that_must_be_together_get_one_zone() -> None:
    """A zone with capacity for each role by itself, and not for both."""
    small = PodDemand(name="role s", requests={"cpu": 2.0, "pods": 1.0}, labels={"app": "x"}, near=(NEAR,))
    demands = [*app(3, near=(NEAR,)), *[small] * 4]
    assert reported(demands, *zone("a", 3)).startswith("each pod alone fits on a node")
    found = assign_nodes(demands, build_free_nodes([*zone("a", 3), *zone("b", 5)]))
    assert found is not None
    assert {name[0] for name in found.nodes} == {"b"}


def test_pods_that_must_be_on_one_host_are_found_on_many_hosts_in_milliseconds() -> None:
    term = {**NEAR, "topologyKey": HOST}
    nodes = zone("a", 500)
    large = NodeView(
        name="large", allocatable={"cpu": 64.0, "pods": 110.0}, labels={ZONE: "b", HOST: "large"}
    )
    began = time.process_time()
    found = assign_nodes(app(4, near=(term,)), build_free_nodes([*nodes, large]))
    assert found is not None
    assert set(found.nodes) == {"large"}
    assert assign_nodes(app(4, near=(term,)), build_free_nodes(nodes)) is None
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("namespaces", "apart"),
    [
        ({}, True),
        ({"namespaces": []}, True),
        ({"namespaces": ["another"]}, False),
        ({"namespaces": ["another", OWN]}, True),
        ({"namespaceSelector": {}}, True),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "another"}}}, False),
        ({"namespaces": ["another"], "namespaceSelector": {}}, True),
        # Labels of namespaces are not known: half a group would be worse than one that waits.
        ({"namespaceSelector": {"matchLabels": {"team": "another"}}}, True),
    ],
)
def test_affinity_terms_apply_to_the_namespaces_that_they_name(
    namespaces: dict[str, Any], *, apart: bool
) -> None:
    term = {**NEAR, "topologyKey": HOST, **namespaces}
    (one,) = zone("a", 1)
    one = NodeView(name=one.name, allocatable={"cpu": 64.0, "pods": 110.0}, labels=one.labels)
    found = assign_nodes(app(2, away=(term,)), build_free_nodes([one]))
    assert (found is None) is apart
    if found is None:
        words = describe_missing_capacity(app(2, away=(term,)), build_free_nodes([one]))
        assert "under their podAffinity and podAntiAffinity" in words


def unequal(name: str, number: int, *, memory: float, gpu_mib: int = 40960) -> NodeView:
    """Returns a node with one GPU that differs from all other nodes, as real nodes with pods do."""
    return node(
        name,
        gpus=1,
        allocatable={"cpu": 32.0, "memory": memory + number},
        labels={f"{GPU}.memory": str(gpu_mib), HOST: name},
    )


@pytest.mark.parametrize("gpu_pods", [1, 3, 8])
def test_gpu_pods_leave_the_only_node_of_another_pod(gpu_pods: int) -> None:
    """That node has the largest GPU, so the GPU pods, which are placed first, prefer it."""
    nodes = [unequal(f"n{index:03}", index, memory=64 * 2**30) for index in range(300)]
    nodes.insert(0, unequal("big", 0, memory=512 * 2**30, gpu_mib=81559))
    demands = [*[pod(gpus=1, cpu=8)] * gpu_pods, pod(cpu=30, memory=400 * 2**30)]
    began = time.process_time()
    found = assign_nodes(demands, build_free_nodes(nodes))
    assert found is not None
    assert found.nodes[-1] == "big"
    assert len(set(found.nodes)) == gpu_pods + 1
    assert time.process_time() - began < 2.0, "about 20 ms on a quiet machine"


def test_gpu_pods_leave_the_only_node_of_a_pod_that_must_be_apart_from_them() -> None:
    """That node has capacity for both, so only the affinity term keeps the GPU pods away."""
    term = {"labelSelector": {"matchLabels": {"app": "gpu"}}, "topologyKey": HOST}
    alone = dataclasses.replace(pod(cpu=2), node_selector={HOST: "n000"}, away=(term,), namespace=OWN)
    with_gpu = dataclasses.replace(pod(gpus=1, cpu=8), labels={"app": "gpu"}, namespace=OWN)
    nodes = [unequal(f"n{index:03}", index, memory=64 * 2**30) for index in range(300)]
    found = assign_nodes([*[with_gpu] * 4, alone], build_free_nodes(nodes))
    assert found is not None
    assert found.nodes[-1] == "n000"
    assert "n000" not in found.nodes[:-1]


# What is said


def reported(demands: list[PodDemand], *nodes: NodeView, key: str = "") -> str:
    free_nodes = build_free_nodes(nodes)
    assert assign_nodes(demands, free_nodes, key) is None
    return describe_missing_capacity(demands, free_nodes, key)


def test_reports_missing_capacity_by_node() -> None:
    words = reported(
        [pod(gpus=2)],
        node("a", gpus=2, requested={GPU: 1.0}),
        node("b", gpus=2, taints=(Taint(key="gpu", value="x"),)),
        node("c"),
        node("d", schedulable=False, problem="cordoned"),
    )
    assert words == (
        "needs 1 pod (role gpu) with 2 nvidia.com/gpu; node a has 1 free of 2 nvidia.com/gpu, "
        "node c has no nvidia.com/gpu, node b is tainted gpu=x:NoSchedule, node d is cordoned"
    )


def test_reports_for_how_many_pods_there_is_capacity() -> None:
    words = reported([pod(gpus=1)] * 4, node("a", gpus=2), node("b", gpus=1))
    assert words == (
        "needs 4 pods (role gpu) with 1 nvidia.com/gpu, and there is capacity for 3; "
        "node a has capacity for 2 (2 free of 2 nvidia.com/gpu), "
        "node b has capacity for 1 (1 free of 1 nvidia.com/gpu)"
    )


def test_places_pods_by_memory_on_many_nodes() -> None:
    words = reported([pod(memory=40 * 2**30, cpu=2)], *(node(f"n{i}") for i in range(9)))
    assert words == (
        "needs 1 pod (role cpu) with 40.00 GiB of memory, 2 CPUs; "
        "nodes n0, n1, n2 and 6 more have 32.00 GiB free of 32.00 GiB of memory"
    )


def test_reports_pods_that_fit_separately_but_not_together() -> None:
    words = reported([pod(gpus=1, cpu=5), pod(cpu=5)], node("a", gpus=1))
    assert words.startswith("each pod alone fits on a node, but not all pods together")


def test_all_pods_must_fit_within_one_value_of_the_topology_key() -> None:
    nodes = [node("a", gpus=1, labels={ZONE: "1"}), node("b", gpus=1, labels={ZONE: "2"})]
    assert assign_nodes([pod(gpus=1)] * 2, build_free_nodes(nodes)) is not None
    assert reported([pod(gpus=1)] * 2, *nodes, key=ZONE) == (
        f"no single value of {ZONE} has enough free capacity: "
        "1: needs 2 pods (role gpu) with 1 nvidia.com/gpu, and there is capacity for 1; "
        "node a has capacity for 1 (1 free of 1 nvidia.com/gpu); "
        "2: needs 2 pods (role gpu) with 1 nvidia.com/gpu, and there is capacity for 1; "
        "node b has capacity for 1 (1 free of 1 nvidia.com/gpu)"
    )
    assert reported([pod(gpus=1)], node("c", gpus=1), key=ZONE).startswith(f"no node has the label {ZONE}")
    assert reported([pod()]) == "needs 1 pod (role cpu) with no requests; there are no nodes"


# Which node


def test_pods_without_gpus_leave_nodes_with_gpus_free() -> None:
    nodes = [node("gpu", gpus=1), node("cpu")]
    found = assign_nodes([pod(cpu=8), pod(gpus=1, cpu=8)], build_free_nodes(nodes))
    assert found is not None
    assert found.nodes == ("cpu", "gpu")


def test_larger_gpus_come_first() -> None:
    nodes = [node(f"m{gib}", gpus=1, labels={f"{GPU}.memory": str(gib * 1024)}) for gib in (24, 80, 40)]
    found = assign_nodes([pod(gpus=1)], build_free_nodes(nodes))
    assert found is not None
    assert found.nodes == ("m80",)


def zoned(name: str, value: str, gib: int = 80, **fields: Any) -> NodeView:
    """Returns a node with one GPU of this size in a zone."""
    return node(name, gpus=1, labels={ZONE: value, f"{GPU}.memory": str(gib * 1024)}, **fields)


def test_the_value_of_the_topology_key_with_the_largest_gpus_comes_first() -> None:
    """The plan counts the smallest GPU of a role, so one larger GPU in a zone does not help."""
    sizes = {"a": (24, 80), "b": (40, 40), "c": (24, 24), "d": (40, 40)}
    nodes = [
        zoned(f"{value}{index}", value, gib)
        for value, both in sizes.items()
        for index, gib in enumerate(both)
    ]
    found = assign_nodes([pod(gpus=1, cpu=5)] * 2, build_free_nodes(nodes), ZONE)
    assert found is not None
    assert found.domain == "b", "the first of two equal values"


def test_pods_without_gpus_use_the_value_of_the_topology_key_without_gpus() -> None:
    nodes = [zoned("a", "1"), node("b", labels={ZONE: "2"})]
    found = assign_nodes([pod(cpu=8)], build_free_nodes(nodes), ZONE)
    assert found is not None
    assert found.domain == "2"


def test_values_of_the_topology_key_share_the_attempts_and_a_large_group_still_fits() -> None:
    """Each of 40 values gets few attempts, but enough for each of the group's pods."""
    nodes = [zoned(f"{value:02}-{index:03}", f"{value:02}") for value in range(40) for index in range(3)]
    nodes += [zoned(f"large-{index:03}", "large") for index in range(150)]
    found = assign_nodes([pod(cpu=8)] * 150, build_free_nodes(nodes), ZONE)
    assert found is not None
    assert found.domain == "large"


def test_the_value_of_the_topology_key_with_nodes_apart_from_other_groups_comes_first() -> None:
    """Zone 1 has more nodes with another group than zone 2, but also one without."""
    nodes = [*(zoned(f"n{index}", "1") for index in range(3)), zoned("m", "2")]
    others = OtherGroups.on_nodes([{"n0", "n1", "m"}], nodes)
    found = assign_nodes([pod(gpus=1)], build_free_nodes(nodes), ZONE, others)
    assert found == Placement(nodes=("n2",), domain="1")


def test_nodes_and_zones_with_fewer_other_groups_come_first() -> None:
    nodes = [
        *(zoned(f"a{index}", "a") for index in range(2)),
        *(zoned(f"b{index}", "b") for index in range(2)),
    ]

    def chosen(*groups: set[str]) -> tuple[str, ...]:
        found = assign_nodes(
            [pod(cpu=1)] * 2, build_free_nodes(nodes), "", OtherGroups.on_nodes(groups, nodes)
        )
        assert found is not None
        return found.nodes

    groups: list[set[str]] = []
    for _ in range(8):
        groups.append(set(chosen(*groups)))
    assert groups == 2 * [{"a0"}, {"b0"}, {"a1"}, {"b1"}]
    assert chosen({"a0"}, {"a0"}, {"a1"}, {"b0"}, {"b1"}, {"b1"}) == ("a1", "a1")
    assert chosen({"a0", "a1"}, {"b0"}, {"b1"}) == ("a0", "a0"), "nodes count each group once, and zones too"


def test_a_group_that_shares_nodes_is_on_one_node_if_it_fits() -> None:
    """In the order of free memory, the first node has room for one of two pods only."""
    small, large = node("small", allocatable={"cpu": 4.0, "memory": 30 * 2**30}), node("large")

    def chosen(*groups: set[str]) -> tuple[str, ...]:
        free_nodes = build_free_nodes([small, large])
        others = OtherGroups.on_nodes(groups, [small, large])
        found = assign_nodes([pod(cpu=4), pod(cpu=3)], free_nodes, "", others)
        assert found is not None
        return found.nodes

    assert chosen() == ("small", "large"), "no group to share with"
    assert chosen({"small"}, {"large"}) == ("large", "large")
    assert chosen({"small", "large"}) == ("large", "large")
    assert chosen({"large"}) == ("large", "large"), "a part on the free node would be lost more often"
    assert chosen({"small"}, {"large"}, {"large"}) == ("large", "large"), "its loss ends three groups anyway"
    assert chosen({"small"}) == ("large", "large"), "it shares no node"


@pytest.mark.parametrize("position", range(5))
def test_the_only_value_of_the_topology_key_with_enough_capacity_is_found(position: int) -> None:
    nodes = [zoned(f"{value}{index}", str(value)) for value in range(5) for index in range(2)]
    nodes.append(zoned("more", str(position)))
    found = assign_nodes([pod(gpus=1)] * 3, build_free_nodes(nodes), ZONE)
    assert found is not None
    assert found.domain == str(position)


@pytest.mark.parametrize("topology_key", ["", ZONE])
def test_the_order_of_the_nodes_changes_no_placement(topology_key: str) -> None:
    """A cache lists nodes by the time at which it saw them, so a restart changes the order."""
    nodes = [zoned(f"n{index}", str(index % 3)) for index in range(9)]
    demands = [*[pod(gpus=1, cpu=5)] * 2, pod(cpu=5)]
    reserved = [pod(gpus=1, cpu=1)] * 2
    found = {
        assign_nodes(demands, build_free_nodes(listed, reserved), topology_key)
        for listed in (nodes, nodes[::-1], nodes[4:] + nodes[:4])
    }
    assert len(found) == 1
    assert None not in found


def test_reserved_capacity_is_not_free() -> None:
    nodes = [node("a", gpus=1), node("b", gpus=1)]
    waiting = pod_demand(
        "ns/other-0-1-0",
        {},
        {
            "containers": [{"resources": {"limits": {GPU: "1"}}}],
            "nodeSelector": {"disk": "ssd"},
            "affinity": {
                "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred_node("b")]}
            },
        },
    )
    assert waiting.preferred_node == "b"
    assert assign_nodes([pod(gpus=1)] * 2, build_free_nodes(nodes, [waiting])) is not None, (
        "it can go nowhere"
    )
    anywhere = pod_demand("ns/other-0-1-0", {}, {"containers": [{"resources": {"limits": {GPU: "1"}}}]})
    assert assign_nodes([pod(gpus=1)] * 2, build_free_nodes(nodes, [anywhere])) is None


def first_fit(nodes: list[NodeView], waiting: list[PodDemand]) -> list[dict[str, float]]:
    """Returns what is free if each pod in turn is tried on its hint and on every node."""
    free_nodes = build_free_nodes(nodes)
    for demand in waiting:
        hinted = [free_node for free_node in free_nodes if free_node.node.name == demand.preferred_node]
        for free_node in (*hinted, *free_nodes):
            if not find_obstacle(demand, free_node.node) and free_node.has(demand.requests):
                free_node.reserve(demand.requests)
                break
    return [free_node.free for free_node in free_nodes]


@settings(deadline=None)
@given(
    st.lists(groups(), max_size=4), clusters(), st.lists(st.sampled_from(["", "n0", "n1", "n9"]), min_size=16)
)
def test_reserved_pods_are_placed_like_by_first_fit(
    waiting: list[list[PodDemand]], nodes: list[NodeView], hints: list[str]
) -> None:
    demands = [demand for group in waiting for demand in group]
    hinted = [
        dataclasses.replace(demand, preferred_node=hint) for demand, hint in zip(demands, hints, strict=False)
    ]
    assert [each.free for each in build_free_nodes(nodes, hinted)] == first_fit(nodes, hinted)


def test_equal_reserved_pods_search_full_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(f"n{index}", requested={"cpu": 8.0}) for index in range(200)] + [node("z-free")]
    looks = 0
    has = FreeNode.has

    def counted(free_node: FreeNode, requests: Mapping[str, float]) -> bool:
        nonlocal looks
        looks += 1
        return has(free_node, requests)

    monkeypatch.setattr(FreeNode, "has", counted)
    build_free_nodes(nodes, [pod(cpu=0.001, memory=1.0) for _ in range(100)])
    assert looks == 200 + 100


# Node rules, as the scheduler reads them


@pytest.mark.parametrize(
    ("toleration", "matches"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "value": "x"}, True),
        ({"key": "gpu", "value": "y"}, False),
        ({"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoExecute"}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_allow_tainted_nodes(toleration: dict[str, str], *, matches: bool) -> None:
    assert tolerates([toleration], Taint(key="gpu", value="x")) is matches


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ({"key": "gen", "operator": "In", "values": ["7", "8"]}, True),
        ({"key": "gen", "operator": "NotIn", "values": ["8"]}, False),
        ({"key": "none", "operator": "NotIn", "values": ["8"]}, True),
        ({"key": "gen", "operator": "Exists"}, True),
        ({"key": "none", "operator": "DoesNotExist"}, True),
        ({"key": "gen", "operator": "Gt", "values": ["7"]}, True),
        ({"key": "gen", "operator": "Gt", "values": ["8"]}, False),
        ({"key": "gen", "operator": "Lt", "values": ["9"]}, True),
        ({"key": "word", "operator": "Lt", "values": ["9"]}, False),
    ],
)
def test_respects_required_node_affinity(expression: dict[str, Any], *, matches: bool) -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    demand = pod_demand(
        "p", {}, {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}
    )
    labelled = node("n", labels={"gen": "8", "word": "x"})
    assert (find_obstacle(demand, labelled) is None) is matches


def test_five_hundred_nodes_cost_milliseconds() -> None:
    """The search takes about 0.1 s on an idle machine. The limit of the test is for a busy machine."""
    nodes = [node(f"n{i:03}", gpus=8, labels={"kubernetes.io/hostname": f"n{i:03}"}) for i in range(500)]
    fits = [pod(gpus=8, cpu=4)] * 64 + [pod(cpu=2, memory=2**30)] * 64
    full = [pod(gpus=8, cpu=4)] * 501
    began = time.process_time()
    assert assign_nodes(fits, build_free_nodes(nodes)) is not None
    assert assign_nodes(full, build_free_nodes(nodes)) is None
    assert "and there is capacity for 500" in describe_missing_capacity(full, build_free_nodes(nodes))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("label", ["9" * 23, "0", "1" + "0" * 12, "²", "40960Mi"])
def test_an_implausible_label_of_gpu_memory_counts_as_unknown(label: str) -> None:
    node = NodeView(name="a", allocatable={}, labels={"nvidia.com/gpu.memory": label})
    assert device_memory_mib(node, "nvidia.com/gpu") is None
