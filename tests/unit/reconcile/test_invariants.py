"""Whatever happens in whatever order: one epoch at a time, and it converges."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from heteroinfer_contract import names
from tests.unit.reconcile.world import World, cpu_pair


class GroupLife(RuleBasedStateMachine):
    """Random failures, deletions, time and changes of the spec against the real decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(spec=cpu_pair(restart={"maxRestarts": 3}))

    @rule()
    def reconcile(self) -> None:
        self.world.step()

    @rule()
    def inspection_ends(self) -> None:
        self.world.answer_inspection()

    @rule()
    def pods_turn_ready(self) -> None:
        self.world.all_ready()

    @rule()
    def deleted_pods_go(self) -> None:
        self.world.reap()

    @rule(seconds=st.sampled_from([1, 30, 400, 4000]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_ends(self, data: st.DataObject) -> None:
        self.world.end_pod(data.draw(st.sampled_from(self.world.workers())))

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_is_deleted(self, data: st.DataObject) -> None:
        self.world.delete_pod(data.draw(st.sampled_from(self.world.workers())))

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        del self.world.pods[data.draw(st.sampled_from(self.world.workers()))]

    @rule(
        change=st.sampled_from(
            [{"replicas": 0}, {"replicas": 1}, {"replicas": 3}, {"suspend": True}, {"suspend": False}]
            + [{"engine": {"maxModelLen": n}} for n in (256, 512)]
        )
    )
    def the_user_changes_the_spec(self, change: dict[str, object]) -> None:
        self.world.change_spec(**change)

    @invariant()
    def one_epoch_of_a_group_at_a_time(self) -> None:
        epochs: dict[str, set[str]] = {}
        for name in self.world.workers():
            labels = self.world.pods[name].labels
            epochs.setdefault(labels[names.LABEL_GROUP], set()).add(labels[names.LABEL_EPOCH])
        assert all(len(found) == 1 for found in epochs.values()), epochs

    def teardown(self) -> None:
        """From wherever it is, a fresh start brings it to serving all it should."""
        self.world.change_spec(suspend=False, replicas=2, restartedAt="2026-05-05T00:00:00Z")
        for _ in range(12):
            self.world.settle()
            self.world.answer_inspection()
            self.world.reap()
            self.world.pass_time(4000)
            self.world.settle()
            self.world.all_ready()
        self.world.settle()
        assert self.world.status["readyReplicas"] == 2, self.world.status["groups"]
        assert self.world.condition("Ready") == ("True", "Serving")
        self.world.step()
        assert self.world.writes == []


TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
