"""What is refused of a resource's children: said in its conditions, tried again later and later, no more."""

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Gang
from tests.unit.reconcile.world import World, cpu_pair


def create_model(world: World) -> None:
    """Brings a new resource up to the profile of its model."""
    world.settle()
    world.answer_inspection()


@pytest.mark.parametrize("gang", [Gang.VOLCANO, Gang.COSCHEDULING, Gang.NATIVE])
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
