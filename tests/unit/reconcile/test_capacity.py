"""Groups and free capacity: the created pods, and the reported reasons."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ApplyObject, CreateObject, ResourceObservation
from heteroinfer_operator.nodes.demand import PodDemand, pod_demand
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.unit.reconcile.world import World, cpu_pair, waits

GPU = "nvidia.com/gpu"


def node(name: str, gpus: int = 0, **fields: Any) -> NodeView:
    devices = {GPU: float(gpus)} if gpus else {}
    return NodeView(
        name=name,
        allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100, **devices},
        labels={**IMAGE_PLATFORM, **fields.pop("labels", {})},
        **fields,
    )


def gpu_and_cpu(**changes: Any) -> dict[str, Any]:
    roles = [{"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"}, cpu_pair()["roles"][0]]
    return {**cpu_pair(), "roles": roles, **changes}


class CapacityWorld(World):
    """A world with gang schedulers, and with capacity reserved for its own and for other pods."""

    gangs: frozenset[Gang] = frozenset()
    unknown: tuple[str, ...] = ()
    reserved: tuple[PodDemand, ...] = ()

    def observe(self) -> ResourceObservation:
        ours = [pod_demand(name, {}, self.manifests[name]["spec"]) for name in self.workers()]
        return replace(
            super().observe(), gangs=self.gangs, unknown_gangs=self.unknown, reserved=(*self.reserved, *ours)
        )


def started(spec: dict[str, Any], *nodes: NodeView, gangs: frozenset[Gang] = frozenset()) -> CapacityWorld:
    world = CapacityWorld(spec=spec, nodes=nodes)
    world.gangs = gangs
    world.settle()
    world.answer_inspection()
    world.settle()
    return world


def message(world: World, kind: str) -> str:
    return str(next(c for c in world.status["conditions"] if c["type"] == kind)["message"])


def least_gpu_memory_mib(world: World) -> dict[str, str]:
    """Returns the least value of the GPU memory label, by pod."""
    found = dict[str, str]()
    for name in world.workers():
        affinity = world.manifests[name]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        (label,) = (each for each in term["matchExpressions"] if each["key"] == f"{GPU}.memory")
        found[name] = label["values"][0]
    return found


def test_a_pod_created_later_requests_the_same_gpu_memory() -> None:
    """A GPU also holds a CUDA context beside weights and KV cache, so a smaller GPU would not suffice."""
    role = {"name": "gpu", "device": "GPU", "pods": 2}
    spec = {**cpu_pair(), "roles": [role]}
    nodes = [node(name, gpus=1, labels={f"{GPU}.memory": "3072"}) for name in "ab"]
    at_once = least_gpu_memory_mib(started(spec, *nodes))
    assert len(at_once) == 2
    world = CapacityWorld(spec=spec, nodes=tuple(nodes), unanswered={("Pod", "demo-0-*-1")})
    world.settle()
    world.answer_inspection()
    world.live(5)
    assert len(world.workers()) == 1
    world.unanswered.clear()
    world.live(31)
    assert least_gpu_memory_mib(world) == at_once


def test_no_pod_is_created_until_the_whole_group_has_capacity() -> None:
    world = started(gpu_and_cpu(), node("a"))
    assert world.workers() == []
    assert world.condition("CapacityAvailable") == ("False", "InsufficientGPU")
    assert message(world, "CapacityAvailable").startswith(
        "needs 1 pod (role gpu) with 1 nvidia.com/gpu; node a has no nvidia.com/gpu"
    )
    world.nodes = (node("a"), node("b", gpus=1))
    world.settle()
    assert len(world.workers()) == 2
    assert world.condition("CapacityAvailable") == ("Unknown", "Scheduling"), "no pod has a node yet"
    assert world.condition("Planned") == ("True", "PlanReady")
    assert "CPU ranks are not needed" in message(world, "Planned")
    assert "HybridNotNeeded" in world.events


def test_capacity_is_available_once_each_pod_has_a_node() -> None:
    world = started(gpu_and_cpu(), node("a"), node("b", gpus=1))
    first, second = world.workers()
    assert world.condition("CapacityAvailable") == ("Unknown", "Scheduling")
    world.pods[first] = replace(world.pods[first], node="a")
    world.settle()
    assert world.condition("CapacityAvailable") == ("Unknown", "Scheduling")
    world.pods[second] = replace(world.pods[second], node="b")
    world.settle()
    assert world.condition("CapacityAvailable") == ("True", "Placed")
    assert "Unschedulable" not in world.events


def test_missing_capacity_is_reported_once_while_nodes_change() -> None:
    world = started(gpu_and_cpu(), node("a"))
    for cpus in range(5):
        world.nodes = (node("a"), node(f"b{cpus}", schedulable=False, problem="cordoned"))
        world.settle()
    assert "node b4 is cordoned" in message(world, "CapacityAvailable")
    assert world.events.count("InsufficientGPU") == 1
    world.nodes = (node("a", gpus=1),)
    world.settle()
    for name in world.workers():
        world.pods[name] = replace(world.pods[name], unschedulable="0/1 nodes are available")
    world.settle()
    assert world.condition("CapacityAvailable") == ("False", "Unschedulable")
    for name in world.workers():
        world.pods[name] = replace(world.pods[name], unschedulable="0/2 nodes are available")
    world.settle()
    assert "0/2 nodes" in message(world, "CapacityAvailable")
    assert world.events.count("Unschedulable") == 1


def test_two_groups_do_not_share_the_same_capacity() -> None:
    world = started(gpu_and_cpu(replicas=2), node("a", gpus=1))
    assert len(world.workers()) == 2, "one group"
    assert world.condition("CapacityAvailable") == ("False", "InsufficientGPU")


def test_capacity_reserved_for_other_pods_is_not_used() -> None:
    world = CapacityWorld(spec=gpu_and_cpu(), nodes=(node("a", gpus=1),))
    world.reserved = (PodDemand(name="ns/other-0-1-0", requests={GPU: 1.0}),)
    world.settle()
    world.answer_inspection()
    world.settle()
    assert world.workers() == []
    assert "reserved for pods that are not scheduled yet: 1 pod of other namespaces" in message(
        world, "CapacityAvailable"
    )
    assert "other-0-1-0" not in str(world.status), "the names of other namespaces' pods stay hidden"
    world.reserved = ()
    world.settle()
    assert len(world.workers()) == 2


def test_pods_are_hinted_at_nodes_with_capacity() -> None:
    world = started(gpu_and_cpu(), node("a", gpus=1), node("b"))
    hints = {}
    for name in world.workers():
        (term,) = world.manifests[name]["spec"]["affinity"]["nodeAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        role = world.manifests[name]["metadata"]["labels"][names.LABEL_ROLE]
        hints[role] = term["preference"]["matchFields"][0]["values"]
    assert hints == {"gpu": ["a"], "first": ["b"]}


def test_reports_when_a_group_starts_on_cpus_only() -> None:
    shortage = {"onGPUShortage": {"action": "CPUOnly", "after": "5m"}}
    world = started(gpu_and_cpu(planning=shortage), node("a"))
    assert "expected step time on CPUs" in message(world, "CapacityAvailable")
    world.advance_time(301)
    world.settle()
    assert "RunsOnCPUs" in world.events
    assert "expected step time on CPUs" in message(world, "Planned")


# Gangs


@pytest.mark.parametrize(
    ("gang", "kind", "body"),
    [
        (Gang.VOLCANO, "PodGroup", {"minMember": 2, "queue": "team"}),
        (Gang.COSCHEDULING, "PodGroup", {"minMember": 2}),
        (Gang.NATIVE, "Workload", None),
        (Gang.NATIVE_ALPHA2, "PodGroup", {"schedulingPolicy": {"gang": {"minCount": 2}}}),
        (
            Gang.NATIVE_BETA,
            "PodGroup",
            {"schedulingPolicy": {"gang": {"minCount": 2}}, "disruptionMode": {"all": {}}},
        ),
        (Gang.KUEUE, None, None),
    ],
)
def test_a_gang_scheduler_gets_all_pods_at_once(gang: Gang, kind: str | None, body: Any) -> None:
    scheduling = {"queueName": "team"} if gang in (Gang.KUEUE, Gang.VOLCANO) else {}
    world = started(gpu_and_cpu(scheduling=scheduling), node("a"), gangs=frozenset({gang}))
    assert len(world.workers()) == 2
    labels = {world.manifests[name]["metadata"]["labels"][names.LABEL_GANG] for name in world.workers()}
    assert labels == {gang.value}
    assert all("affinity" not in world.manifests[name]["spec"] for name in world.workers())
    objects = [stored for (stored_kind, _), stored in world.objects.items() if stored_kind == kind]
    assert [stored["metadata"]["name"] for stored in objects] == (["demo-0-1"] if kind else [])
    if body:
        assert objects[0]["spec"] == body
    assert world.condition("CapacityAvailable") == ("Unknown", "Scheduling")
    # The next epoch has its own object, and the operator deletes the old one.
    world.end_pod(world.workers()[0])
    world.settle()
    world.reap()
    world.advance_time(60)
    world.settle()
    left = [name for (stored_kind, name) in world.objects if stored_kind == kind]
    assert left == (["demo-0-2"] if kind else [])


@pytest.mark.parametrize("how", ["deleted", "rejected", "lost"])
def test_under_kueue_a_pod_that_never_ran_ends_its_group(how: str) -> None:
    """Kueue's finalizer keeps the ended pod, so a pod of the same name cannot be created."""
    world = started(cpu_pair(scheduling={"queueName": "team"}), node("a"), gangs=frozenset({Gang.KUEUE}))
    first, second = world.workers()
    match how:
        case "deleted":
            world.delete_pod(first)
        case "rejected":
            world.pods[first] = replace(world.pods[first], phase="Failed", reason="OutOfcpu", node="a")
            world.advance_time(10)
        case "lost":
            world.pods[first] = replace(world.pods[first], phase="Pending", node="a")
            (lost,) = world.nodes or ()
            world.nodes = (replace(lost, schedulable=False, unreachable_since=world.now),)
            world.advance_time(301)
    world.settle()
    assert second not in world.pods or world.pods[second].deleting
    world.nodes = (node("a"),)
    world.reap()
    world.advance_time(60)
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]
    (group,) = world.status["groups"]
    (failure,) = group["failures"]
    reasons = {"deleted": "PodDeleted", "rejected": "PodEnded", "lost": "NodeLost"}
    assert (failure["reason"], failure["counted"]) == (reasons[how], how == "rejected")


def test_a_running_group_keeps_its_gang_scheduler() -> None:
    world = started(cpu_pair(), node("a"), gangs=frozenset({Gang.NATIVE}))
    world.gangs = frozenset({Gang.VOLCANO, Gang.NATIVE})
    world.step()
    assert world.writes == []
    assert ("Workload", "demo-0-1") in world.objects


@pytest.mark.parametrize(
    ("old", "new"), [(Gang.NATIVE, Gang.NATIVE_ALPHA2), (Gang.NATIVE_ALPHA2, Gang.NATIVE_BETA)]
)
def test_a_group_survives_a_cluster_upgrade_and_its_next_epoch_uses_the_new_api(old: Gang, new: Gang) -> None:
    world = started(cpu_pair(), node("a"), gangs=frozenset({old}))
    world.all_ready()
    world.settle()
    pods, objects = world.workers(), dict(world.objects)
    world.gangs = frozenset({new})
    world.settle()
    assert (world.workers(), world.objects) == (pods, objects)
    assert world.condition("Ready")[0] == "True"
    world.end_pod(pods[0])
    world.settle()
    world.reap()
    world.advance_time(60)
    world.settle()
    made = [world.manifests[name] for name in world.workers()]
    assert {pod["metadata"]["labels"][names.LABEL_GANG] for pod in made} == {new.value}
    group = {"podGroupName": "demo-0-2"}
    assert [(pod["spec"].get("schedulingGroup"), pod["spec"].get("workloadRef")) for pod in made] == [
        (group, None)
    ] * 2


def test_the_newest_gang_api_of_kube_scheduler_is_used() -> None:
    both = frozenset({Gang.NATIVE, Gang.NATIVE_ALPHA2, Gang.NATIVE_BETA})
    world = started(cpu_pair(), node("a"), gangs=both)
    assert [name for kind, name in world.objects if kind in ("Workload", "PodGroup")] == ["demo-0-1"]
    assert world.objects["PodGroup", "demo-0-1"]["apiVersion"] == "scheduling.k8s.io/v1beta1"


def test_a_gang_object_listed_under_two_api_versions_stays() -> None:
    """Earlier, the operator regarded the entry in the other version as unneeded, and deleted the object."""
    world = CapacityWorld(spec=cpu_pair(), nodes=(node("a"),))
    world.gangs = frozenset({Gang.NATIVE_ALPHA2, Gang.NATIVE_BETA})
    world.served_too = {"scheduling.k8s.io/v1beta1": "scheduling.k8s.io/v1alpha2"}
    world.serve()
    assert ("PodGroup", "demo-0-1") in world.objects
    assert world.idle_actions() == []
    world.change_spec(suspend=True)
    world.settle()
    world.reap()
    world.settle()
    assert ("PodGroup", "demo-0-1") not in world.objects


def test_no_gang_object_is_created_without_the_api_of_its_scheduler() -> None:
    world = started(cpu_pair(), node("a"), gangs=frozenset({Gang.NATIVE}))
    pods = world.workers()
    del world.objects["Workload", "demo-0-1"]
    world.gangs = frozenset()
    world.step()
    assert not [action for action in world.writes if "Workload" in repr(action)]
    assert world.workers() == pods


def test_gang_always_needs_a_gang_scheduler_and_gang_never_uses_none() -> None:
    world = started(cpu_pair(scheduling={"gang": "Always"}), node("a"))
    assert world.condition("Planned") == ("False", "NoGangScheduler")
    world.gangs = frozenset({Gang.KUEUE})
    world.settle()
    assert "Kueue is installed, but scheduling.queueName is not set" in message(world, "Planned")
    world.unknown = ("scheduling.k8s.io/v1",)
    world.settle()
    words = message(world, "Planned")
    assert "the cluster serves scheduling.k8s.io/v1, which this operator does not know" in words
    assert "scheduling.k8s.io/v1alpha1 of Kubernetes 1.35, v1alpha2 of 1.36, v1beta1 of 1.37" in words
    alone = started(cpu_pair(scheduling={"gang": "Never"}), gangs=frozenset({Gang.NATIVE}))
    assert len(alone.workers()) == 2, "created without any node"
    assert names.LABEL_GANG not in alone.manifests[alone.workers()[0]]["metadata"]["labels"]


def test_groups_start_if_the_operator_may_not_read_nodes() -> None:
    world = CapacityWorld(spec=gpu_and_cpu(), nodes=None)
    world.settle()
    world.answer_inspection()
    world.settle()
    assert len(world.workers()) == 2


# Disruption budgets


def budget(world: World) -> dict[str, Any]:
    return dict(world.objects["PodDisruptionBudget", "demo-0-ranks"]["spec"])


def test_a_drain_may_evict_one_pod_until_the_group_serves_again() -> None:
    world = started(cpu_pair(), node("a"))
    assert (budget(world)["minAvailable"], budget(world)["unhealthyPodEvictionPolicy"]) == (
        1,
        "IfHealthyBudget",
    )
    selector = budget(world)["selector"]["matchLabels"]
    assert all(selector.items() <= world.pods[name].labels.items() for name in world.workers())


@pytest.mark.parametrize("stuck", ["ImagePullBackOff: no space left on device", ""], ids=["image", "no node"])
def test_a_group_with_a_stuck_pod_does_not_block_a_drain(stuck: str) -> None:
    """The other pod is not Ready before the group serves. Earlier, a drain waited for it without end."""
    world = started(cpu_pair(), node("a"))
    first, second = world.workers()
    world.pods[first] = replace(world.pods[first], phase="Running", started=True, node="a")
    words = "" if stuck else "0/1 nodes are available: 1 Insufficient cpu."
    world.pods[second] = replace(world.pods[second], waiting=waits(stuck), unschedulable=words)
    world.settle()
    assert budget(world)["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    world.pods[second] = replace(world.pods[second], waiting=None, unschedulable="")
    world.all_ready()
    world.settle()
    assert (budget(world)["minAvailable"], budget(world)["unhealthyPodEvictionPolicy"]) == (
        1,
        "IfHealthyBudget",
    )


def test_a_disruption_budget_is_created_with_the_first_pods() -> None:
    world = World(spec=cpu_pair())
    world.settle()
    assert not [kind for kind, _ in world.objects if kind == "PodDisruptionBudget"]
    world.answer_inspection()
    world.step()
    kinds = [w.manifest["kind"] for w in world.writes if isinstance(w, CreateObject | ApplyObject)]
    assert kinds[-3:] == ["Pod", "Pod", "PodDisruptionBudget"]


def test_a_group_of_one_pod_never_blocks_a_drain() -> None:
    single = started({**cpu_pair(), "roles": cpu_pair()["roles"][:1]}, node("a"))
    assert not [kind for kind, _ in single.objects if kind == "PodDisruptionBudget"]
