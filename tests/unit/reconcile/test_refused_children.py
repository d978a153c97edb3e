"""What is refused of a resource's children: said in its conditions, tried again later and later, no more."""

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
    """Brings a new resource up to the profile of its model."""
    world.settle()
    world.answer_inspection()


@pytest.mark.parametrize("gang", [Gang.VOLCANO, Gang.COSCHEDULING, Gang.NATIVE, Gang.NATIVE_BETA])
def test_a_refused_gang_object_is_tried_again_later_and_later(gang: Gang) -> None:
    """Its name has the epoch: each was refused as another, 5 epochs a second, all of them kept."""
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
def test_no_epoch_is_counted_while_no_pod_is_asked_for(kind: str) -> None:
    """Each try began another epoch, though what its pods need was refused before them."""
    world = World(spec=cpu_pair())
    world.refuses[kind, "demo-*"] = "a webhook says no"
    create_model(world)
    looks = world.live(600)
    assert looks < 120
    group = world.status["groups"][0]
    assert "a webhook says no" in group["message"]
    assert world.events.count("EpochStarted") <= 1  # the first of a Secret is known to be refused by then
    epoch = group["epoch"]
    world.live(600)
    assert world.status["groups"][0]["epoch"] == epoch
    world.refuses.clear()
    world.live(31)
    assert [world.pods[name].labels[names.LABEL_EPOCH] for name in world.workers()] == [str(epoch)] * 2


def test_what_nobody_wants_any_more_is_not_looked_at_all_the_time() -> None:
    """After its time it was due at each instant, until it was forgotten ten seconds later."""
    world = World(spec=cpu_pair(replicas=2))
    create_model(world)
    world.refuses["Pod", "demo-1-*"] = "exceeded quota"
    world.live(20)
    world.change_spec(replicas=1)
    world.all_ready()
    assert world.live(400) < 40


HELD = "Service demo-0-ranks is being deleted, and held by example.test/slow"


def test_a_name_that_a_going_object_has_is_waited_for_and_said() -> None:
    """It was a conflict that only the log named; each look began another epoch."""
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


def test_a_pod_name_that_is_held_is_not_waited_for() -> None:
    """The next epoch has other names."""
    world = World(spec=cpu_pair())
    world.holds["Pod", "demo-0-1-1"] = "Pod demo-0-1-1 is being deleted"
    create_model(world)
    for _ in range(3):
        world.live(1)
        world.reap()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]


def test_clients_that_reach_nothing_have_nothing_available() -> None:
    """Both conditions were True, and the endpoint was somebody else's Service."""
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
def test_a_service_that_cannot_be_mended_is_judged_by_where_it_leads(
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


def test_an_object_that_others_change_at_once_is_not_fought_for() -> None:
    """It was written again at once, 14 times a second, and nothing said so."""
    world = World(spec=cpu_pair(), webhook=with_another_rule)
    world.serve()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Progressing") == ("False", "ChangedByOthers")
    assert world.live(600) < 60
    world.webhook = dict
    world.live(31)
    assert world.objects["NetworkPolicy", "demo-0-ranks"]["spec"]["ingress"][2:] == []
    assert world.condition("Progressing") == ("False", "Settled")


def test_the_reason_of_a_failure_outlives_a_refused_status() -> None:
    """The pods that said it were deleted before the status could say it: it became PodDeleted."""
    world = World(spec=cpu_pair())
    world.serve()
    world.refuses["HeteroInference/status", "*"] = "the object is too large"
    world.end_pod(world.workers()[1], message="out of memory")
    for _ in range(5):
        world.live(20)
        world.reap()
    assert len(world.workers()) == 2, "who tells why it ended stays until it is written"
    world.refuses.clear()
    for _ in range(5):
        world.live(20)
        world.reap()
    (failure,) = world.status["groups"][0]["failures"]
    assert failure["reason"] == "PodFailed"
    assert len(world.workers()) == 2


def test_a_rollout_waits_for_a_status_that_can_be_written() -> None:
    """What served was deleted, and without a status nothing was made."""
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


def test_an_object_that_a_controller_changes_each_time_is_not_fought_for() -> None:
    """It was written 25 times a second, and nothing said so."""
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


def test_clients_that_a_controller_leads_elsewhere_each_time_reach_nothing() -> None:
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


def test_a_policy_that_a_controller_deletes_each_time_is_waited_for_by_pods_that_start() -> None:
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


def test_what_people_change_by_hand_is_mended_at_once_and_not_said() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    for _ in range(20):
        for _ in range(3):
            world.objects[POLICY] = with_another_rule(world.objects[POLICY])
            world.live(5)
            assert world.objects[POLICY]["spec"]["ingress"][2:] == []
        world.live(61)
        assert world.condition("Progressing") == ("False", "Settled")


def test_what_is_deleted_and_made_each_time_is_deleted_seldom_and_said() -> None:
    """As by a tool that has an exported child: 60 deletes a second, without a word."""
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
def test_clients_who_are_led_past_the_api_are_not_served(changed: dict[str, Any]) -> None:
    """Selector and port were looked at, and no more."""
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
def test_who_reaches_no_group_is_not_said_to_while_it_is_tried_anew(forgets: str) -> None:
    """Refusals are in memory: Ready and Available were written True, and False right after."""
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


def test_pods_that_take_their_time_to_go_do_not_shorten_the_wait() -> None:
    """A refusal was forgotten 10 s after its time: a pod, an epoch and an event every 22 s, for ever."""
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
