"""A quota with room for some groups: that number of groups starts, even if others compete for the quota."""

from datetime import timedelta

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import CreateObject, ResourceKey
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile.refusals import OBJECT_REFUSED, ActionPermits
from tests.unit.reconcile.world import World, cpu_pair

PODS_OF_A_GROUP = 2
_GONE = timedelta(seconds=88)
"""Rest of a pod's grace period of 90 seconds once the pod is gone."""


def wanting(replicas: int) -> World:
    """Returns a world with a known model in which no group has begun."""
    world = World(spec=cpu_pair(replicas=replicas), calm=False)
    world.step()
    world.answer_inspection()
    world.step()
    world.pods.clear()
    return world


def whole_groups(world: World) -> list[str]:
    groups = [pod.labels[names.LABEL_GROUP] for pod in world.pods.values() if not pod.deleting]
    return sorted(group for group in set(groups) if groups.count(group) == PODS_OF_A_GROUP)


def live(world: World, seconds: float) -> None:
    """Lets time pass; pods become ready immediately, and deleted pods disappear after two seconds."""
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        gone = [name for name, pod in world.pods.items() if pod.gone_by and pod.gone_by - world.now < _GONE]
        for name in gone:
            del world.pods[name]
        world.step(in_real_time=True)
        world.all_ready()
        world.advance_time(0.05 if world.writes else min(max(world.look_again_s or 5.0, 0.05), 5.0))


@pytest.mark.parametrize(("replicas", "room"), [(1, 1), (2, 2), (2, 3), (3, 2), (3, 5), (4, 5)])
def test_a_quota_is_filled_with_whole_groups(replicas: int, room: int) -> None:
    world = wanting(replicas)
    world.quota_is_full = lambda: len(world.pods) >= room
    live(world, 300)
    assert len(whole_groups(world)) == min(replicas, room // PODS_OF_A_GROUP)


def test_no_group_waits_forever_for_a_group_without_pods() -> None:
    """A policy refuses one pod of group 0; group 1 is deleted and starts again."""
    world = wanting(2)
    world.refuses["Pod", "demo-0-*-1"] = "denied"
    live(world, 60)
    for name in [name for name in world.workers() if name.startswith("demo-1-")]:
        world.delete_pod(name)
    live(world, 120)
    assert whole_groups(world) == ["1"]


def test_a_group_stops_waiting_for_a_group_that_gets_no_pods() -> None:
    """A pod of group 2 is refused, and a create of group 0 has no answer: group 1 starts."""
    world = wanting(3)
    world.refuses["Pod", "demo-2-*-0"] = "denied"
    live(world, 1500)
    epoch = world.status["groups"][0]["epoch"]
    world.unanswered = {("Pod", f"demo-0-{each}-1") for each in range(epoch + 1, epoch + 40)}
    world.end_pod(next(name for name in world.workers() if name.startswith("demo-0-")))
    live(world, 10)
    world.end_pod(next(name for name in world.workers() if name.startswith("demo-1-")))
    live(world, 60)
    assert "1" in whole_groups(world)


def test_refused_pods_of_two_resources_retry_at_different_times() -> None:
    def retries(uid: str) -> list[float]:
        owner = Owner(key=ResourceKey(namespace="team", name="llama"), uid=uid)
        metadata = {"name": "llama-0-7-0", "ownerReferences": [owner.reference]}
        pod = CreateObject(manifest={"kind": "Pod", "metadata": metadata}, scopes=frozenset({"group-0"}))
        permits = ActionPermits("llama", (), World(spec={}).now)
        for _ in range(12):
            permits.record_refused(pod, OBJECT_REFUSED, "exceeded quota")
            (refusal,) = permits.known.values()
            found.append((refusal.retry_at - permits.now).total_seconds())
        return found[-12:]

    found: list[float] = []
    first, second = retries("one"), retries("two")
    assert all(2.5 <= each <= 300 for each in found)
    together = [index for index, each in enumerate(first) if abs(each - second[index]) < each / 20]
    assert len(together) < 6, "they meet a few times at most"
