"""Mode Auto: the first plan of a revision chooses the mode, which stays for all later epochs."""

import json
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.unit.calibrated import CALIBRATION
from tests.unit.planning.test_auto_mode import shapes
from tests.unit.reconcile.world import World

GIB = 2**30
CPUS = {"requests": {"cpu": "14", "memory": "80Gi"}}
MANY = {"requests": 32, "promptTokens": 256, "outputTokens": 512}
SMALL_GPU, LARGE_GPU = 24, 80


def node(name: str, gpu_gib: int = 0, cpus: int = 64) -> NodeView:
    labels = {"nvidia.com/gpu.memory": str(gpu_gib * 1024)} if gpu_gib else {}
    devices = {"nvidia.com/gpu": 4.0} if gpu_gib else {}
    return NodeView(
        name=name,
        allocatable={"cpu": cpus, "memory": 512 * GIB, "pods": 100, **devices},
        labels={**IMAGE_PLATFORM, **labels},
    )


def nodes(gpu_gib: int, cpus: int = 64) -> tuple[NodeView, ...]:
    return node("a", gpu_gib, cpus), node("b")


def world(gpu_gib: int = SMALL_GPU, **fields: Any) -> World:
    found = World(
        spec={
            "model": {"uri": "file:///models/mixture"},
            "engine": {"maxModelLen": 4096},
            "planning": {"load": MANY},
            "roles": [
                {"name": "gpu", "device": "GPU"},
                {"name": "cpu", "device": "CPU", "resources": CPUS},
            ],
            **fields,
        },
        nodes=nodes(gpu_gib),
    )
    found.settle()
    found.answer_inspection(shapes()["mixture"].to_json())
    found.settle()
    found.all_ready()
    found.settle()
    return found


def mode(found: World) -> str:
    (plan,) = found.status["plans"]
    assert found.status["summary"]["mode"] == plan["mode"]
    return str(plan["mode"])


def records(found: World) -> list[dict[str, Any]]:
    return [
        json.loads(stored["data"]["revision.json"])
        for (kind, name), stored in found.objects.items()
        if kind == "ConfigMap" and "-revision-" in name
    ]


def roles(found: World) -> list[str]:
    return [found.pods[name].labels[names.LABEL_ROLE] for name in found.workers()]


def start_again(found: World) -> None:
    """Removes the pods that end, and brings those of the next epoch to Ready."""
    found.settle()
    found.reap()
    found.advance_time(400)
    found.settle()
    found.all_ready()
    found.settle()


def fail(found: World) -> None:
    """Ends the epoch of group 0, and brings the next one to Ready."""
    epoch = found.status["groups"][0]["epoch"]
    found.end_pod(found.workers()[0])
    start_again(found)
    assert found.status["groups"][0]["epoch"] > epoch
    assert found.condition("Ready") == ("True", "Serving")


def test_the_plan_chooses_and_reports_the_mode() -> None:
    found = world()
    assert mode(found) == "FeedForward"
    assert roles(found) == ["gpu"], "the CPU role's resources are in the pod of the GPU"
    (pod,) = (found.manifests[name] for name in found.workers())
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "14"
    (event,) = (each for each in found.recorded if each.reason == "ModeChosen")
    for words in ("mode FeedForward chosen by prediction for 32 requests of ", "Pipeline: ", "GPU only"):
        assert words in event.message
    assert "FeedForward chosen" in found.status["plans"][0]["notes"]
    (record,) = records(found)
    assert record["mode"]["mode"] == "FeedForward"
    assert "mode" not in record["spec"]["parallelism"], "the spec is as the user wrote it"


def test_a_new_resource_on_the_larger_gpu_gets_another_mode() -> None:
    """The tests below change the GPU and expect that this changes the mode."""
    found = world(LARGE_GPU)
    assert mode(found) == "Pipeline"
    assert roles(found) == ["gpu"]
    (record,) = records(found)
    assert record["mode"] == {"mode": "Pipeline", "gpuOnly": True, "keepsCpuPods": False}


def test_the_mode_stays_after_restarts_and_changes_of_nodes_and_calibrations() -> None:
    found = world()
    record = records(found)
    found.nodes = nodes(LARGE_GPU)
    found.calibrations = Calibrations(this_machine=CALIBRATION)
    for _ in range(2):
        found.restart_operator()
        fail(found)
        assert mode(found) == "FeedForward"
    assert records(found) == record
    assert found.events.count("ModeChosen") == 1


def test_the_mode_stays_after_a_scale_to_zero_and_a_suspension() -> None:
    found = world()
    for change in ({"replicas": 0}, {"replicas": 1, "suspend": True}):
        found.change_spec(**change)
        found.settle()
        found.reap()
        found.settle()
        assert found.workers() == []
        assert len(records(found)) == 1
        found.nodes = nodes(LARGE_GPU)
        found.restart_operator()
    found.change_spec(suspend=False)
    start_again(found)
    assert mode(found) == "FeedForward"


def test_a_second_group_gets_the_mode_of_the_first() -> None:
    found = world(replicas=2)
    assert roles(found) == ["gpu", "gpu"]
    assert mode(found) == "FeedForward"
    found.nodes = nodes(LARGE_GPU)
    found.change_spec(replicas=3)
    found.settle()
    assert roles(found) == ["gpu"] * 3
    assert {plan["mode"] for plan in found.status["plans"]} == {"FeedForward"}
    assert found.events.count("ModeChosen") == 1


def test_a_lost_record_is_written_again_with_the_mode_of_the_plan() -> None:
    found = world()
    (before,) = records(found)
    (lost,) = (key for key in found.objects if "-revision-" in key[1])
    del found.objects[lost]
    found.nodes = nodes(LARGE_GPU)
    found.restart_operator()
    found.settle()
    assert records(found) == [before]


def test_a_new_revision_chooses_its_mode_again() -> None:
    found = world()
    found.nodes = nodes(LARGE_GPU)
    found.change_spec(restartedAt="2026-01-01T00:00:00Z")
    start_again(found)
    assert mode(found) == "Pipeline"
    assert found.events.count("ModeChosen") == 2


def test_another_planned_load_creates_no_revision() -> None:
    found = world()
    revision = found.status["updateRevision"]
    found.change_spec(planning={"load": {"requests": 1}})
    found.settle()
    assert found.status["updateRevision"] == revision
    fail(found)
    assert mode(found) == "FeedForward"


def test_no_mode_is_chosen_while_the_group_waits_for_capacity() -> None:
    found = World(spec=world().spec, nodes=(node("b"),))
    found.settle()
    found.answer_inspection(shapes()["mixture"].to_json())
    found.settle()
    assert found.workers() == []
    assert records(found) == []
    assert found.condition("CapacityAvailable")[0] == "False"
    found.nodes = nodes(LARGE_GPU)
    found.settle()
    found.all_ready()
    found.settle()
    assert mode(found) == "Pipeline"


def test_a_spec_without_a_plan_is_refused_with_the_reason_of_each_mode() -> None:
    tiny = {"requests": {"cpu": "1", "memory": "2Gi"}}
    found = world(
        roles=[
            {"name": "gpu", "device": "GPU", "deviceMemory": "8Gi"},
            {"name": "cpu", "device": "CPU", "resources": tiny},
        ]
    )
    assert found.condition("Planned") == ("False", "InsufficientMemory")
    for words in ("GPU only: ", "FeedForward: ", "Pipeline: ", "Tensor: "):
        assert words in found.message("Planned")
