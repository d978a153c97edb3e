"""Several groups: separate nodes and zones, one disruption budget, and pods of lower priority."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceObservation
from heteroinfer_operator.nodes.demand import PodDemand, avoided_nodes, pod_demand, preferred_node
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import ZONE
from heteroinfer_operator.nodes.priorities import PriorityClassView, preempting_priority
from tests.unit.reconcile.world import World, cpu_pair

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
URGENT = PriorityClassView(name="urgent", value=1000)
PLACEHOLDERS = {"cpu": 62.0}


class SeveralNodes(World):
    """A world whose pods run on the nodes that their hints name."""

    reserved: tuple[PodDemand, ...] = ()
    classes: tuple[PriorityClassView, ...] | None = None

    def observe(self) -> ResourceObservation:
        hinted = {name: self.hint(name) for name in self.workers()}
        unplaced = [name for name in hinted if not self.pods[name].node]
        ours = [
            pod_demand(
                f"default/{name}",
                self.manifests[name]["metadata"]["labels"],
                {**self.manifests[name]["spec"], "priority": 0},
            )
            for name in unplaced
        ]
        found = super().observe()
        reserved = (*self.reserved, *ours)
        return replace(found, reserved=reserved, priority_classes=self.classes)

    def hint(self, name: str) -> str:
        affinity = self.manifests[name]["spec"].get("affinity", {}).get("nodeAffinity", {})
        terms = [term["preference"]["matchFields"][0]["values"] for term in affinity.get(PREFERRED, ())]
        return terms[0][0] if terms else ""

    def place(self) -> None:
        """Puts each pod onto its hinted node, and runs it."""
        for name in self.workers():
            self.pods[name] = replace(self.pods[name], node=self.pods[name].node or self.hint(name))
        self.all_ready()
        self.settle()

    def nodes_of(self, group: int) -> set[str]:
        return {self.pods[name].node for name in self.of_group(group)}

    def of_group(self, group: int) -> list[str]:
        return [name for name in self.workers() if self.pods[name].labels[names.LABEL_GROUP] == str(group)]

    def end_group(self, group: int) -> None:
        """Evicts a pod of a group, and lets the pods of its epoch disappear."""
        name = self.of_group(group)[0]
        self.pods[name] = replace(self.pods[name], disrupted="EvictionByEvictionAPI")
        self.delete_pod(name)
        self.settle()
        self.reap()

    def budgets(self) -> dict[str, tuple[int, str]]:
        return {
            name: (stored["spec"]["minAvailable"], stored["spec"]["unhealthyPodEvictionPolicy"])
            for (kind, name), stored in self.objects.items()
            if kind == "PodDisruptionBudget"
        }


def node(name: str, *, zone: str = "", **fields: Any) -> NodeView:
    labels = {**IMAGE_PLATFORM, "kubernetes.io/hostname": name, **({ZONE: zone} if zone else {})}
    return NodeView(
        name=name, allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100}, labels=labels, **fields
    )


def pairs(nodes: Iterable[NodeView], *, replicas: int = 2, **spec: Any) -> SeveralNodes:
    world = SeveralNodes(spec=cpu_pair(replicas=replicas, **spec), nodes=tuple(nodes))
    world.settle()
    world.answer_inspection()
    world.settle()
    world.place()
    return world


# Apart


def test_two_groups_use_different_nodes() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")))
    assert (world.nodes_of(0), world.nodes_of(1)) == ({"n0"}, {"n1"})
    affinity = world.manifests[world.of_group(1)[0]]["spec"]["affinity"]
    assert affinity == {"nodeAffinity": {PREFERRED: [preferred_node("n1"), avoided_nodes(["n0"])]}}
    world.nodes = (node("n0", schedulable=False, problem="cordoned"), node("n1"), node("n2"))
    world.end_group(0)
    world.settle()
    world.place()
    assert (world.nodes_of(0), world.nodes_of(1)) == ({"n2"}, {"n1"})


def test_groups_without_planned_nodes_have_an_anti_affinity() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")), scheduling={"gang": "Never"})
    affinity = world.manifests[world.of_group(1)[0]]["spec"]["affinity"]
    terms = affinity["podAntiAffinity"][PREFERRED]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == ["kubernetes.io/hostname", ZONE]
    (other,) = terms[0]["podAffinityTerm"]["labelSelector"]["matchExpressions"]
    assert other == {"key": names.LABEL_GROUP, "operator": "NotIn", "values": ["1"]}
    assert "nodeAffinity" not in affinity


def test_two_groups_share_the_only_node() -> None:
    world = pairs([node("n0")])
    assert (world.nodes_of(0), world.nodes_of(1)) == ({"n0"}, {"n0"})


def test_four_groups_on_two_nodes_are_two_and_two() -> None:
    world = pairs(map(node, ("n0", "n1")), replicas=4)
    nodes_of_groups = [world.nodes_of(group) for group in range(4)]
    assert sorted(map(sorted, nodes_of_groups)) == [["n0"], ["n0"], ["n1"], ["n1"]]
    world.end_group(2)
    world.settle()
    world.place()
    assert world.nodes_of(2) == nodes_of_groups[2], "the node with fewer other groups"


def test_groups_that_are_added_one_by_one_are_two_and_two() -> None:
    world = pairs(map(node, ("n0", "n1")), replicas=1)
    for replicas in (2, 3, 4):
        world.change_spec(replicas=replicas)
        world.settle()
        world.place()
    assert [world.nodes_of(group) for group in range(4)] == 2 * [{"n0"}, {"n1"}]


def test_pods_of_a_single_group_have_no_anti_affinity() -> None:
    world = pairs(map(node, ("n0", "n1")), replicas=1)
    assert "podAntiAffinity" not in world.manifests[world.of_group(0)[0]]["spec"]["affinity"]


def test_each_group_gets_its_own_zone() -> None:
    """Each pod needs its own node: without zones, the second group would use both zones."""
    roles = [
        {"name": name, "device": "CPU", "resources": {"limits": {"cpu": "40", "memory": "8Gi"}}}
        for name in ("first", "second")
    ]
    order = [node("n0", zone="a"), node("n1", zone="b"), node("n2", zone="b"), node("n3", zone="a")]
    world = pairs(order, roles=roles)
    assert (world.nodes_of(0), world.nodes_of(1)) == ({"n0", "n3"}, {"n1", "n2"})


def test_pods_prefer_a_topology_domain_without_other_groups() -> None:
    nodes = [node("n0", zone="a"), node("n1", zone="a"), node("n2", zone="b")]
    world = pairs(nodes, scheduling={"topologyKey": ZONE})
    assert (world.nodes_of(0), world.nodes_of(1)) == ({"n0"}, {"n2"})


# One budget


def test_one_eviction_is_allowed_but_none_in_the_last_serving_group() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")))
    assert world.budgets() == {"demo-groups": (3, "AlwaysAllow")}
    world.end_group(0)
    assert world.budgets() == {"demo-groups": (2, "AlwaysAllow")}
    world.settle()
    assert len(world.of_group(0)) == 2
    assert world.budgets() == {"demo-groups": (3, "AlwaysAllow")}, "before its pods can be ready"
    world.place()
    assert world.budgets() == {"demo-groups": (3, "AlwaysAllow")}


def test_a_group_without_capacity_does_not_block_a_drain() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")), replicas=3)
    assert world.budgets() == {"demo-groups": (5, "AlwaysAllow")}
    full = {"cpu": 64.0}
    world.nodes = tuple(replace(node(name), requested=full) for name in ("n0", "n1", "n2"))
    world.end_group(0)
    world.settle()
    assert world.budgets() == {"demo-groups": (3, "AlwaysAllow")}
    world.end_group(1)
    world.settle()
    assert world.budgets() == {"demo-groups": (2, "AlwaysAllow")}, "the last one stays"


def test_scaling_switches_between_group_budget_and_shared_budget() -> None:
    world = pairs(map(node, ("n0", "n1")), replicas=1)
    assert world.budgets() == {"demo-0-ranks": (1, "IfHealthyBudget")}
    world.change_spec(replicas=2)
    world.settle()
    world.place()
    assert world.budgets() == {"demo-groups": (3, "AlwaysAllow")}
    world.change_spec(replicas=1)
    world.settle()
    assert world.budgets() == {"demo-0-ranks": (1, "IfHealthyBudget")}


def test_evictions_are_blocked_before_a_rollout_stops_a_group() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")))
    before = world.workers()
    world.change_spec(engine={"maxModelLen": 256})
    while world.budgets() == {"demo-groups": (3, "AlwaysAllow")}:
        world.step()
    assert world.budgets() == {"demo-groups": (4, "AlwaysAllow")}
    assert not [name for name in before if world.pods[name].deleting], "the budget comes first"
    world.step()
    assert len([name for name in before if world.pods[name].deleting]) == 2
    world.settle()
    assert world.budgets() == {"demo-groups": (2, "AlwaysAllow")}


def test_an_earlier_eviction_delays_the_rollout() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")))
    world.change_spec(engine={"maxModelLen": 256})
    while world.budgets() == {"demo-groups": (3, "AlwaysAllow")}:
        world.step()
    evicted = world.of_group(1)[0]
    world.pods[evicted] = replace(world.pods[evicted], disrupted="EvictionByEvictionAPI")
    world.delete_pod(evicted)
    world.settle()
    assert not [name for name in world.of_group(0) if world.pods[name].deleting]


def test_a_refused_budget_does_not_delay_the_rollout() -> None:
    world = pairs(map(node, ("n0", "n1", "n2")))
    world.refuses["PodDisruptionBudget", "*"] = "a webhook denies it"
    world.change_spec(engine={"maxModelLen": 256})
    world.live(10)
    assert len([name for name in world.workers() if world.pods[name].deleting]) == 2


# Priority


@pytest.mark.parametrize(
    ("class_name", "classes", "priority"),
    [
        ("", None, None),
        ("", (), 0),
        ("", (replace(URGENT, is_default=True),), 1000),
        ("", (replace(URGENT, is_default=True, preempts=False),), None),
        ("urgent", (URGENT,), 1000),
        ("urgent", (replace(URGENT, preempts=False),), None),
        ("another", (URGENT,), None),
    ],
)
def test_the_priority_class_decides_which_pods_may_be_preempted(
    class_name: str, classes: tuple[PriorityClassView, ...] | None, priority: int | None
) -> None:
    assert preempting_priority(class_name, classes) == priority


def full_of(priority: int, *, name: str = "n0") -> NodeView:
    return replace(node(name), requested=PLACEHOLDERS, by_priority={priority: PLACEHOLDERS})


def asked(world: SeveralNodes) -> SeveralNodes:
    world.settle()
    world.answer_inspection()
    world.settle()
    return world


def test_pods_of_lower_priority_do_not_block_a_plan() -> None:
    world = SeveralNodes(spec=cpu_pair(), nodes=(full_of(-10),))
    world.classes = ()
    assert len(asked(world).workers()) == 2
    said = [event.message for event in world.recorded if event.reason == "Unschedulable"]
    assert said == ["waiting until the scheduler preempts pods of lower priority on node n0"]


@pytest.mark.parametrize("classes", [(), None, (replace(URGENT, is_default=True, preempts=False),)])
def test_pods_that_cannot_be_preempted_block_a_plan(classes: tuple[PriorityClassView, ...] | None) -> None:
    priority = 0 if classes == () else -10
    world = SeveralNodes(spec=cpu_pair(), nodes=(full_of(priority),))
    world.classes = classes
    assert asked(world).workers() == []
    assert world.condition("CapacityAvailable") == ("False", "InsufficientCapacity")


def test_free_nodes_come_before_nodes_where_pods_are_preempted() -> None:
    world = SeveralNodes(spec=cpu_pair(), nodes=(full_of(-10), node("n1")))
    world.classes = ()
    asked(world)
    assert [world.hint(name) for name in world.workers()] == ["n1", "n1"]
    world.all_started()
    world.settle()
    assert world.condition("CapacityAvailable") == ("True", "Placed")


def test_two_groups_do_not_count_the_same_pods_of_lower_priority() -> None:
    """Without its placeholders, the node has room for one group but not for two."""
    small = replace(full_of(-10), allocatable={"cpu": 12, "memory": 512 * 2**30, "pods": 100})
    small = replace(small, requested={"cpu": 12.0}, by_priority={-10: {"cpu": 12.0}})
    world = SeveralNodes(spec=cpu_pair(replicas=2), nodes=(small,))
    world.classes = ()
    assert len(asked(world).workers()) == 2
    world.restart_operator()
    world.settle()
    assert len(world.workers()) == 2, "a pod that waits for preempted pods keeps their capacity"
