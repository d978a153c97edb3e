"""Pods that the scheduler forgets after a preemption: replaced once they have fitted for a while."""

from dataclasses import replace

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceObservation
from heteroinfer_operator.nodes.demand import pod_demand
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.reconcile.forgotten_pods import FORGOTTEN_AFTER_S
from tests.unit.reconcile.world import World, cpu_pair


class PreemptingWorld(World):
    """A world in which the scheduler preempts pods for the group; the operator knows demands of its pods."""

    def observe(self) -> ResourceObservation:
        waiting = [name for name in self.workers() if not self.pods[name].node]
        promised = tuple(pod_demand(f"default/{name}", {}, self.manifests[name]["spec"]) for name in waiting)
        return replace(super().observe(), promised=promised)

    def take(self, cpu: float) -> None:
        """Changes the CPUs that pods of others use on the node."""
        assert self.nodes is not None
        self.nodes = tuple(replace(each, requested={"cpu": cpu}) for each in self.nodes)


def nominated() -> tuple[PreemptingWorld, str]:
    """Returns a world whose leader has a node, and whose follower has a nominated node only; its name."""
    world = PreemptingWorld(spec=cpu_pair())
    world.settle()
    world.answer_inspection()
    world.settle()
    leader, follower = world.workers()
    world.pods[leader] = replace(world.pods[leader], node="node")
    world.pods[follower] = replace(world.pods[follower], nominated_node="node")
    return world, follower


def pass_time(world: World, seconds: float) -> None:
    """Lets time pass; the operator reconciles once a second."""
    for _ in range(round(seconds)):
        world.advance_time(1)
        world.step()


def test_a_forgotten_pod_is_replaced_in_the_same_epoch() -> None:
    world, follower = nominated()
    uid, epoch = world.pods[follower].uid, world.status["groups"][0]["epoch"]
    world.step()
    assert world.look_again_s == pytest.approx(FORGOTTEN_AFTER_S + 0.1)
    pass_time(world, FORGOTTEN_AFTER_S - 1)
    assert world.pods[follower].uid == uid
    pass_time(world, 3)
    assert world.pods[follower].uid != uid
    assert world.pods[follower].nominated_node == ""
    assert world.status["groups"][0]["epoch"] == epoch
    assert world.status["groups"][0]["failures"] == []
    message = next(event.message for event in world.recorded if event.reason == "PodReplaced")
    assert f"pod {follower} has fitted on node node for 30 s" in message


def test_a_pod_that_waits_for_the_end_of_preempted_pods_is_kept() -> None:
    """The time counts from the moment at which the pod fits."""
    world, follower = nominated()
    uid = world.pods[follower].uid
    world.take(62.0)
    pass_time(world, 3 * FORGOTTEN_AFTER_S)
    world.take(0.0)
    pass_time(world, FORGOTTEN_AFTER_S)
    assert world.pods[follower].uid == uid
    pass_time(world, 3)
    assert world.pods[follower].uid != uid


@pytest.mark.parametrize("why", ["placed", "not nominated", "gang", "node unknown"])
def test_other_pods_are_kept(why: str) -> None:
    world, follower = nominated()
    pod = world.pods[follower]
    if why == "placed":
        world.pods[follower] = replace(pod, node="node")
    elif why == "not nominated":
        world.pods[follower] = replace(pod, nominated_node="")
    elif why == "gang":
        world.relabel(follower, gang=Gang.VOLCANO.value)
        world.manifests[follower]["metadata"]["labels"][names.LABEL_GANG] = Gang.VOLCANO.value
    else:
        world.pods[follower] = replace(pod, nominated_node="another")
    pass_time(world, 2 * FORGOTTEN_AFTER_S)
    assert world.pods[follower].uid == pod.uid
