"""Pods onto nodes: against every possible way, and what is said when there is none."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from heteroinfer_operator.cluster import NodeView
from heteroinfer_operator.demand import (
    Manifest,
    PodDemand,
    Taint,
    pod_demand,
    preferred_node,
    selects_node,
    tolerates,
)
from heteroinfer_operator.planning.placement import assign_nodes, build_free_nodes, explain, obstacle

GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"


def node(name: str, **fields: Any) -> NodeView:
    gpus = fields.pop("gpus", 0)
    allocatable = {"cpu": 8.0, "memory": 32 * 2**30, "pods": 110.0} | ({GPU: float(gpus)} if gpus else {})
    return NodeView(name=name, allocatable={**allocatable, **fields.pop("allocatable", {})}, **fields)


def pod(**requests: float) -> PodDemand:
    gpus = {GPU: requests.pop("gpus")} if "gpus" in requests else {}
    return PodDemand(name="role gpu" if gpus else "role cpu", requests={**requests, **gpus, "pods": 1.0})


# Against every possible way

LABELS = st.fixed_dictionaries({}, optional={"a": st.sampled_from("xy"), ZONE: st.sampled_from("12")})
TAINTS = st.lists(
    st.builds(Taint, key=st.sampled_from("kl"), effect=st.sampled_from(["NoSchedule", "PreferNoSchedule"])),
    max_size=1,
).map(tuple)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeView]:
    return [
        node(
            f"n{index}",
            allocatable={"cpu": float(draw(st.integers(1, 4))), "pods": float(draw(st.integers(1, 3)))},
            gpus=draw(st.integers(0, 3)),
            requested={"cpu": float(draw(st.integers(0, 1))), GPU: float(draw(st.integers(0, 1)))},
            labels=draw(LABELS),
            taints=draw(TAINTS),
            schedulable=draw(st.sampled_from([True, True, True, False])),
        )
        for index in range(draw(st.integers(0, 4)))
    ]


@st.composite
def terms(draw: st.DrawFn) -> tuple[dict[str, Any], ...]:
    if draw(st.integers(0, 3)) != 0:
        return ()
    selector = {"matchLabels": {"app": draw(st.sampled_from(["0", "1", "stranger"]))}}
    return ({"topologyKey": draw(st.sampled_from([ZONE, "a"])), "labelSelector": selector},)


@st.composite
def groups(draw: st.DrawFn) -> list[PodDemand]:
    demands: list[PodDemand] = []
    for index in range(draw(st.integers(1, 2))):
        demand = PodDemand(
            name=f"role {index}",
            requests={
                "cpu": float(draw(st.integers(0, 3))),
                "pods": 1.0,
                **draw(st.sampled_from([{}, {GPU: 1.0}, {GPU: 2.0}])),
            },
            labels={"app": str(index)},
            node_selector=draw(st.sampled_from([{}, {}, {"a": "x"}])),
            tolerations=draw(st.sampled_from([(), ({"key": "k", "operator": "Exists"},)])),
            near=draw(terms()),
            away=draw(terms()),
        )
        demands += [demand] * draw(st.integers(1, 2))
    return demands


def allowed(demands: list[PodDemand], nodes: tuple[NodeView, ...], topology_key: str) -> bool:
    """Says what the scheduler would, for a whole assignment at once."""
    placed = list(zip(demands, nodes, strict=True))
    values = {n.labels.get(topology_key) for n in nodes}
    return (
        all(fits(n, [d for d, there in placed if there.name == n.name]) for n in nodes)
        and all(is_open(d, n) for d, n in placed)
        and all(agrees(position, placed) for position in range(len(placed)))
        and (not topology_key or (len(values) == 1 and None not in values))
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


def agrees(position: int, placed: list[tuple[PodDemand, NodeView]]) -> bool:
    demand, where = placed[position]
    for term in demand.away:
        if any(
            other != position and chosen(term, peer) and same(where, there, term["topologyKey"])
            for other, (peer, there) in enumerate(placed)
        ):
            return False
    for term in demand.near:
        wanted = [there for peer, there in placed if chosen(term, peer)]
        if wanted and not any(same(where, there, term["topologyKey"]) for there in wanted):
            return False
    return True


def chosen(term: Manifest, demand: PodDemand) -> bool:
    return bool(term["labelSelector"]["matchLabels"].items() <= demand.labels.items())


def same(one: NodeView, other: NodeView, key: str) -> bool:
    return key in one.labels and one.labels[key] == other.labels.get(key)


@given(groups(), clusters(), st.sampled_from(["", "", ZONE]))
def test_a_node_is_found_exactly_when_there_is_one(
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
        assert explain(demands, free_nodes, topology_key)


# What is said


def reported(demands: list[PodDemand], *nodes: NodeView, key: str = "") -> str:
    free_nodes = build_free_nodes(nodes)
    assert assign_nodes(demands, free_nodes, key) is None
    return explain(demands, free_nodes, key)


def test_what_is_missing_and_where() -> None:
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


def test_capacity_for_some_of_the_pods() -> None:
    words = reported([pod(gpus=1)] * 4, node("a", gpus=2), node("b", gpus=1))
    assert words == (
        "needs 4 pods (role gpu) with 1 nvidia.com/gpu, and there is capacity for 3; "
        "node a has capacity for 2, node b has capacity for 1"
    )


def test_memory_and_many_nodes() -> None:
    words = reported([pod(memory=40 * 2**30, cpu=2)], *(node(f"n{i}") for i in range(9)))
    assert words == (
        "needs 1 pod (role cpu) with 40.00 GiB of memory, 2 CPUs; "
        "nodes n0, n1, n2 and 6 more have 32.00 GiB free of 32.00 GiB of memory"
    )


def test_pods_that_fit_one_by_one_only() -> None:
    words = reported([pod(gpus=1, cpu=5), pod(cpu=5)], node("a", gpus=1))
    assert words.startswith("each pod has a node by itself, but there are not nodes for all of them at once")


def test_within_one_value_of_a_label() -> None:
    nodes = [node("a", gpus=1, labels={ZONE: "1"}), node("b", gpus=1, labels={ZONE: "2"})]
    assert assign_nodes([pod(gpus=1)] * 2, build_free_nodes(nodes)) is not None
    assert reported([pod(gpus=1)] * 2, *nodes, key=ZONE) == (
        f"no single value of {ZONE} has enough free capacity: "
        "1: needs 2 pods (role gpu) with 1 nvidia.com/gpu, and there is capacity for 1; "
        "node a has capacity for 1; "
        "2: needs 2 pods (role gpu) with 1 nvidia.com/gpu, and there is capacity for 1; "
        "node b has capacity for 1"
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


def test_what_is_promised_is_not_free() -> None:
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
    assert waiting.node == "b"
    assert assign_nodes([pod(gpus=1)] * 2, build_free_nodes(nodes, [waiting])) is not None, (
        "it can go nowhere"
    )
    anywhere = pod_demand("ns/other-0-1-0", {}, {"containers": [{"resources": {"limits": {GPU: "1"}}}]})
    assert assign_nodes([pod(gpus=1)] * 2, build_free_nodes(nodes, [anywhere])) is None


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
def test_tolerations(toleration: dict[str, str], *, matches: bool) -> None:
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
def test_required_node_affinity(expression: dict[str, Any], *, matches: bool) -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    demand = pod_demand(
        "p", {}, {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}
    )
    labelled = node("n", labels={"gen": "8", "word": "x"})
    assert (obstacle(demand, labelled) == "") is matches


def test_five_hundred_nodes_cost_milliseconds() -> None:
    """All of it takes about 0.1 s on a quiet machine; the bound is for a busy one."""
    nodes = [node(f"n{i:03}", gpus=8, labels={"kubernetes.io/hostname": f"n{i:03}"}) for i in range(500)]
    fits = [pod(gpus=8, cpu=4)] * 64 + [pod(cpu=2, memory=2**30)] * 64
    full = [pod(gpus=8, cpu=4)] * 501
    began = time.process_time()
    assert assign_nodes(fits, build_free_nodes(nodes)) is not None
    assert assign_nodes(full, build_free_nodes(nodes)) is None
    assert "and there is capacity for 500" in explain(full, build_free_nodes(nodes))
    assert time.process_time() - began < 5.0
