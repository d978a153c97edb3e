"""Predictions in the status: a calibration changes them and nothing else."""

from dataclasses import replace

from heteroinfer_operator.nodes.calibrations import Calibrations, MeasuredKind, MeasuredNetwork
from heteroinfer_operator.nodes.cpu_features import AVX512_BF16
from heteroinfer_operator.planning.rates import DEFAULT_NETWORK, describe_cpu_defaults
from tests.unit.calibrated import CALIBRATION, NETWORK, calibration
from tests.unit.planning.test_ring_choice import qwen
from tests.unit.reconcile.test_mode import nodes
from tests.unit.reconcile.world import World, cpu_pair


def served(calibrations: Calibrations) -> World:
    world = World(spec=cpu_pair(), calibrations=calibrations)
    world.serve()
    world.reap()
    world.settle()
    return world


def test_without_a_calibration_the_status_reports_defaults() -> None:
    (plan,) = served(Calibrations()).status["plans"]
    assert plan["calibration"] == "; ".join(
        f"role {name}: {describe_cpu_defaults(AVX512_BF16)}" for name in ("first", "second")
    )
    assert plan["predictedStepMs"] > 0


def test_a_calibration_changes_predictions_of_a_serving_group_and_no_pod() -> None:
    world = served(Calibrations())
    before = world.status
    pods, revision = set(world.pods), before["updateRevision"]
    for machine in (CALIBRATION, calibration(readings=CALIBRATION.readings[:1], kernels=())):
        world.calibrations = Calibrations(this_machine=machine)
        world.settle()
        (plan,) = world.status["plans"]
        assert machine.hash in plan["calibration"]
        assert plan["predictedStepMs"] != before["plans"][0]["predictedStepMs"]
        assert world.status["summary"]["predictedStepMs"] == f"{plan['predictedStepMs']:.1f}"
        assert plan["hash"] == before["plans"][0]["hash"]
        assert (set(world.pods), world.status["updateRevision"]) == (pods, revision)
        assert world.status["groups"] == before["groups"]


def test_a_new_group_is_planned_with_the_calibration() -> None:
    world = served(Calibrations(this_machine=CALIBRATION))
    (plan,) = world.status["plans"]
    assert all(CALIBRATION.hash in part for part in plan["calibration"].split("; role "))


def test_a_group_is_predicted_with_the_calibration_of_its_nodes() -> None:
    world = served(Calibrations())
    before = world.status["plans"][0]
    (node,) = world.nodes or ()
    kind = MeasuredKind(name="fast", selector={"speed": "fast"}, calibration=CALIBRATION)
    world.calibrations = Calibrations(kinds=(kind,))
    world.settle()
    assert world.status["plans"][0] == before, "its node has no known kind"
    world.nodes = (replace(node, labels={"speed": "fast"}),)
    world.settle()
    (plan,) = world.status["plans"]
    assert plan["calibration"].count(CALIBRATION.hash) == 2
    assert plan["predictedStepMs"] != before["predictedStepMs"]
    assert plan["hash"] == before["hash"]


def test_the_network_of_a_groups_nodes_is_in_the_prediction() -> None:
    cpu_role = {"name": "cpu", "device": "CPU", "resources": {"limits": {"cpu": "14", "memory": "64Gi"}}}
    spec = {
        "model": {"uri": "file:///models/mixture"},
        "engine": {"maxModelLen": 8192},
        "parallelism": {"mode": "FeedForward"},
        "roles": [{"name": "gpu", "device": "GPU", "deviceMemory": "24Gi"}, cpu_role],
    }
    world = World(spec=spec, nodes=nodes(24, cpus=64))
    world.settle()
    world.answer_inspection(qwen().to_json())
    world.settle()
    on_nodes = zip(world.pods.items(), "ab", strict=True)  # the pod of the GPU has the first name
    world.pods = {name: replace(pod, node=node) for (name, pod), node in on_nodes}
    world.all_ready()
    world.settle()
    (before,) = world.status["plans"]
    assert before["calibration"].endswith(f"; network to role cpu: {DEFAULT_NETWORK.source}")
    world.nodes = tuple(replace(node, labels={**node.labels, "speed": "fast"}) for node in world.nodes or ())
    network = MeasuredNetwork(kinds=("a", "a"), selectors=({"speed": "fast"},) * 2, network=NETWORK)
    world.calibrations = Calibrations(networks=(network,))
    world.settle()
    (plan,) = world.status["plans"]
    assert f"; network to role cpu: measurement {NETWORK.hash} of " in plan["calibration"]
    assert plan["predictedStepMs"] > before["predictedStepMs"]
    assert plan["hash"] == before["hash"]
    world.pods = {name: replace(pod, node="a") for name, pod in world.pods.items()}
    world.settle()
    assert DEFAULT_NETWORK.source in world.status["plans"][0]["calibration"], (
        "pods on one node have no measured network"
    )
