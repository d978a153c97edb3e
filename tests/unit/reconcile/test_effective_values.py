"""Values in the status that the operator chose: length, images, and the memory of GPUs."""

from typing import Any

import pytest

from tests.unit.reconcile.test_capacity import GPU, CapacityWorld, gpu_and_cpu, node
from tests.unit.reconcile.world import World, cpu_pair


def plan_of(world: World) -> dict[str, Any]:
    (plan,) = world.status["plans"]
    return dict(plan)


def test_the_status_shows_length_and_images_that_the_spec_leaves_open() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    assert "maxModelLen" not in world.spec.get("engine", {})
    assert plan_of(world)["maxModelLen"] == 2048, "the model's own limit"
    assert plan_of(world)["images"] == "example.test/worker-cpu:1"
    assert "roles" not in plan_of(world) or plan_of(world)["roles"] == [], "no role has GPUs"


@pytest.mark.parametrize(("given", "shown"), [("80Gi", "80Gi"), (None, "40960Mi")])
def test_the_status_shows_the_memory_of_gpus(given: str | None, shown: str) -> None:
    """Node labels report the memory if the spec does not."""
    spec = gpu_and_cpu()
    if given is None:
        del spec["roles"][0]["deviceMemory"]
    labels = {f"{GPU}.memory": "40960"}
    world = CapacityWorld(spec=spec, nodes=(node("node", gpus=1, labels=labels),))
    world.serve()
    assert plan_of(world)["roles"] == [{"name": "gpu", "deviceMemory": shown}]


def test_the_status_has_step_times_in_microseconds_and_in_milliseconds() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    plan, summary = plan_of(world), world.status["summary"]
    assert plan["predictedStepMicroseconds"] == pytest.approx(plan["predictedStepMs"] * 1000, abs=5)
    assert summary["predictedStepMicroseconds"] == pytest.approx(plan["predictedStepMicroseconds"], abs=5)


def test_a_node_label_of_any_length_stops_no_reconcile() -> None:
    """Otherwise a user who may label nodes could hide the end of every rank on them."""
    spec = gpu_and_cpu()
    del spec["roles"][0]["deviceMemory"]
    world = CapacityWorld(spec=spec, nodes=(node("node", gpus=1, labels={f"{GPU}.memory": "40960"}),))
    world.serve()
    world.nodes = (node("node", gpus=1, labels={f"{GPU}.memory": "9" * 23}),)
    world.end_pod(world.workers()[0])
    world.step()
    assert world.condition("Available")[0] == "False"
