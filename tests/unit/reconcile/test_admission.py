"""The objects of a rollout are validated before the rollout stops running groups."""

import pytest

from tests.unit.reconcile.world import World, cpu_pair

RECORD = ("ConfigMap", "demo-revision-*")
"""A refused record of a new revision; running groups have their own record and restart with it."""
WORDS = "ConfigMap demo-revision is invalid: Too long"


@pytest.fixture
def world() -> World:
    world = World(spec=cpu_pair())
    world.serve()
    return world


def is_left_alone(world: World) -> bool:
    return not any(pod.deleting for pod in world.pods.values())


@pytest.mark.parametrize("refused", [("Pod", "demo-*"), RECORD, ("ConfigMap", "demo-plan-*")])
def test_a_refused_revision_stops_no_group(world: World, refused: tuple[str, str]) -> None:
    before = world.workers()
    world.refuses[refused] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    world.live(3600)
    assert world.workers() == before
    assert is_left_alone(world)
    assert world.condition("Stalled") == ("True", "ObjectRefused")
    assert world.condition("Ready") == ("False", "ObjectRefused")
    assert world.condition("Available") == ("True", "Serving")
    assert world.message("Stalled") == WORDS
    assert world.events.count("ObjectRefused") == 1
    assert len(world.tried) < 20, "as seldom as for a refused pod"


def test_a_group_restarts_with_its_own_revision_if_the_target_is_refused(world: World) -> None:
    revision = world.status["groups"][0]["revision"]
    world.refuses[RECORD] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    world.live(10)
    world.end_pod(world.workers()[0])
    for _ in range(4):
        world.live(20)
        world.reap()
    world.all_ready()
    world.live(10)
    assert world.status["groups"][0]["revision"] == revision
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Stalled") == ("True", "ObjectRefused")


def test_the_dry_run_also_covers_a_group_between_epochs(world: World) -> None:
    revision = world.status["groups"][0]["revision"]
    world.end_pod(world.workers()[0])
    world.step()
    world.reap()
    assert not world.workers()
    world.refuses[RECORD] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    world.live(60)
    assert len(world.workers()) == 2
    assert world.status["groups"][0]["revision"] == revision


def test_adding_a_group_of_a_refused_revision_stops_no_other_group(world: World) -> None:
    """Earlier, the group's first pod was created before the answer, and showed the revision as accepted."""
    before = world.workers()
    world.refuses["Pod", "demo-*-1"] = WORDS
    world.change_spec(replicas=2, engine={"maxModelLen": 512})
    world.live(600)
    assert world.workers() == before
    assert is_left_alone(world)
    assert world.condition("Stalled") == ("True", "ObjectRefused")
    assert world.condition("Available") == ("True", "Serving")
    assert WORDS in world.status["groups"][1]["message"]


def test_each_revision_is_validated_once_and_a_settled_resource_sends_no_dry_run() -> None:
    world = World(spec=cpu_pair(replicas=3))
    world.serve()
    assert world.tried == []
    world.change_spec(engine={"maxModelLen": 512})
    for _ in range(10):
        world.live(5)
        world.reap()
        world.all_ready()
    assert world.condition("Ready") == ("True", "Serving")
    (revision,) = world.tried
    assert {group["revision"] for group in world.status["groups"]} == {revision}
    world.live(3600)
    world.change_spec(replicas=2)
    world.live(60)
    assert len(world.tried) == 1


def fail_again_and_again(world: World, times: int) -> int:
    """Ends the group's pods whenever it has pods; returns how often it had pods."""
    epochs = 0
    for _ in range(times):
        if running := [name for name in world.workers() if not world.pods[name].ended]:
            world.all_started()
            world.end_pod(running[0])
            epochs += 1
        for _ in range(3):
            world.live(20)
            world.reap()
    return epochs


@pytest.mark.parametrize("happens", ["nothing", "scale", "restart"])
def test_a_refused_revision_does_not_clear_failures(happens: str) -> None:
    """Earlier, each dry run took the failures for those of another revision and cleared them."""
    world = World(spec=cpu_pair(restart={"maxRestarts": 2}))
    world.serve()
    world.refuses[RECORD] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    epochs = 0
    for i in range(12):
        epochs += fail_again_and_again(world, 1)
        if happens == "scale":
            world.change_spec(rollout={"maxUnavailable": 1 + i % 2})
        if happens == "restart":
            world.restart_operator()
    assert epochs == 3
    assert world.status["groups"][0]["phase"] == "Failed"
    assert world.condition("Failed") == ("True", "RestartsUsedUp")


def test_scaling_does_not_clear_a_refusal(world: World) -> None:
    world.refuses[RECORD] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    world.live(60)
    events, tried = len(world.events), len(world.tried)
    world.change_spec(rollout={"maxUnavailable": 2})
    world.step()
    assert world.condition("Stalled") == ("True", "ObjectRefused")
    assert len(world.tried) == tried + 1, "and the dry run starts immediately"
    world.live(1)
    assert len(world.events) == events
    world.refuses.clear()
    world.change_spec(engine={"maxModelLen": 256})
    world.step()
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert world.condition("Progressing") == ("True", "RollingOut")


def test_without_an_answer_groups_keep_running_and_stopped_groups_restart(world: World) -> None:
    """Earlier, each unanswered dry run failed the reconcile, so that a group that had ended stayed down."""
    before, revision = world.workers(), world.status["groups"][0]["revision"]
    world.silent = True
    world.change_spec(engine={"maxModelLen": 512})
    assert world.live(3600) < 200
    assert world.workers() == before
    assert world.condition("Progressing") == ("False", "NotAnswered")
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Stalled") == ("False", "NotStalled")
    world.end_pod(before[0])
    for _ in range(3):
        world.live(1)
        world.reap()
    assert len(world.workers()) == 2
    assert world.workers() != before
    assert world.status["groups"][0]["revision"] == revision
    world.all_ready()
    world.live(1)
    assert world.condition("Available") == ("True", "Serving")
    world.silent = False
    world.live(31)
    world.reap()
    world.live(1)
    world.all_ready()
    world.live(1)
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["groups"][0]["revision"] != revision


def test_an_added_group_waits_for_the_answer(world: World) -> None:
    before = world.workers()
    world.silent = True
    world.change_spec(replicas=2, engine={"maxModelLen": 512})
    world.live(600)
    assert world.workers() == before
    assert "waiting for the API server" in world.status["groups"][1]["message"]


def test_a_revision_that_is_accepted_later_is_rolled_out(world: World) -> None:
    before = world.workers()
    world.refuses[RECORD] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    world.live(60)
    assert world.workers() == before
    world.refuses.clear()
    world.live(301)
    world.reap()
    world.live(1)
    world.all_ready()
    world.live(1)
    assert world.workers() != before
    assert world.condition("Ready") == ("True", "Serving")


def test_a_return_to_the_previous_spec_clears_the_refusal_and_replaces_no_pod(world: World) -> None:
    before, spec = world.workers(), world.spec
    world.refuses[RECORD] = WORDS
    world.change_spec(engine={"maxModelLen": 512})
    world.live(60)
    world.spec = spec
    world.change_spec()
    world.live(60)
    assert world.workers() == before
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Stalled") == ("False", "NotStalled")


def test_no_dry_run_while_a_resource_is_suspended(world: World) -> None:
    world.change_spec(suspend=True, engine={"maxModelLen": 512})
    world.live(60)
    assert world.tried == []
