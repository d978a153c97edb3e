"""A scale-down stops the last serving group only once a wanted group serves."""

from dataclasses import replace

import pytest

from heteroinfer_operator.reconcile.scale_down import MAX_CAPACITY_WAIT
from heteroinfer_operator.reconcile.silent_leaders import MIN_SILENT_S
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair


def _serving_alone() -> World:
    """Two groups, of which group 0 has lost a rank and starts again."""
    world = World(spec=cpu_pair(replicas=2), options=replace(OPTIONS, names_come_again=True))
    world.serve()
    world.end_pod(next(name for name in world.workers() if name.startswith("demo-0-")))
    world.settle()
    world.reap()
    return world


def _pods_of(world: World, group: int) -> list[str]:
    return [name for name in world.workers() if name.startswith(f"demo-{group}-")]


def test_the_only_serving_group_stays_until_a_wanted_group_serves() -> None:
    world = _serving_alone()
    kept = _pods_of(world, 1)
    world.change_spec(replicas=1)
    for _ in range(3):
        world.settle()
        world.reap()
        world.advance_time(20)
        world.settle()
        world.all_started()
    assert _pods_of(world, 1) == kept
    world.settle()
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Ready")[0] == "False"
    assert world.status["readyReplicas"] == 0
    (group,) = (group for group in world.status["groups"] if group["index"] == 1)
    assert group["message"] == "scaled down: this group stops once group 0 serves"
    world.settle()
    world.all_ready()
    for _ in range(2):
        world.settle()
        world.reap()
    world.settle()
    assert _pods_of(world, 1) == []
    assert [group["index"] for group in world.status["groups"]] == [0]
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("change", [{"replicas": 0}, {"suspend": True}])
def test_a_group_stops_at_once_if_no_group_is_wanted(change: dict[str, object]) -> None:
    world = _serving_alone()
    world.change_spec(**change)
    world.settle()
    world.reap()
    assert world.workers() == []


def test_a_kept_group_gives_its_nodes_to_a_wanted_group_that_waits_for_nodes() -> None:
    world = _serving_alone()
    world.change_spec(replicas=1)
    world.advance_time(400)
    world.settle()
    for name in _pods_of(world, 0):
        world.pods[name] = replace(world.pods[name], node="", unschedulable="0/2 nodes are available")
    world.settle()
    assert _pods_of(world, 1)
    world.advance_time(MAX_CAPACITY_WAIT.total_seconds() + 1)
    world.settle()
    world.reap()
    world.settle()
    assert _pods_of(world, 1) == []


def test_a_kept_group_whose_leader_is_silent_does_not_count_as_available() -> None:
    world = _serving_alone()
    world.change_spec(replicas=1)
    world.settle()
    assert world.condition("Available") == ("True", "Serving")
    world.silences = {1: MIN_SILENT_S}
    world.settle()
    assert _pods_of(world, 1)
    assert world.condition("Available")[0] != "True"


def test_a_kept_group_that_fails_does_not_start_again() -> None:
    world = _serving_alone()
    world.change_spec(replicas=1)
    world.settle()
    world.end_pod(_pods_of(world, 1)[0])
    for _ in range(3):
        world.settle()
        world.reap()
        world.advance_time(60)
    assert _pods_of(world, 1) == []
