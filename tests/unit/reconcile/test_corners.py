"""Rules for corner cases: refused specs, refused children, lost objects, foreign pods, and time.

The rules are those of docs/decisions/2026-11-22-true-in-every-corner.md.
"""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.api import Resources
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.reconcile.options import Options
from tests.unit.reconcile.world import OPTIONS, PROFILE, World, cpu_pair

NEVER_STARTED = Failure(reason=FailureReason.STARTUP_TIMEOUT, message="rank 1 stood still", pod=1, rank=1)


@pytest.fixture
def world() -> World:
    return World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=True))


def ranks(world: World) -> list[str]:
    """Returns the pods of group 0: leader and follower."""
    return [name for name in world.workers() if name.startswith("demo-0-")]


def follow(pods: list[str], before: list[str]) -> bool:
    """Checks whether these are the pods of a later epoch of the group."""
    new, old = ([name.rsplit("-", 2) for name in names] for names in (pods, before))
    same = [(group, index) for group, _, index in new] == [(group, index) for group, _, index in old]
    (epoch,) = {int(epoch) for _, epoch, _ in new}
    return same and epoch > max(int(epoch) for _, epoch, _ in old)


def again(world: World) -> None:
    """Lets deleted pods disappear and backoffs pass."""
    for _ in range(3):
        world.settle()
        world.reap()
        world.advance_time(400)
    world.settle()


def group(world: World, index: int = 0) -> dict[str, Any]:
    return dict(world.status["groups"][index])


REFUSED = [
    pytest.param({"model": {"uri": "hf://org/model"}}, id="a hub's model without a cache"),
    pytest.param({"engine": {"args": ["--seed=1"]}}, id="an argument of the plan's"),
    pytest.param({"parallelism": {"mode": "Pipeline", "tensor": 3}}, id="a shape that the schema refuses"),
    pytest.param({"roles": []}, id="no roles"),
]


@pytest.mark.parametrize("spec", REFUSED)
def test_a_refused_spec_does_not_affect_running_groups(world: World, spec: dict[str, Any]) -> None:
    """A pod dies under a refused spec, and the group restarts with its own plan."""
    world.serve()
    world.change_spec(**spec)
    world.settle()
    assert world.condition("Available")[0] == "True"
    assert world.condition("Ready")[0] == "False", "no group serves the spec of this generation"
    assert world.condition("Stalled")[0] == "True"
    pods = ranks(world)
    world.end_pod(pods[1])
    world.step()
    assert world.condition("Available")[0] == "False"
    assert group(world)["failures"][-1]["reason"] == "PodFailed"
    again(world)
    assert follow(world.workers(), pods)
    world.all_ready()
    world.settle()
    assert world.condition("Available")[0] == "True"
    world.change_spec(suspend=True)
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == []
    world.change_spec(suspend=False)
    again(world)
    world.all_ready()
    world.settle()
    assert world.condition("Available")[0] == "True"


def test_a_group_keeps_its_plan_if_the_spec_can_no_longer_be_planned() -> None:
    """An upgraded operator may count more memory; in this test, its chart gives pods less memory."""

    def options_with(memory: str) -> Options:
        worker = Resources(limits={"cpu": "4", "memory": memory})
        return replace(OPTIONS, names_come_again=True, pod_resources=PodResources(worker=worker))

    roles = [{"name": name, "device": "CPU", "layers": [4]} for name in ("first", "second")]
    world = World(spec=cpu_pair(roles=roles), options=options_with("4Gi"))
    world.settle()
    world.answer_inspection(PROFILE.to_json())
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Planned") == ("True", "PlanReady")
    world.change_spec(engine={"maxModelLen": 512})
    again(world)
    world.all_ready()
    world.settle()
    assert world.condition("Ready")[0] == "True", "the rollout was planned for the same nodes"
    pods, plan_hash = ranks(world), group(world)["planHash"]
    world.options = options_with("1Gi")
    world.settle()
    assert world.condition("Planned") == ("False", "InsufficientMemory")
    assert world.condition("Available")[0] == "True"
    assert ranks(world) == pods
    world.end_pod(pods[1])
    world.step()
    again(world)
    assert follow(world.workers(), pods)
    assert group(world)["planHash"] == plan_hash
    world.change_spec(replicas=2)
    again(world)
    assert "must have more memory" in world.status["groups"][1]["message"]


def test_conditions_of_a_refused_spec_have_its_generation(world: World) -> None:
    world.serve()
    world.change_spec(model={"uri": "hf://org/model"})
    world.settle()
    stalled = next(c for c in world.status["conditions"] if c["type"] == "Stalled")
    assert (stalled["reason"], stalled["observedGeneration"]) == ("ModelCacheNotGiven", world.generation)
    assert "cache" in stalled["message"]


def test_a_refused_child_blocks_only_its_own_group(world: World) -> None:
    """A foreign Service has the name of group 1's Service."""
    world.serve()
    world.refuses = {("Service", "demo-1-ranks"): "Service demo-1-ranks exists and is not ours"}
    world.change_spec(replicas=2)
    again(world)
    assert not [name for name in world.workers() if name.startswith("demo-1-")]
    assert world.condition("Ready")[0] == "False"
    assert world.condition("Available")[0] == "True"
    assert "demo-1-ranks" in str(world.status["conditions"])
    pods = ranks(world)
    world.end_pod(pods[1])
    world.step()
    assert world.condition("Available")[0] == "False"
    again(world)
    assert follow(world.workers(), pods)
    world.refuses = {}
    again(world)
    world.all_ready()
    world.settle()
    assert world.condition("Ready")[0] == "True"


def test_a_pod_refused_by_quota_releases_the_groups_other_pods(world: World) -> None:
    world.refuses = {("Pod", "demo-0-*-1"): "exceeded quota: gpus"}
    world.settle()
    world.answer_inspection()
    for _ in range(6):
        world.step()
        world.reap()
    assert world.workers() == [], "the leader alone cannot use its resources"
    assert "exceeded quota" in str(world.status["conditions"])
    created = len(world.created)
    for _ in range(20):
        world.step()
        world.reap()
        world.advance_time(1)
    assert len(world.created) - created <= 4, "it backs off"
    assert group(world).get("failures", []) == [], "waiting for quota is not a restart"
    world.refuses = {}
    again(world)
    assert len(world.workers()) == 2


def test_deletion_does_not_depend_on_a_writable_status(world: World) -> None:
    world.serve()
    world.refuses = {("HeteroInference/status", "demo"): "etcdserver: request is too large"}
    world.deleting = True
    world.step()
    assert all(world.pods[name].deleting for name in world.workers())


def test_suspension_does_not_depend_on_a_writable_status(world: World) -> None:
    world.serve()
    world.refuses = {("HeteroInference/status", "demo"): "etcdserver: request is too large"}
    world.change_spec(suspend=True)
    world.step()
    assert all(world.pods[name].deleting for name in world.workers())


# Epochs


def test_a_recreated_group_has_new_pod_names(world: World) -> None:
    world.change_spec(replicas=2)
    world.serve()
    for _ in range(3):
        world.change_spec(replicas=1)
        again(world)
        world.change_spec(replicas=2)
        again(world)
        world.all_ready()
        world.settle()
    assert len(world.created) == len(set(world.created)), sorted(world.created)


@pytest.mark.parametrize("lost", [{}, {"groups": "what is this"}, {"groups": [{"index": "x"}]}])
def test_a_lost_status_does_not_reuse_pod_names(world: World, lost: dict[str, Any]) -> None:
    world.serve()
    for _ in range(3):
        world.advance_time(30)
        world.pods.clear()
        world.status = dict(lost)
        world.version += 1
        again(world)
        world.answer_inspection()
        again(world)
        world.all_ready()
        world.settle()
    workers = [name for name in world.created if "inspect" not in name]
    assert len(workers) == len(set(workers)), workers


def test_only_the_unknown_value_in_a_status_is_ignored(world: World) -> None:
    world.serve()
    pods = ranks(world)
    world.end_pod(pods[1])
    again(world)
    failures = group(world)["failures"]
    world.status["groups"][0]["phase"] = "Hibernating"
    world.status["groups"][0]["newField"] = {"a": 1}
    world.status["plans"][0]["ranks"][0]["device"] = "TPU"
    world.version += 1
    world.settle()
    assert group(world)["failures"] == failures
    assert follow(world.workers(), pods)


def test_a_pod_lost_together_with_the_status_is_not_recreated_under_its_name(world: World) -> None:
    """No record shows that the pod had run, so its epoch ends and the next epoch has other pod names."""
    world.serve()
    world.status = {}
    world.version += 1
    pods = ranks(world)
    del world.pods[pods[1]]
    again(world)
    world.answer_inspection()  # the model's profile was lost with the status
    again(world)
    assert world.created.count(pods[1]) == 1
    assert follow(world.workers(), pods)
    assert group(world)["failures"][-1]["reason"] == "PodDeleted"


# Plans and policies of running groups


@pytest.mark.parametrize("how", ["gone", "unknown field", "lost label"])
def test_a_serving_group_does_not_need_its_plan(world: World, how: str) -> None:
    world.serve()
    (key,) = [key for key in world.objects if key[0] == "ConfigMap" and "plan" in key[1]]
    stored = world.objects[key]
    if how == "unknown field":
        text = stored["data"][names.PLAN_KEY].replace("{", '{"invented":1,', 1)
        world.objects[key] = {**stored, "data": {names.PLAN_KEY: text}}
    elif how == "lost label":
        labels = {k: v for k, v in stored["metadata"]["labels"].items() if k != names.LABEL_PLAN}
        world.objects[key] = {**stored, "metadata": {**stored["metadata"], "labels": labels}}
    else:
        del world.objects[key]
    uids = {pod.uid for pod in world.pods.values()}
    world.settle()
    assert {pod.uid for pod in world.pods.values()} == uids
    assert world.condition("Ready")[0] == "True"
    assert group(world)["members"], "the table of its ranks stays"


def test_children_of_a_group_stay_until_its_last_pod_is_gone(world: World) -> None:
    world.change_spec(replicas=2)
    world.serve()
    world.change_spec(replicas=1)
    world.settle()
    assert [name for name in world.workers() if name.startswith("demo-1-")]
    assert ("NetworkPolicy", "demo-1-ranks") in world.objects
    assert ("Service", "demo-1-ranks") in world.objects
    world.reap()
    world.settle()
    assert ("NetworkPolicy", "demo-1-ranks") not in world.objects


def test_a_new_port_does_not_cut_off_old_groups(world: World) -> None:
    world.change_spec(replicas=2)
    world.serve()
    world.change_spec(engine={"port": 8123})
    world.settle()

    def ports(name: str) -> set[int]:
        (_, public) = world.objects["NetworkPolicy", name]["spec"]["ingress"]
        return {entry["port"] for entry in public["ports"]}

    for index in (0, 1):
        running = [p for n, p in world.pods.items() if n.startswith(f"demo-{index}-")]
        assert running
        assert 8000 in ports(f"demo-{index}-ranks")


@pytest.mark.parametrize("port", [8123, 8127])  # the new revision is first, or second
def test_ports_of_running_groups_have_a_fixed_order_while_the_spec_is_refused(port: int) -> None:
    world = World(spec=cpu_pair())
    world.change_spec(replicas=2)
    world.serve()
    port_by_revision = {group(world)["revision"]: 8000}
    world.change_spec(engine={"port": port})
    for _ in range(2):
        world.settle()
        world.reap()
    revisions = {group(world, index)["revision"] for index in (0, 1)}
    (new,) = revisions - port_by_revision.keys()
    port_by_revision[new] = port
    world.change_spec(roles=[])
    del world.objects["Service", "demo"]
    world.settle()
    (clients, _) = world.objects["Service", "demo"]["spec"]["ports"]
    assert (clients["name"], clients["port"]) == ("api", port_by_revision[min(revisions)])


@pytest.mark.parametrize(
    "drift",
    [
        lambda spec: spec["podSelector"]["matchLabels"].update({"team": "x"}),
        lambda spec: spec["ingress"][0]["from"][0].update({"namespaceSelector": {}}),
        lambda spec: spec["ingress"][0].update({"ports": [{"port": 1}]}),
    ],
)
def test_fields_that_others_add_to_a_policy_are_removed(world: World, drift: Any) -> None:
    world.serve()
    import copy

    wanted = copy.deepcopy(world.objects["NetworkPolicy", "demo-0-ranks"]["spec"])
    drift(world.objects["NetworkPolicy", "demo-0-ranks"]["spec"])
    world.settle()
    assert world.objects["NetworkPolicy", "demo-0-ranks"]["spec"] == wanted


# Restarts


def fail_forever(world: World, seconds_each: float, *, rounds: int = 60) -> int:
    """Returns the number of epochs of a group whose starts all fail after a given time."""
    for _ in range(rounds):
        world.settle()
        for name in world.workers():
            if not world.pods[name].ended:
                world.advance_time(seconds_each)
                world.end_pod(name, exit_code=names.EXIT_STARTUP_TIMEOUT, message=NEVER_STARTED.to_json())
                break
        else:
            world.advance_time(seconds_each)
        world.settle()
        world.reap()
    return len({name.rsplit("-", 1)[0] for name in world.created if "inspect" not in name})


def start(world: World) -> None:
    world.settle()
    world.answer_inspection()


def test_a_group_that_never_starts_eventually_fails(world: World) -> None:
    """Each start takes 30 minutes: two starts within an hour, which is the window."""
    start(world)
    assert fail_forever(world, 1800) <= 6
    assert world.condition("Stalled") == ("True", "RestartsUsedUp")


def test_a_window_of_zero_still_counts_failed_starts(world: World) -> None:
    world.change_spec(restart={"window": "0s"})
    start(world)
    assert fail_forever(world, 30) <= 6


def test_evicted_pods_are_replaced_with_backoff_and_never_make_the_resource_fail(world: World) -> None:
    world.serve()
    epochs = 0
    for _ in range(1800 // 5):
        living = [name for name in world.workers() if not world.pods[name].ended]
        if living:
            name = living[0]
            world.pods[name] = replace(
                world.pods[name], phase="Failed", reason="Evicted", started=True, ready=False
            )
            epochs += 1
        world.step()
        world.reap()
        world.advance_time(5)
    assert epochs <= 15, f"{epochs} epochs in half an hour"
    assert world.condition("Stalled")[0] == "False"


def test_rejected_pods_are_replaced_with_backoff_and_never_make_the_resource_fail(world: World) -> None:
    start(world)
    for _ in range(3600 // 10):
        for name in world.workers():
            if not world.pods[name].ended:
                world.pods[name] = replace(world.pods[name], phase="Failed", reason="OutOfcpu", node="node")
        world.step()
        world.reap()
        world.advance_time(10)
    assert len(world.created) <= 60, f"{len(world.created)} pods in an hour"
    assert world.condition("Stalled")[0] == "False"


# Changes that need no rollout


@pytest.mark.parametrize(
    "change",
    [{"planning": {"onGPUShortage": {"action": "CPUOnly"}}}, {"startup": {"timeout": "31m"}}],
)
def test_changes_without_new_pods_create_no_revision(world: World, change: dict[str, Any]) -> None:
    world.serve()
    uids = {pod.uid for pod in world.pods.values()}
    world.change_spec(**change)
    world.settle()
    assert {pod.uid for pod in world.pods.values()} == uids
    assert world.condition("Ready")[0] == "True"


# Meaning of conditions


def test_a_suspended_resource_is_ready_and_not_available(world: World) -> None:
    world.serve()
    world.change_spec(suspend=True)
    world.settle()
    world.reap()
    world.settle()
    assert world.condition("Ready") == ("True", "Suspended")
    assert world.condition("Available") == ("False", "Suspended")
    assert world.condition("Stalled")[0] == "False"


def test_ready_requires_all_groups_with_the_current_spec(world: World) -> None:
    world.change_spec(replicas=2)
    world.serve()
    assert world.condition("Ready")[0] == "True"
    world.end_pod(ranks(world)[1])
    world.step()
    assert (world.condition("Ready")[0], world.condition("Available")[0]) == ("False", "True")


# Time


def test_the_wait_for_gpus_does_not_count_other_shortages(world: World) -> None:
    """After an hour without memory, GPUs are missing. CPUOnly takes effect 10 minutes later, not before."""
    gpu = {
        "name": "gpu",
        "device": "GPU",
        "deviceMemory": "8Gi",
        "resources": {"requests": {"memory": "8Gi"}},
    }
    world.change_spec(roles=[gpu], planning={"onGPUShortage": {"action": "CPUOnly", "after": "10m"}})
    assert world.nodes is not None
    small = replace(
        world.nodes[0], allocatable={"cpu": 64, "memory": 2**30, "pods": 100, "nvidia.com/gpu": 8}
    )
    world.nodes = (small,)
    world.settle()
    world.answer_inspection()
    world.settle()
    assert world.condition("CapacityAvailable") == ("False", "InsufficientCapacity")
    world.advance_time(3600)
    world.nodes = (replace(small, allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100}),)
    world.settle()
    assert world.condition("CapacityAvailable") == ("False", "InsufficientGPU")
    world.advance_time(300)
    world.settle()
    assert world.condition("CapacityAvailable") == ("False", "InsufficientGPU")
    world.advance_time(400)
    world.settle()
    assert world.workers()
