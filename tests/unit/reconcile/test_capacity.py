"""Groups and the room that there is: what is created, what is said, and how often."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ApplyObject, CreateObject, Gang, NodeView, ResourceObservation
from heteroinfer_operator.demand import PodDemand, pod_demand
from tests.unit.reconcile.world import World, cpu_pair

GPU = "nvidia.com/gpu"


def node(name: str, gpus: int = 0, **fields: Any) -> NodeView:
    devices = {GPU: float(gpus)} if gpus else {}
    return NodeView(
        name=name, allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100, **devices}, **fields
    )


def gpu_and_cpu(**changes: Any) -> dict[str, Any]:
    roles = [{"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"}, cpu_pair()["roles"][0]]
    return {**cpu_pair(), "roles": roles, **changes}


class FreeNode(World):
    """A world with gang schedulers, and with room promised to its own pods and to others."""

    gangs: frozenset[Gang] = frozenset()
    promised: tuple[PodDemand, ...] = ()

    def observe(self) -> ResourceObservation:
        ours = [pod_demand(name, {}, self.manifests[name]["spec"]) for name in self.workers()]
        return replace(super().observe(), gangs=self.gangs, promised=(*self.promised, *ours))


def started(spec: dict[str, Any], *nodes: NodeView, gangs: frozenset[Gang] = frozenset()) -> FreeNode:
    room = FreeNode(spec=spec, nodes=nodes)
    room.gangs = gangs
    room.settle()
    room.answer_inspection()
    room.settle()
    return room


def message(world: World, kind: str) -> str:
    return str(next(c for c in world.status["conditions"] if c["type"] == kind)["message"])


def test_nothing_of_a_group_is_created_until_all_of_it_has_room() -> None:
    room = started(gpu_and_cpu(), node("a"))
    assert room.workers() == []
    assert room.condition("CapacityAvailable") == ("False", "InsufficientGPU")
    assert message(room, "CapacityAvailable").startswith(
        "needs 1 pod (role gpu) with 1 nvidia.com/gpu; node a has no nvidia.com/gpu"
    )
    room.nodes = (node("a"), node("b", gpus=1))
    room.settle()
    assert len(room.workers()) == 2
    assert room.condition("CapacityAvailable") == ("True", "Placed")
    assert room.condition("Planned") == ("True", "PlanReady")
    assert "hybrid not needed" in message(room, "Planned")
    assert "HybridNotNeeded" in room.events


def test_missing_room_is_told_once_though_nodes_change_all_the_time() -> None:
    room = started(gpu_and_cpu(), node("a"))
    for cpus in range(5):
        room.nodes = (node("a"), node(f"b{cpus}", schedulable=False, problem="cordoned"))
        room.settle()
    assert "node b4 is cordoned" in message(room, "CapacityAvailable")
    assert room.events.count("InsufficientGPU") == 1
    room.nodes = (node("a", gpus=1),)
    room.settle()
    for name in room.workers():
        room.pods[name] = replace(room.pods[name], unschedulable="0/1 nodes are available")
    room.settle()
    assert room.condition("CapacityAvailable") == ("False", "Unschedulable")
    for name in room.workers():
        room.pods[name] = replace(room.pods[name], unschedulable="0/2 nodes are available")
    room.settle()
    assert "0/2 nodes" in message(room, "CapacityAvailable")
    assert room.events.count("Unschedulable") == 1


def test_two_groups_are_not_given_the_same_room() -> None:
    room = started(gpu_and_cpu(replicas=2), node("a", gpus=1))
    assert len(room.workers()) == 2, "one group"
    assert room.condition("CapacityAvailable") == ("False", "InsufficientGPU")


def test_what_others_were_promised_is_not_taken() -> None:
    room = FreeNode(spec=gpu_and_cpu(), nodes=(node("a", gpus=1),))
    room.promised = (PodDemand(name="ns/other-0-1-0", requests={GPU: 1.0}),)
    room.settle()
    room.answer_inspection()
    room.settle()
    assert room.workers() == []
    room.promised = ()
    room.settle()
    assert len(room.workers()) == 2


def test_pods_are_told_where_there_is_room_for_them() -> None:
    room = started(gpu_and_cpu(), node("a", gpus=1), node("b"))
    hints = {}
    for name in room.workers():
        (term,) = room.manifests[name]["spec"]["affinity"]["nodeAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        role = room.manifests[name]["metadata"]["labels"][names.LABEL_ROLE]
        hints[role] = term["preference"]["matchFields"][0]["values"]
    assert hints == {"gpu": ["a"], "first": ["b"]}


def test_cpu_only_tells_when_it_happens() -> None:
    shortage = {"onGPUShortage": {"action": "CPUOnly", "after": "5m"}}
    room = started(gpu_and_cpu(planning=shortage), node("a"))
    assert "expected step time on CPUs" in message(room, "CapacityAvailable")
    room.pass_time(301)
    room.settle()
    assert "RunsOnCPUs" in room.events
    assert "expected step time on CPUs" in message(room, "Planned")


# Gangs


@pytest.mark.parametrize(
    ("gang", "kind", "body"),
    [
        (Gang.VOLCANO, "PodGroup", {"minMember": 2, "queue": "team"}),
        (Gang.COSCHEDULING, "PodGroup", {"minMember": 2}),
        (Gang.NATIVE, "Workload", None),
        (Gang.KUEUE, None, None),
    ],
)
def test_a_gang_scheduler_gets_all_pods_at_once_with_room_or_without(
    gang: Gang, kind: str | None, body: Any
) -> None:
    scheduling = {"queueName": "team"} if gang in (Gang.KUEUE, Gang.VOLCANO) else {}
    room = started(gpu_and_cpu(scheduling=scheduling), node("a"), gangs=frozenset({gang}))
    assert len(room.workers()) == 2
    labels = {room.manifests[name]["metadata"]["labels"][names.LABEL_GANG] for name in room.workers()}
    assert labels == {gang.value}
    assert all("affinity" not in room.manifests[name]["spec"] for name in room.workers())
    objects = [stored for (stored_kind, _), stored in room.objects.items() if stored_kind == kind]
    assert [stored["metadata"]["name"] for stored in objects] == (["demo-0-1"] if kind else [])
    if body:
        assert objects[0]["spec"] == body
    assert room.condition("CapacityAvailable")[0] == ("True")
    # The next epoch has an object of its own, and the old one goes.
    room.end_pod(room.workers()[0])
    room.settle()
    room.reap()
    room.pass_time(60)
    room.settle()
    left = [name for (stored_kind, name) in room.objects if stored_kind == kind]
    assert left == (["demo-0-2"] if kind else [])


@pytest.mark.parametrize("how", ["deleted", "rejected", "lost"])
def test_a_pod_of_kueue_that_never_ran_takes_its_group_with_it(how: str) -> None:
    """Kueue's finalizer holds the one that went: another one of its name could never be created."""
    room = started(cpu_pair(scheduling={"queueName": "team"}), node("a"), gangs=frozenset({Gang.KUEUE}))
    first, second = room.workers()
    match how:
        case "deleted":
            room.delete_pod(first)
        case "rejected":
            room.pods[first] = replace(room.pods[first], phase="Failed", reason="OutOfcpu", node="a")
            room.pass_time(10)
        case "lost":
            room.pods[first] = replace(room.pods[first], phase="Pending", node="a")
            (lost,) = room.nodes or ()
            room.nodes = (replace(lost, schedulable=False, unreachable_since=room.now),)
            room.pass_time(301)
    room.settle()
    assert second not in room.pods or room.pods[second].deleting
    room.nodes = (node("a"),)
    room.reap()
    room.pass_time(60)
    room.settle()
    assert room.workers() == ["demo-0-2-0", "demo-0-2-1"]
    (group,) = room.status["groups"]
    (failure,) = group["failures"]
    reasons = {"deleted": "PodDeleted", "rejected": "PodEnded", "lost": "NodeLost"}
    assert (failure["reason"], failure["counted"]) == (reasons[how], how == "rejected")


def test_a_living_group_keeps_its_own_gang() -> None:
    room = started(cpu_pair(), node("a"), gangs=frozenset({Gang.NATIVE}))
    room.gangs = frozenset({Gang.VOLCANO, Gang.NATIVE})
    room.step()
    assert room.writes == []
    assert ("Workload", "demo-0-1") in room.objects


def test_always_needs_a_gang_scheduler_and_never_takes_none() -> None:
    room = started(cpu_pair(scheduling={"gang": "Always"}), node("a"))
    assert room.condition("Planned") == ("False", "NoGangScheduler")
    room.gangs = frozenset({Gang.KUEUE})
    room.settle()
    assert "Kueue is there, but scheduling.queueName is not set" in message(room, "Planned")
    alone = started(cpu_pair(scheduling={"gang": "Never"}), gangs=frozenset({Gang.NATIVE}))
    assert len(alone.workers()) == 2, "created without any node"
    assert names.LABEL_GANG not in alone.manifests[alone.workers()[0]]["metadata"]["labels"]


def test_without_rights_on_nodes_groups_start_as_planned() -> None:
    room = FreeNode(spec=gpu_and_cpu(), nodes=None)
    room.settle()
    room.answer_inspection()
    room.settle()
    assert len(room.workers()) == 2


# Disruption budgets


def budget(world: World) -> dict[str, Any]:
    return dict(world.objects["PodDisruptionBudget", "demo-0-ranks"]["spec"])


def test_a_group_may_lose_one_pod_to_a_drain_and_no_other_until_it_serves() -> None:
    room = started(cpu_pair(), node("a"))
    assert (budget(room)["minAvailable"], budget(room)["unhealthyPodEvictionPolicy"]) == (
        1,
        "IfHealthyBudget",
    )
    selector = budget(room)["selector"]["matchLabels"]
    assert all(selector.items() <= room.pods[name].labels.items() for name in room.workers())


def test_a_budget_comes_with_the_first_pods() -> None:
    room = World(spec=cpu_pair())
    room.settle()
    assert not [kind for kind, _ in room.objects if kind == "PodDisruptionBudget"]
    room.answer_inspection()
    room.step()
    kinds = [w.manifest["kind"] for w in room.writes if isinstance(w, CreateObject | ApplyObject)]
    assert kinds[-3:] == ["Pod", "Pod", "PodDisruptionBudget"]


def test_one_pod_alone_may_always_go() -> None:
    single = started({**cpu_pair(), "roles": cpu_pair()["roles"][:1]}, node("a"))
    assert not [kind for kind, _ in single.objects if kind == "PodDisruptionBudget"]
