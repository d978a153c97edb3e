"""Refused children of a resource: reported in conditions, and retried with backoff."""

from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.nodes.node_assignment import Gang
from tests.unit.reconcile.test_invariants import (
    change_policies,
    delete_policies,
    lead_clients_elsewhere,
    leave_all_alone,
    with_another_rule,
)
from tests.unit.reconcile.world import Objects, World, cpu_pair


def create_model(world: World) -> None:
    """Runs a new resource until the profile of its model is known."""
    world.settle()
    world.answer_inspection()


@pytest.mark.parametrize("gang", [Gang.VOLCANO, Gang.COSCHEDULING, Gang.NATIVE, Gang.NATIVE_BETA])
def test_a_refused_gang_object_is_retried_with_backoff(gang: Gang) -> None:
    """Its name contains the epoch. Earlier, each refusal counted as new, which led to 5 epochs a second."""
    world = World(spec=cpu_pair(), gangs=frozenset({gang}))
    create_model(world)
    for kind in ("PodGroup", "Workload"):
        world.refuses[kind, "*"] = "exceeded quota"
    first = world.status["groups"][0]["epoch"] if world.status.get("groups") else 0
    looks = world.live(600)
    assert looks < 60
    assert [refusal.tries for refusal in world.refusals] > [10]
    group = world.status["groups"][0]
    assert group["epoch"] - first <= 2
    assert "exceeded quota" in group["message"]
    assert world.condition("Progressing") == ("False", "ObjectRefused")
    assert world.condition("Ready") == ("False", "ObjectRefused")
    assert world.events.count("EpochStarted") == 1
    world.refuses.clear()
    world.live(31)
    assert len(world.workers()) == 2
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "ConfigMap", "Secret"])
def test_the_epoch_stays_while_no_pod_is_requested(kind: str) -> None:
    """Earlier, each attempt began a new epoch although the objects that pods need were refused."""
    world = World(spec=cpu_pair())
    world.refuses[kind, "demo-*"] = "a webhook says no"
    create_model(world)
    looks = world.live(600)
    assert looks < 120
    group = world.status["groups"][0]
    assert "a webhook says no" in group["message"]
    assert world.events.count("EpochStarted") <= 1  # by then the first refusal of a Secret is known
    epoch = group["epoch"]
    world.live(600)
    assert world.status["groups"][0]["epoch"] == epoch
    world.refuses.clear()
    world.live(31)
    assert [world.pods[name].labels[names.LABEL_EPOCH] for name in world.workers()] == [str(epoch)] * 2


def test_a_refusal_of_an_unwanted_object_causes_no_repeated_checks() -> None:
    """Earlier, an overdue refusal caused checks without pause for ten seconds."""
    world = World(spec=cpu_pair(replicas=2))
    create_model(world)
    world.refuses["Pod", "demo-1-*"] = "exceeded quota"
    world.live(20)
    world.change_spec(replicas=1)
    world.all_ready()
    assert world.live(400) < 40


HELD = "Service demo-0-ranks is being deleted, and held by example.test/slow"


def test_reports_a_name_held_while_the_old_object_is_deleting() -> None:
    """Earlier, only the log reported the conflict, and each reconcile began another epoch."""
    world = World(spec=cpu_pair())
    world.holds["Service", "demo-0-ranks"] = HELD
    create_model(world)
    assert world.live(600) < 120
    group = world.status["groups"][0]
    assert group["message"] == HELD
    assert group["epoch"] == 1
    assert world.condition("Progressing") == ("False", "NameHeld")
    assert world.condition("Ready") == ("False", "NameHeld")
    assert "EpochStarted" not in world.events
    world.holds.clear()
    world.live(31)
    assert len(world.workers()) == 2
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_group_does_not_wait_for_a_pod_name_that_is_held() -> None:
    """The next epoch has other names."""
    world = World(spec=cpu_pair())
    world.holds["Pod", "demo-0-1-1"] = "Pod demo-0-1-1 is being deleted"
    create_model(world)
    for _ in range(3):
        world.live(1)
        world.reap()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]


def test_a_resource_is_not_available_if_clients_reach_no_group() -> None:
    """Earlier, Ready and Available were True, and the endpoint was a Service of another user."""
    world = World(spec=cpu_pair())
    words = "Service demo exists and belongs to somebody else"
    world.refuses["Service", "demo"] = words
    world.serve()
    for kind in ("Available", "Ready", "Progressing"):
        assert world.condition(kind) == ("False", "ObjectRefused")
        assert words in next(each["message"] for each in world.status["conditions"] if each["type"] == kind)
    assert "endpoint" not in world.status
    assert world.status["readyReplicas"] == 1
    world.refuses.clear()
    world.live(31)
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Available") == ("True", "Serving")
    assert "endpoint" in world.status


@pytest.mark.parametrize(
    ("change", "available", "ready"),
    [
        ({"metadata": {"labels": {}}}, "True", "True"),
        ({"ports": [{"port": 9}]}, "True", "False"),
        ({"selector": {"app": "x"}}, "False", "False"),
    ],
    ids=["labels", "port", "selector"],
)
def test_conditions_show_whether_an_unrepairable_service_reaches_the_leaders(
    change: dict[str, object], available: str, ready: str
) -> None:
    world = World(spec=cpu_pair())
    world.serve()
    stored = world.objects["Service", "demo"]
    if "metadata" in change:
        world.objects["Service", "demo"] = {**stored, "metadata": {**stored["metadata"], "labels": {}}}
    else:
        world.objects["Service", "demo"] = {**stored, "spec": {**stored["spec"], **change}}
    world.refuses["Service", "demo"] = "a webhook says no"
    world.live(31)
    assert world.condition("Available")[0] == available
    assert world.condition("Ready")[0] == ready
    assert world.condition("Progressing") == ("False", "ObjectRefused")


def test_an_object_changed_by_a_webhook_is_not_rewritten_without_end() -> None:
    """Earlier, the operator wrote the object 14 times a second and reported nothing."""
    world = World(spec=cpu_pair(), webhook=with_another_rule)
    world.serve()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Progressing") == ("False", "ChangedByOthers")
    assert world.live(600) < 60
    world.webhook = dict
    world.live(31)
    assert world.objects["NetworkPolicy", "demo-0-ranks"]["spec"]["ingress"][2:] == []
    assert world.condition("Progressing") == ("False", "Settled")


def test_a_failure_reason_survives_a_refused_status_write() -> None:
    """Earlier, the pods with the reason were deleted before the status write, and it became PodDeleted."""
    world = World(spec=cpu_pair())
    world.serve()
    world.refuses["HeteroInference/status", "*"] = "the object is too large"
    world.end_pod(world.workers()[1], message="out of memory")
    for _ in range(5):
        world.live(20)
        world.reap()
    assert len(world.workers()) == 2, "the pod with the reason stays until the status is written"
    world.refuses.clear()
    for _ in range(5):
        world.live(20)
        world.reap()
    (failure,) = world.status["groups"][0]["failures"]
    assert failure["reason"] == "PodFailed"
    assert len(world.workers()) == 2


def test_a_rollout_waits_for_a_successful_status_write() -> None:
    """Earlier, serving groups were deleted, and without a status write no new pods were created."""
    world = World(spec=cpu_pair())
    world.serve()
    before = world.workers()
    world.refuses["HeteroInference/status", "*"] = "the object is too large"
    world.change_spec(engine={"image": "worker:2"})
    world.live(120)
    assert world.workers() == before
    assert not any(pod.deleting for pod in world.pods.values())
    world.refuses.clear()
    world.live(31)
    world.reap()
    world.settle()
    assert world.workers() != before


POLICY = "NetworkPolicy", "demo-0-ranks"


def test_an_object_changed_by_a_controller_is_not_rewritten_without_end() -> None:
    """Earlier, the operator wrote the object 25 times a second and reported nothing."""
    world = World(spec=cpu_pair())
    world.serve()
    world.meddler = change_policies
    world.step()
    assert world.live(600) < 80
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Progressing") == ("False", "ChangedByOthers")
    world.meddler = leave_all_alone
    world.live(90)
    assert world.objects[POLICY]["spec"]["ingress"][2:] == []
    assert world.condition("Progressing") == ("False", "Settled")


def test_available_is_false_while_a_controller_redirects_the_service() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    world.meddler = lead_clients_elsewhere
    world.step()
    world.live(60)
    for kind in ("Available", "Ready", "Progressing"):
        assert world.condition(kind) == ("False", "ChangedByOthers")
    assert "endpoint" not in world.status
    world.meddler = leave_all_alone
    world.live(90)
    assert world.condition("Available") == ("True", "Serving")


def test_starting_pods_wait_for_a_policy_that_a_controller_keeps_deleting() -> None:
    world = World(spec=cpu_pair())
    world.meddler = delete_policies
    create_model(world)
    assert world.live(600) < 120
    assert world.condition("Ready") == ("False", "DeletedByOthers")
    assert world.condition("Progressing") == ("False", "DeletedByOthers")
    assert POLICY not in world.objects
    epoch = world.status["groups"][0]["epoch"]
    world.live(600)
    assert world.status["groups"][0]["epoch"] == epoch
    world.meddler = leave_all_alone
    world.live(90)
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_manual_changes_are_repaired_at_once_without_a_report() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    for _ in range(20):
        for _ in range(3):
            world.objects[POLICY] = with_another_rule(world.objects[POLICY])
            world.live(5)
            assert world.objects[POLICY]["spec"]["ingress"][2:] == []
        world.live(61)
        assert world.condition("Progressing") == ("False", "Settled")


def test_reports_an_unwanted_object_that_a_controller_keeps_creating() -> None:
    """For example a tool that applies an exported child. Earlier: 60 deletes a second without a report."""
    world = World(spec=cpu_pair(replicas=2))
    world.serve()
    kept = {key: stored for key, stored in world.objects.items() if "demo-1-ranks" in key[1]}
    assert kept

    def make_again(objects: Objects) -> None:
        for key, stored in kept.items():
            objects.setdefault(key, {**stored, "metadata": {**stored["metadata"], "uid": f"uid-{len(key)}"}})

    world.change_spec(replicas=1)
    world.live(5)
    world.reap()
    world.live(5)
    assert not kept.keys() & world.objects.keys()
    make_again(world.objects)
    world.meddler = make_again
    assert world.live(600) < 120
    assert world.condition("Progressing") == ("False", "MadeByOthers")
    assert world.condition("Ready") == ("True", "Serving")
    world.meddler = lambda objects: None
    world.live(120)
    assert not kept.keys() & world.objects.keys()
    assert world.condition("Progressing") == ("False", "Settled")


@pytest.mark.parametrize(
    "changed",
    [
        {"type": "ExternalName", "externalName": "example.test"},
        {"ports": [{"name": "api", "port": 8000, "protocol": "TCP", "targetPort": 9999}]},
        {"ports": [{"name": "api", "port": 8000, "protocol": "UDP", "targetPort": "api"}]},
    ],
)
def test_available_is_false_if_a_webhook_redirects_the_service(changed: dict[str, Any]) -> None:
    """Earlier, the check covered only selector and port."""
    world = World(spec=cpu_pair())

    def webhook(manifest: dict[str, Any]) -> dict[str, Any]:
        is_clients = (manifest["kind"], manifest["metadata"]["name"]) == ("Service", "demo")
        return {**manifest, "spec": {**manifest["spec"], **changed}} if is_clients else manifest

    world.webhook = webhook
    world.serve()
    world.live(60)
    assert world.condition("Available") == ("False", "ChangedByOthers")
    assert world.condition("Ready") == ("False", "ChangedByOthers")
    assert "endpoint" not in world.status


@pytest.mark.parametrize("forgets", ["restart_operator", "change_spec"])
def test_a_resource_stays_unavailable_while_its_refused_service_is_retried(forgets: str) -> None:
    """Refusals are only in memory. Earlier, Ready and Available became True, then immediately False."""
    world = World(spec=cpu_pair())
    world.refuses["Service", "demo"] = "a webhook says no"
    world.serve()
    world.live(20)
    assert world.condition("Available") == ("False", "ObjectRefused")
    world.status["conditions"] = [{**each, "message": "old words"} for each in world.status["conditions"]]
    getattr(world, forgets)()
    for _ in range(3):
        world.step()
        assert "old words" not in world.message("Available") + world.message("Ready")
        assert world.condition("Available") == ("False", "ObjectRefused")
        assert world.condition("Ready") == ("False", "ObjectRefused")
        assert "endpoint" not in world.status
    world.refuses.clear()
    world.live(40)
    assert world.condition("Ready") == ("True", "Serving")


def test_slow_deletions_do_not_shorten_the_backoff() -> None:
    """Earlier, a refusal was forgotten after 10 s, which led to a pod, an epoch and an event every 22 s."""
    world = World(spec=cpu_pair())
    create_model(world)
    world.refuses["Pod", "demo-0-*-1"] = "exceeded quota"
    events = len(world.events)
    going: dict[str, float] = {}
    for second in range(0, 3600, 5):
        world.live(5)
        for name in [name for name, pod in world.pods.items() if pod.deleting]:
            if second - going.setdefault(name, second) >= 20:
                del world.pods[name]
    assert len([name for name in world.created if "inspect" not in name]) < 25
    assert len(world.events) - events < 5
