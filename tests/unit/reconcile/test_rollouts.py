"""Rollouts: group by group, within maxUnavailable, rollback, and reports of a stuck rollout."""

from dataclasses import dataclass
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heteroinfer_contract import names
from tests.unit.reconcile.world import PROFILE, World, cpu_pair

BROKEN = "example.test/broken:1"
"""Pods with this image end and never become ready."""
GOOD = ("example.test/worker:1", "example.test/worker:2", "example.test/worker:3")
TOO_LONG = PROFILE.max_position_embeddings + 1
"""A maxModelLen without a plan."""


@dataclass(slots=True, kw_only=True)
class Fleet(World):
    """A world that shows which of its groups serve, and with which image."""

    def groups(self) -> dict[int, list[str]]:
        """Returns the names of the worker pods of each group, of every epoch."""
        found: dict[int, list[str]] = {}
        for name in self.workers():
            found.setdefault(int(self.pods[name].labels[names.LABEL_GROUP]), []).append(name)
        return found

    def image(self, pod: str) -> str:
        return str(self.manifests[pod]["spec"]["containers"][0]["image"])

    def serving(self) -> dict[int, str]:
        """Returns the image of each wanted group that serves."""
        return {
            index: self.image(pods[0])
            for index, pods in self.groups().items()
            if index < self.spec["replicas"]
            and len(pods) == len(self.spec["roles"])
            and all(self.pods[pod].ready and not self.pods[pod].ended for pod in pods)
        }

    def pods_run(self) -> None:
        """Plays the kubelet: deleted pods disappear, broken pods end, all others become ready."""
        self.reap()
        self.all_ready()
        for name in self.workers():
            if self.image(name) == BROKEN and self.pods[name].termination is None:
                self.end_pod(name, message="no such file")

    def roll(self, rounds: int = 40) -> None:
        """Lets time pass and pods run until nothing changes."""
        for _ in range(rounds):
            self.settle()
            self.answer_inspection()
            self.pods_run()
            self.advance_time(600)
        self.settle()


def fleet(**changes: Any) -> Fleet:
    """Returns a fleet that serves all its groups."""
    made = Fleet(spec=cpu_pair(engine={"image": GOOD[0]}, **{"replicas": 3, **changes}))
    made.roll(3)
    assert len(made.serving()) == made.spec["replicas"]
    return made


def reported(world: World) -> tuple[Any, Any, Any]:
    """Returns the fields of the status about a rollout."""
    status = world.status
    return status.get("currentRevision"), status.get("updateRevision"), status.get("updatedReplicas")


def message(world: World, kind: str) -> str:
    return str(next(c for c in world.status["conditions"] if c["type"] == kind)["message"])


def test_groups_are_replaced_one_after_another_and_the_status_follows() -> None:
    world = fleet()
    old, same, updated = reported(world)
    assert old == same
    assert updated == 3
    world.change_spec(engine={"image": GOOD[1]})
    for done in range(3):
        world.settle()
        current, update, updated = reported(world)
        assert (current, updated) == (old, done)
        assert update not in (old, None)
        assert len(world.serving()) == 2
        assert world.condition("Progressing")[0] == "True"
        world.pods_run()
        world.settle()
        assert reported(world)[2] == done + 1
        world.pods_run()
    world.settle()
    assert reported(world) == (update, update, 3)
    assert world.condition("Progressing") == ("False", "Settled")
    assert set(world.serving().values()) == {GOOD[1]}


def test_a_change_of_replicas_creates_no_revision() -> None:
    world = fleet()
    revision, before = reported(world)[1], set(world.workers())
    for replicas in (5, 2):
        world.change_spec(replicas=replicas)
        world.roll(3)
        assert reported(world) == (revision, revision, replicas)
        assert len(world.serving()) == replicas
    assert set(world.workers()) == {name for name in before if not name.startswith("demo-2-")}


def test_reports_a_revision_that_cannot_start_while_other_groups_serve() -> None:
    world = fleet(restart={"maxRestarts": 1})
    world.change_spec(engine={"image": BROKEN})
    world.roll()
    assert world.serving() == {1: GOOD[0], 2: GOOD[0]}
    assert world.condition("Progressing") == ("False", "RolloutStuck")
    assert "no such file" in message(world, "Progressing")
    assert "2 of 3 groups keep an older revision" in message(world, "Progressing")
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Ready")[0] == "False"
    assert world.condition("Stalled") == ("True", "RestartsUsedUp")
    assert world.condition("Degraded")[0] == "True"
    assert world.condition("Failed")[0] == "True"


def test_a_failed_revision_is_not_rolled_out_after_a_suspension() -> None:
    """Earlier, no group was Failed after a suspension, and all groups started with the failed revision."""
    world = fleet(restart={"maxRestarts": 1})
    world.change_spec(engine={"image": BROKEN})
    world.roll()
    assert world.serving() == {1: GOOD[0], 2: GOOD[0]}
    for suspend in (True, False):
        world.change_spec(suspend=suspend)
        world.roll()
    assert world.serving() == {1: GOOD[0], 2: GOOD[0]}
    assert world.condition("Progressing") == ("False", "RolloutStuck")


def test_applying_the_previous_spec_rolls_back() -> None:
    world = fleet(restart={"maxRestarts": 1})
    revision = reported(world)[0]
    kept = world.groups()
    world.change_spec(engine={"image": BROKEN})
    world.roll()
    world.change_spec(engine={"image": GOOD[0]})
    world.roll()
    assert reported(world) == (revision, revision, 3)
    assert {index: world.groups()[index] for index in (1, 2)} == {index: kept[index] for index in (1, 2)}
    assert world.condition("Progressing") == ("False", "Settled")
    assert world.condition("Failed")[0] == "False"


def test_a_revision_without_a_plan_stops_no_group() -> None:
    world = fleet()
    before = world.workers()
    world.change_spec(engine={"image": GOOD[1], "maxModelLen": TOO_LONG})
    world.roll(3)
    assert world.workers() == before
    assert len(world.serving()) == 3
    assert world.condition("Progressing") == ("False", "RolloutStuck")
    assert f"got {TOO_LONG}" in message(world, "Progressing")
    assert world.condition("Planned")[0] == "False"
    assert reported(world)[2] == 0
    world.change_spec(engine={"image": GOOD[1]})
    world.roll()
    assert set(world.serving().values()) == {GOOD[1]}
    assert world.condition("Planned") == ("True", "PlanReady")


def test_an_unreadable_model_stops_no_group() -> None:
    world = fleet()
    before = world.workers()
    world.change_spec(model={"uri": "file:///models/other"})
    world.settle()
    assert world.condition("Progressing")[0] == "True"
    world.answer_inspection("no such directory", exit_code=1)
    world.settle()
    assert world.workers() == before
    assert world.condition("Progressing") == ("False", "RolloutStuck")
    assert "no such directory" in message(world, "Progressing")
    assert world.condition("ModelReady")[0] == "False"


class Rollouts(RuleBasedStateMachine):
    """Random templates, replicas, deaths and time against the real decisions."""

    @initialize(unavailable=st.integers(1, 3))
    def begin(self, unavailable: int) -> None:
        self.unavailable = unavailable
        self.world = fleet(rollout={"maxUnavailable": unavailable}, restart={"maxRestarts": 2})
        self.world.calm = False  # many events happen at the same time

    @rule()
    def reconcile(self) -> None:
        """No reconcile stops more serving groups than maxUnavailable allows."""
        before, wanted = self.world.serving(), int(self.world.spec["replicas"])
        self.world.step()
        taken = before.keys() - self.world.serving().keys()
        missing = wanted - len(before)
        assert not taken or missing + len(taken) <= self.unavailable, (taken, missing)

    @rule()
    def pods_run(self) -> None:
        self.world.pods_run()

    @rule()
    def deleted_pods_go(self) -> None:
        self.world.reap()

    @rule()
    def inspection_ends(self) -> None:
        self.world.answer_inspection()

    @rule(seconds=st.sampled_from([1, 30, 4000]))
    def time_goes_on(self, seconds: float) -> None:
        self.world.advance_time(seconds)

    @rule(image=st.sampled_from([*GOOD, BROKEN]), length=st.sampled_from([256, 512, TOO_LONG]))
    def the_template_changes(self, image: str, length: int) -> None:
        self.world.change_spec(engine={"image": image, "maxModelLen": length})

    @rule(replicas=st.integers(1, 4))
    def the_user_scales(self, replicas: int) -> None:
        self.world.change_spec(replicas=replicas)

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_dies(self, data: st.DataObject) -> None:
        self.world.end_pod(data.draw(st.sampled_from(self.world.workers())))

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        del self.world.pods[data.draw(st.sampled_from(self.world.workers()))]

    @invariant()
    def one_epoch_of_a_group_at_a_time(self) -> None:
        if not hasattr(self, "world"):
            return
        for pods in self.world.groups().values():
            assert len({self.world.pods[pod].labels[names.LABEL_EPOCH] for pod in pods}) == 1, pods

    def teardown(self) -> None:
        """From any state, a working template reaches all groups; then nothing is written."""
        if not hasattr(self, "world"):
            return
        self.world.change_spec(engine={"image": GOOD[2]})
        self.world.roll()
        wanted = self.world.spec["replicas"]
        assert self.world.serving() == dict.fromkeys(range(wanted), GOOD[2])
        current, update, updated = reported(self.world)
        assert (current, updated) == (update, wanted)
        assert self.world.condition("Progressing") == ("False", "Settled")
        self.world.step()
        assert self.world.writes == []


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(
    max_examples=8, stateful_step_count=30, deadline=None, phases=[Phase.generate]
)
