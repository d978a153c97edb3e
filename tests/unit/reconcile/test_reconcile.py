"""One resource from apply to serving, through failures, changes and deletion."""

from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.cluster import PatchStatus, RemoveFinalizer, ResourceKey
from heteroinfer_operator.manifests.drift import find_drift
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.service import client_ports
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.unit.reconcile.world import World, cpu_pair

CULPRIT = Failure(
    reason=FailureReason.RANK_EXITED, message="rank 1 was killed by SIGKILL", pod=1, rank=1, exit_code=-9
)


@pytest.fixture
def world() -> World:
    return World(spec=cpu_pair())


def hold(world: World, *finalizers: str) -> None:
    """Sets these finalizers, as other controllers would."""
    world.finalizers = finalizers


def test_the_finalizer_of_earlier_versions_is_removed(world: World) -> None:
    """Earlier versions set this finalizer: without an operator, resource and namespace stayed."""
    world.serve()
    before = dict(world.pods)
    assert not world.finalizers, "the operator sets no finalizer"
    hold(world, "example.test/theirs", names.FINALIZER)
    world.step()
    assert world.writes == [RemoveFinalizer()]
    assert world.finalizers == ("example.test/theirs",)
    assert world.pods == before
    world.step()
    assert world.writes == []


def test_a_finalizer_that_another_controller_restores_is_removed_rarely(world: World) -> None:
    """An operator of an earlier version sets it each time. Earlier, both operators wrote without end."""
    world.serve()
    removals = 0
    for _ in range(200):
        hold(world, names.FINALIZER)
        world.step(in_real_time=True)
        removals += RemoveFinalizer() in world.writes
        world.advance_time(0.3)
    assert removals <= 10
    assert world.condition("Progressing") == ("False", "MadeByOthers")
    assert world.condition("Ready") == ("True", "Serving")
    world.finalizers = ()
    world.live(100)
    assert world.condition("Progressing") == ("False", "Settled")


def test_a_finalizer_that_cannot_be_removed_does_not_block_creates(world: World) -> None:
    world.finalizers = (names.FINALIZER,)
    world.refuses = {("HeteroInference", "demo"): "admission webhook denied the request"}
    world.serve()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.finalizers == (names.FINALIZER,)


def test_the_model_is_inspected_before_planning(world: World) -> None:
    world.settle()
    assert len(world.pods) == 1
    assert world.workers() == []
    assert world.condition("ModelReady") == ("Unknown", "Inspecting")
    assert world.condition("Ready") == ("False", "Pending")


def test_an_applied_resource_becomes_ready(world: World) -> None:
    world.serve()
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1"]
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["summary"]["groups"] == "1/1"
    assert world.status["observedGeneration"] == 1
    assert world.status["readyReplicas"] == 1
    assert ("Service", "demo") in world.objects
    assert ("Service", "demo-0-ranks") in world.objects
    assert ("NetworkPolicy", "demo-0-ranks") in world.objects
    assert [kind for kind, _ in world.objects].count("ConfigMap") == 2, (
        "one for the plan, one for the revision"
    )


def test_the_inspect_pod_is_deleted_once_its_result_is_stored(world: World) -> None:
    world.serve()
    world.reap()
    assert list(world.pods) == world.workers()


def test_a_settled_resource_is_never_written(world: World) -> None:
    world.serve()
    world.reap()
    for _ in range(5):
        world.advance_time(600)
        world.step()
        assert world.writes == []


def test_status_is_written_before_pods_are_created(world: World) -> None:
    world.settle()
    world.answer_inspection()
    decision = world.step()
    kinds = [type(action).__name__ for action in decision.actions]
    patch = next(i for i, action in enumerate(decision.actions) if isinstance(action, PatchStatus))
    pods = [
        i for i, action in enumerate(decision.actions) if getattr(action, "manifest", {}).get("kind") == "Pod"
    ]
    assert patch < min(pods), kinds


def test_an_unreadable_model_is_reported_and_retried(world: World) -> None:
    world.settle()
    failure = Failure(reason=FailureReason.MODEL_NOT_READABLE, message="/model has no config.json")
    world.answer_inspection(failure.to_json(), exit_code=1)
    world.settle()
    status, reason = world.condition("ModelReady")
    assert (status, reason) == ("False", "ModelNotReadable")
    assert "no config.json" in str(world.status["conditions"])
    world.advance_time(31)
    world.step()
    world.reap()
    world.serve()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_failed_group_reports_the_culprit_and_restarts_as_a_whole(world: World) -> None:
    world.serve()
    world.end_pod("demo-0-1-1", message=CULPRIT.to_json())
    world.step()
    assert world.condition("Ready") == ("False", "RankExited")
    (failure,) = world.status["groups"][0]["failures"]
    assert (failure["rank"], failure["exitCode"], failure["epoch"]) == (1, -9, 1)
    assert all(world.pods[name].deleting for name in ("demo-0-1-0", "demo-0-1-1"))
    assert "RankExited" in world.events
    world.settle()
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1"], "no pod is created before the old pods are gone"
    world.reap()
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["groups"][0]["restarts"] == 1


def test_a_report_of_a_vanished_peer_does_not_name_the_culprit(world: World) -> None:
    world.serve()
    seen = Failure(reason=FailureReason.POD_LOST, message="pod 1 went silent", pod=1)
    world.end_pod("demo-0-1-0", exit_code=71, message=seen.to_json())
    world.end_pod("demo-0-1-1", exit_code=137, reason="OOMKilled")
    world.step()
    assert world.condition("Ready") == ("False", "OOMKilled")


def test_a_deleted_pod_ends_the_epoch_at_once(world: World) -> None:
    world.serve()
    world.delete_pod("demo-0-1-1")
    world.step()
    assert world.condition("Ready") == ("False", "PodDeleted")
    assert world.status["groups"][0]["epoch"] == 2


def test_restarts_are_limited_and_failed_is_final_until_a_manual_restart(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 2})
    world.serve()
    for epoch in (1, 2, 3):
        assert world.workers() == [f"demo-0-{epoch}-0", f"demo-0-{epoch}-1"]
        world.end_pod(f"demo-0-{epoch}-1", message=CULPRIT.to_json())
        world.settle()
        world.reap()
        world.advance_time(400)
        world.settle()
        world.all_ready()
        world.settle()
    assert world.condition("Failed") == ("True", "RestartsUsedUp")
    assert world.condition("Ready") == ("False", "RankExited")
    assert world.status["groups"][0]["phase"] == "Failed"
    world.advance_time(1e6)
    world.settle()
    assert world.condition("Failed")[0] == "True", "time alone does not restart the group"
    world.change_spec(restartedAt="2026-01-02T00:00:00Z")
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Failed") == ("False", "NotFailed")


def test_pods_with_the_logs_of_a_failed_group_are_kept(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 0})
    world.serve()
    world.end_pod("demo-0-1-1", message=CULPRIT.to_json())
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == ["demo-0-1-1"]


def test_backoff_grows_and_each_wait_ends_in_time(world: World) -> None:
    world.serve()
    world.end_pod("demo-0-1-0", message=CULPRIT.to_json())
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    world.end_pod("demo-0-2-0", message=CULPRIT.to_json())
    world.settle()
    world.reap()
    decision = world.step()
    assert world.workers() == []
    assert decision.look_again_s == pytest.approx(10)
    world.advance_time(10)
    world.settle()
    assert world.workers() == ["demo-0-3-0", "demo-0-3-1"]


def test_an_eviction_does_not_count(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 0})
    world.serve()
    name = "demo-0-1-1"
    world.pods[name] = type(world.pods[name])(
        **{f: getattr(world.pods[name], f) for f in world.pods[name].__dataclass_fields__}
        | {"disrupted": "EvictionByEvictionAPI", "deleting": True}
    )
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]
    assert world.status["groups"][0]["restarts"] == 0


def test_an_explicit_default_creates_no_revision(world: World) -> None:
    world.serve()
    before = world.status["updateRevision"]
    world.change_spec(parallelism={"mode": "Pipeline", "batchesInFlight": 1})
    world.settle()
    assert world.status["updateRevision"] == before
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1"]


def test_scaling_creates_no_revision(world: World) -> None:
    world.serve()
    before = world.status["updateRevision"]
    world.change_spec(replicas=2)
    world.settle()
    world.all_ready()
    world.settle()
    assert world.status["updateRevision"] == before
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1", "demo-1-1-0", "demo-1-1-1"]
    world.change_spec(replicas=1)
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1"]
    assert ("Service", "demo-1-ranks") not in world.objects
    assert world.status["replicas"] == 1


def test_a_new_revision_replaces_one_group_at_a_time(world: World) -> None:
    world.change_spec(replicas=2)
    world.serve()
    world.change_spec(engine={"maxModelLen": 512})
    world.settle()
    deleting = {name for name, pod in world.pods.items() if pod.deleting and name in world.workers()}
    assert deleting == {"demo-0-1-0", "demo-0-1-1"}
    world.reap()
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1", "demo-1-1-0", "demo-1-1-1"]
    world.all_ready()
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1", "demo-1-2-0", "demo-1-2-1"]
    assert world.status["currentRevision"] == world.status["updateRevision"]
    assert world.status["updatedReplicas"] == 2


def test_a_resumed_resource_starts_again(world: World) -> None:
    world.serve()
    world.change_spec(suspend=True)
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == []
    assert world.condition("Ready") == ("True", "Suspended")
    assert world.condition("Available") == ("False", "Suspended")
    world.change_spec(suspend=False)
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]


def test_a_deletion_from_before_the_upgrade_continues(world: World) -> None:
    world.serve()
    world.reap()
    world.deleting = True
    hold(world, names.FINALIZER)
    world.settle()
    assert all(world.pods[name].deleting for name in world.workers())
    assert world.finalizers == ()


def test_an_orphaning_deletion_ends_no_pod(world: World) -> None:
    world.serve()
    world.reap()
    before = dict(world.pods)
    world.deleting = True
    hold(world, "orphan")
    world.step()
    assert world.writes == []
    assert world.pods == before


def test_an_unreadable_spec_does_not_affect_running_groups(world: World) -> None:
    world.serve()
    world.reap()
    world.change_spec(replicas="two")
    world.settle()
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1"]
    assert world.condition("Planned") == ("False", "InvalidSpec")
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Ready") == ("False", "InvalidSpec")


def test_reports_a_refused_plan(world: World) -> None:
    world.change_spec(engine={"args": ["--block-size=64"]})
    world.settle()
    world.answer_inspection()
    world.settle()
    assert world.workers() == []
    assert world.condition("Planned")[0] == "False"
    assert "--block-size" in str(world.status["conditions"])
    assert len(world.events) == len(set(world.events)), "reported once"


def test_reports_the_wait_for_gpus(world: World) -> None:
    roles = [{"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"}, cpu_pair()["roles"][0]]
    world.change_spec(roles=roles)
    world.settle()
    world.answer_inspection()
    world.settle()
    assert world.condition("CapacityAvailable") == ("False", "InsufficientGPU")
    assert world.workers() == []
    world.nodes = (
        NodeView(
            name="g",
            allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100, "nvidia.com/gpu": 8},
            labels=IMAGE_PLATFORM,
        ),
    )
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_reports_a_start_on_cpus_after_waiting(world: World) -> None:
    roles = [{"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"}, cpu_pair()["roles"][0]]
    world.change_spec(roles=roles, planning={"onGPUShortage": {"action": "CPUOnly", "after": "5m"}})
    world.settle()
    world.answer_inspection()
    world.settle()
    decision = world.step()
    assert decision.look_again_s == pytest.approx(60), "capacity may appear without an event"
    world.advance_time(299)
    assert world.step().look_again_s == pytest.approx(1.1)
    world.advance_time(2)
    world.settle()
    assert len(world.workers()) == 2
    assert world.status["summary"]["gpuRanks"] == 0


def test_drift_of_a_service_is_repaired_and_additions_stay(world: World) -> None:
    world.serve()
    world.reap()
    service = world.objects["Service", "demo"]
    world.objects["Service", "demo"] = {**service, "spec": {**service["spec"], "clusterIP": "10.0.0.1"}}
    world.step()
    assert world.writes == []
    world.objects["Service", "demo"] = {**service, "spec": {**service["spec"], "selector": {}}}
    world.step()
    assert len(world.writes) == 1


PROXY_NAME = {"service.kubernetes.io/service-proxy-name": "nobody"}


@pytest.mark.parametrize(
    ("labels", "fields"),
    [
        (PROXY_NAME, {}),
        ({"service.kubernetes.io/headless": ""}, {}),
        ({}, {"internalTrafficPolicy": "Local"}),
    ],
)
def test_service_fields_that_block_clients_are_repaired(
    world: World, labels: dict[str, str], fields: dict[str, str]
) -> None:
    """While the operator cannot repair them, the resource is not available."""
    world.serve()
    world.reap()
    service = world.objects["Service", "demo"]
    metadata = {**service["metadata"], "labels": {**service["metadata"]["labels"], **labels}}
    changed = {**service, "metadata": metadata, "spec": {**service["spec"], **fields}}
    patch = find_drift(changed, service)
    assert {**metadata["labels"], **patch.get("metadata", {}).get("labels", {})} == {
        **service["metadata"]["labels"],
        **dict.fromkeys(labels),
    }
    assert patch.get("spec", {}) == dict.fromkeys(fields, "Cluster")
    owner = Owner(key=ResourceKey(namespace="default", name="demo"), uid="uid-demo")
    assert client_ports(service, owner)
    assert not client_ports(changed, owner)
    world.objects["Service", "demo"] = changed
    world.step()
    assert len(world.writes) == 1
    assert world.condition("Available") == ("True", "Serving")

    def change_again(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
        objects["Service", "demo"] = changed

    world.meddler = change_again
    world.step()
    world.settle(30)
    assert world.condition("Available") == ("False", "ChangedByOthers")


def _report(*step_s: float) -> GroupReport:
    times = step_s if len(step_s) > 1 else step_s * 2
    ranks = tuple(
        RankStatus(rank=rank, pod=rank, phase=RankPhase.READY, steps=9, step_s=each, compute_s=each)
        for rank, each in enumerate(times)
    )
    return GroupReport(group_uid="u", epoch=1, plan_hash="h", ready=True, message="", ranks=ranks)


def test_changed_step_times_are_written_at_most_once_a_minute(world: World) -> None:
    world.serve()
    world.reap()
    world.reports = {0: _report(0.010)}
    world.settle()
    assert world.status["summary"]["stepMs"] == "10.0"
    world.reports = {0: _report(0.020)}
    world.advance_time(30)
    world.step()
    assert world.writes == []
    world.advance_time(31)
    world.settle()
    assert world.status["summary"]["stepMs"] == "20.0"
    world.reports = {0: _report(0.021)}
    world.advance_time(120)
    world.step()
    assert world.writes == []


def test_a_new_slowest_rank_is_reported_after_ten_seconds(world: World) -> None:
    world.serve()
    world.reap()
    world.reports = {0: _report(0.020, 0.010)}
    world.settle()
    assert world.status["summary"]["slowestRank"].startswith("0 ")
    world.reports = {0: _report(0.020, 0.021)}
    world.advance_time(11)
    world.step()
    assert world.writes == [], "the ranks are about as slow as each other"
    world.reports = {0: _report(0.020, 0.040)}
    world.settle()
    assert world.status["summary"]["slowestRank"].startswith("1 ")
    world.reports = {0: _report(0.080, 0.040)}
    world.advance_time(9)
    world.step()
    assert world.writes == []
    world.advance_time(2)
    world.settle()
    assert world.status["summary"]["slowestRank"].startswith("0 ")
