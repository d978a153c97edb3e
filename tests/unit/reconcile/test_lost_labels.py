"""Lost or changed labels of a pod: no pod ends, no pod is created again, and a condition reports the loss."""

import pytest

from heteroinfer_operator.cluster import DeleteObject, RecordEvent
from tests.unit.reconcile.world import World, cpu_pair

LEADER, FOLLOWER = "demo-0-1-0", "demo-0-1-1"
KUBECTL = "kubectl label pod -n default {} --overwrite {}"


@pytest.fixture
def world() -> World:
    """Returns a serving pair of CPU pods."""
    world = World(spec=cpu_pair())
    world.serve()
    assert world.workers() == [LEADER, FOLLOWER]
    return world


def looks(**model: object) -> tuple[World, str]:
    """Returns a resource whose model is being inspected, and the inspect pod."""
    world = World(spec=cpu_pair(**({"model": model} if model else {})))
    world.settle()
    (name,) = world.pods
    return world, name


@pytest.mark.parametrize(
    ("pod", "labels", "available", "command"),
    [
        (LEADER, {"leader": None}, False, "heteroinfer.dev/leader=true"),
        (LEADER, {"leader": "no"}, False, "heteroinfer.dev/leader=true"),
        (LEADER, {"resource": None}, False, "heteroinfer.dev/resource=demo"),
        (LEADER, {"component": "inspect"}, False, "heteroinfer.dev/component=worker"),
        (LEADER, {"group": "7"}, True, "heteroinfer.dev/group=0"),
        (FOLLOWER, {"group": "7"}, True, "heteroinfer.dev/group=0"),
        (FOLLOWER, {"resource": "other"}, True, "heteroinfer.dev/resource=demo"),
        (FOLLOWER, {"component": "fetch"}, True, "heteroinfer.dev/component=worker"),
        (FOLLOWER, {"leader": "true"}, True, "heteroinfer.dev/leader-"),
        (
            FOLLOWER,
            {"group": None, "leader": "true"},
            True,
            "heteroinfer.dev/group=0 heteroinfer.dev/leader-",
        ),
    ],
)
def test_reports_a_lost_label_with_the_command_that_restores_it(
    world: World, pod: str, labels: dict[str, str | None], available: bool, command: str
) -> None:
    """Earlier, Ready and Available stayed True without an endpoint, or for ports without a policy."""
    before = list(world.events)
    world.relabel(pod, **labels)
    world.settle()
    assert world.condition("Available") == (str(available), "Serving" if available else "PodLabelLost")
    assert world.condition("Ready") == ("False", "PodLabelLost")
    assert world.condition("Stalled") == ("True", "PodLabelLost")
    assert world.message("Stalled").endswith(KUBECTL.format(pod, command))
    assert world.status["readyReplicas"] == (1 if available else 0)
    assert world.events[len(before) :] == ["PodLabelLost"]
    for _ in range(3):
        world.advance_time(100)
        world.settle()
    assert world.events[len(before) :] == ["PodLabelLost"]
    assert world.workers() == [LEADER, FOLLOWER]
    assert not any(found.deleting for found in world.pods.values())
    world.put_labels_back()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert world.status["groups"][0].get("message") is None


def test_another_reachable_group_keeps_the_resource_available_without_labels(world: World) -> None:
    world.change_spec(replicas=2)
    world.settle()
    world.all_ready()
    world.settle()
    world.relabel(LEADER, leader=None)
    world.settle()
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Degraded")[0] == "True"
    assert world.condition("Ready") == ("False", "PodLabelLost")
    assert world.status["summary"]["groups"] == "1/2"


def test_a_rollout_replaces_an_unreachable_group_first(world: World) -> None:
    world.change_spec(replicas=2)
    world.settle()
    world.all_ready()
    world.settle()
    cut_off = next(name for name in world.workers() if name.startswith("demo-1-") and name.endswith("-0"))
    world.relabel(cut_off, leader=None)
    world.change_spec(engine={"maxModelLen": 512})
    world.settle()
    going = {name.split("-")[1] for name, pod in world.pods.items() if pod.deleting}
    assert going == {"1"}


def test_the_message_of_a_starting_group_names_missing_pods_and_a_lost_label() -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection()
    world.settle()
    world.relabel(FOLLOWER, group=None)
    world.settle()
    words = world.status["groups"][0]["message"]
    assert words.startswith("0 of 2 pods are ready; pod demo-0-1-1 has lost heteroinfer.dev/group=0")
    assert world.condition("Stalled")[0] == "False"
    assert world.events.count("PodLabelLost") == 1


@pytest.mark.parametrize("component", ["inspect", "fetch", "other", None])
def test_a_workers_name_restores_its_labels(world: World, component: str | None) -> None:
    """Earlier, a worker that got the label of an inspect pod was deleted, and its epoch ended."""
    world.relabel(FOLLOWER, component=component)
    decision = world.step()
    assert not [action for action in decision.actions if isinstance(action, DeleteObject)]
    assert world.condition("Available") == ("True", "Serving")


@pytest.mark.parametrize("labels", [{"component": None}, {"component": "worker"}, {"resource": None}])
@pytest.mark.parametrize("uri", ["file:///models/tiny", "hf://org/model"])
def test_the_inspect_pod_is_recognized_by_its_name(uri: str, labels: dict[str, str | None]) -> None:
    """Earlier, the operator tried again and again to create a pod that existed without its label."""
    world, name = looks(uri=uri, **({"cache": {"size": "1Gi"}} if uri.startswith("hf") else {}))
    world.relabel(name, **labels)
    world.settle()
    assert list(world.pods) == [name]
    assert KUBECTL.format(name, "heteroinfer.dev/") in world.message("ModelReady")
    assert world.events.count("PodLabelLost") == 1
    world.put_labels_back()
    world.settle()
    assert "label" not in world.message("ModelReady")


def test_the_result_of_an_unlabelled_inspect_pod_counts() -> None:
    world, name = looks()
    world.relabel(name, component=None, resource=None)
    world.answer_inspection()
    world.settle()
    assert world.condition("ModelReady") == ("True", "ProfileRead")
    assert len(world.workers()) == 2


def test_reports_a_lost_label_together_with_other_problems(world: World) -> None:
    """Stalled reports the refused spec; another condition reports that no client reaches the group."""
    world.change_spec(parallelism={"mode": "Pipeline", "tensor": 3})
    world.relabel(LEADER, leader=None)
    decision = world.step()
    reported = {action.reason for action in decision.actions if isinstance(action, RecordEvent)}
    assert "PodLabelLost" in reported
    assert world.condition("Stalled")[0] == "True"
    assert world.condition("Stalled")[1] != "PodLabelLost"
    assert world.condition("Available") == ("False", "PodLabelLost")
