"""A pod that was never created does not count as lost; a pod in unknown state does not serve."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_operator.cluster import DeleteObject
from tests.unit.reconcile.world import World, cpu_pair


def with_model(**changes: object) -> World:
    """Returns a new resource with a known model."""
    world = World(spec=cpu_pair(**changes))
    world.settle()
    world.answer_inspection()
    return world


def pods_of(count: int) -> World:
    role = {"device": "CPU", "pods": count, "resources": {"limits": {"cpu": "1", "memory": "4Gi"}}}
    return with_model(roles=[{"name": "all", **role}])


@pytest.mark.parametrize("unanswered", ["demo-0-*-0", "demo-0-*-1", "demo-0-*"])
def test_an_unanswered_create_is_retried_in_the_same_epoch(unanswered: str) -> None:
    world = with_model()
    world.unanswered = {("Pod", unanswered)}
    world.live(20)
    before = world.status["groups"][0]
    assert before["epoch"] > 0
    assert not before["failures"]
    world.unanswered.clear()
    world.live(31)
    world.all_ready()
    world.settle()
    after = world.status["groups"][0]
    assert (after["epoch"], after["phase"]) == (before["epoch"], "Ready")
    assert world.events.count("EpochStarted") == 1
    assert not after["failures"]


@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "NetworkPolicy", "Secret"])
def test_no_pod_is_requested_before_its_dependencies_are_answered(kind: str) -> None:
    world = World(spec=cpu_pair(), unanswered={(kind, "demo*")})
    world.settle()
    world.answer_inspection()
    assert world.live(120) < 60
    assert world.workers() == []
    world.unanswered.clear()
    world.live(31)
    assert len(world.workers()) == 2


def test_one_missing_answer_does_not_change_conditions_immediately() -> None:
    world = with_model()
    world.unanswered = {("Pod", "demo-0-*-1")}
    world.step()
    world.step()
    assert world.condition("Progressing")[0] == "True"
    world.live(60)
    assert world.condition("Progressing") == ("False", "NotAnswered")


def test_a_lost_pod_ends_the_epoch_while_another_pod_is_not_created_yet() -> None:
    world = pods_of(3)
    world.unanswered = {("Pod", "demo-0-*-2")}
    world.live(3)
    first, second = world.workers()
    del world.pods[second]
    world.live(3)
    assert world.status["groups"][0]["failures"][0]["reason"] == "PodDeleted"
    assert world.pods[first].deleting
    assert second not in world.workers()


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=4), st.booleans())
def test_pods_deleted_before_they_had_a_node_are_replaced_in_the_same_epoch(
    deletions: list[set[int]], refused: bool
) -> None:
    """Also if all pods of the group are deleted, and if the API server refuses some creates for a while."""
    world = pods_of(4)
    world.calm = False
    world.live(3)
    made = world.workers()
    epoch = world.status["groups"][0]["epoch"]
    for indices in deletions:
        for name in [made[index] for index in sorted(indices)]:
            world.vanish(name)
        world.unanswered = {("Pod", made[min(indices)])} if refused else set()
        world.live(3)
        world.unanswered.clear()
        world.live(61)
        assert world.workers() == made
    world.all_ready()
    world.settle()
    group = world.status["groups"][0]
    assert (group["epoch"], group["phase"], group["failures"]) == (epoch, "Ready", [])
    assert world.events.count("EpochStarted") == 1


def test_a_replaced_pod_that_disappears_after_it_had_a_node_ends_the_epoch() -> None:
    world = pods_of(3)
    world.live(3)
    (_, second, _) = world.workers()
    world.vanish(second)
    world.live(3)
    world.all_started()
    world.live(3)
    del world.pods[second]
    world.live(3)
    assert world.status["groups"][0]["failures"][0]["reason"] == "PodDeleted"


@pytest.mark.parametrize("written", [False, True])
def test_after_a_restart_a_vanished_pod_ends_the_epoch_unless_the_status_lists_it(written: bool) -> None:
    world = pods_of(3)
    world.live(3)
    (_, second, _) = made = world.workers()
    world.vanish(second)
    if written:
        world.unanswered = {("Pod", second)}
        world.live(3)
        world.unanswered.clear()
    world.restart_operator()
    world.live(31)
    group = world.status["groups"][0]
    assert [failure["reason"] for failure in group["failures"]] == ([] if written else ["PodDeleted"])
    assert (world.workers() == made) is written


def test_a_new_process_does_not_reuse_names_of_unanswered_creates() -> None:
    world = pods_of(3)
    world.unanswered = {("Pod", "demo-0-*-2")}
    world.live(3)
    made = world.workers()
    world.restart_operator()
    world.unanswered.clear()
    world.step()
    failure = world.status["groups"][0]["failures"][0]
    assert failure["reason"] == "PodDeleted"
    assert not failure.get("counted", True)
    world.reap()
    world.live(60)
    assert len(world.workers()) == 3
    assert not set(made) & set(world.workers())


def test_a_new_revision_replaces_a_group_with_pods_not_created_yet() -> None:
    world = with_model()
    world.unanswered = {("Pod", "demo-0-*")}
    world.live(5)
    epoch = world.status["groups"][0]["epoch"]
    world.change_spec(engine={"maxModelLen": 1024})
    world.unanswered.clear()
    world.live(40)
    revisions = {
        pod.labels[names.LABEL_REVISION] for pod in world.pods.values() if pod.name in world.workers()
    }
    assert revisions == {world.status["updateRevision"]}
    assert world.status["groups"][0]["epoch"] > epoch


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6))
def test_each_pod_is_created_once_in_one_epoch_despite_unanswered_requests(gaps: list[set[int]]) -> None:
    world = pods_of(6)
    world.calm = False  # each attempt may have created a pod, so many of them wait for the budget
    for gap in gaps:
        world.unanswered = {("Pod", f"demo-0-*-{index}") for index in gap}
        world.live(7)
    world.unanswered.clear()
    world.live(31 + 60)
    made = [name for name in world.created if fnmatchcase(name, "demo-0-*")]
    assert len(made) == len(set(made)) == 6
    assert len({name.split("-")[2] for name in made}) == 1


def test_a_pod_in_unknown_state_does_not_serve_and_is_not_deleted() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    epoch = world.status["groups"][0]["epoch"]
    name = world.workers()[1]
    known = world.pods[name]
    world.pods[name] = replace(
        known, uid="", ready=False, phase="Unknown", unknown="the API server is silent"
    )
    decision = world.step()
    assert world.condition("Available")[0] == "False"
    assert (
        f"the state of pod {name} is unknown: the API server is silent"
        in world.status["groups"][0]["message"]
    )
    assert not [action for action in decision.actions if isinstance(action, DeleteObject)]
    world.settle()
    assert world.created.count(name) == 1
    world.pods[name] = known
    world.settle()
    assert world.condition("Available")[0] == "True"
    assert world.status["groups"][0]["epoch"] == epoch


def test_reports_a_lost_owner_with_the_command_that_restores_it() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    name = world.workers()[0]
    known = world.pods[name]
    world.pods[name] = replace(known, lost_owner=True)
    world.settle()
    assert world.condition("Available")[0] == "True"
    assert world.condition("Stalled") == ("True", "PodLabelLost")
    message = world.message("Stalled")
    assert f"pod {name} has lost its ownerReference" in message
    assert f"kubectl patch pod -n default {name} --type merge -p '" in message
    assert '"uid":"uid-demo"' in message
    assert message.endswith("}'")
    assert world.events.count("PodLabelLost") == 1
    world.pods[name] = known
    world.settle()
    assert world.condition("Stalled")[0] == "False"


def test_a_refused_status_is_retried_each_second() -> None:
    """Earlier, the wait grew to 30 s, in which the stored status was out of date."""
    world = World(spec=cpu_pair(), refuses={("HeteroInference/status", "*"): "no"})
    world.live(60)
    (refusal,) = world.refusals
    assert 50 <= refusal.tries <= 62
    assert (refusal.retry_at - world.now).total_seconds() <= 1
