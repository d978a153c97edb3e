"""The operator dies between two writes and restarts: the result is the same as without the crash."""

import copy
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.api import GroupStatus, parse_status
from heteroinfer_operator.cluster import PatchStatus, Write
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair

EXIT = Failure(reason=FailureReason.RANK_EXITED, message="rank 1 exited", pod=1, rank=1).to_json()


class DiedError(Exception):
    """The operator died."""


@dataclass(slots=True, kw_only=True)
class MortalWorld(World):
    """A world whose operator can die.

    Attributes:
        acts: number of actions before the operator dies; None for no limit.
    """

    acts: int | None = None

    def die_after(self, acts: int) -> bool:
        """Runs one reconcile that dies after some actions; returns whether it died before its end."""
        self.acts = acts
        try:
            self.step()
        except DiedError:
            return True
        finally:
            self.acts = None
            self.restart_operator()
        return False

    def _run(self, action: Write) -> None:
        if self.acts == 0:
            raise DiedError
        World._run(self, action)  # slots: the decorator creates a new class, so super() does not work
        self.acts = None if self.acts is None else self.acts - 1

    def settle_all(self) -> None:
        """Lets the resource come to rest; deleted pods disappear."""
        for _ in range(4):
            self.settle(20)
            self.reap()
            self.advance_time(1)


def exits(world: World) -> None:
    world.end_pod(world.workers()[1], message=EXIT)


def is_deleted(world: World) -> None:
    world.delete_pod(world.workers()[1])


def is_gone(world: World) -> None:
    del world.pods[world.workers()[1]]


def lies_on_a_lost_node(world: World) -> None:
    assert world.nodes is not None
    (node,) = world.nodes
    world.nodes = (replace(node, schedulable=False, unreachable_since=world.now - timedelta(hours=1)),)
    for name in world.workers():
        world.pods[name] = replace(world.pods[name], ready=False)


def is_rolled_out(world: World) -> None:
    world.change_spec(engine={"maxModelLen": 1024})


def is_suspended(world: World) -> None:
    world.change_spec(suspend=True)


def is_scaled_away(world: World) -> None:
    world.change_spec(replicas=0)


ENDS = (exits, is_deleted, is_gone, lies_on_a_lost_node, is_rolled_out, is_suspended, is_scaled_away)


def outcome(world: World) -> tuple[Any, ...]:
    """Returns the final state without times and counts, with epochs by their order."""
    groups = parse_status(world.status).groups
    begun = sorted({int(name.split("-")[2]) for name in world.created if "-inspect-" not in name})
    told = [(g.phase, g.restarts, [(bisect(begun, f.epoch), f.reason) for f in g.failures]) for g in groups]
    parts = [name.split("-") for name in world.workers()]
    pods = [(group, bisect(begun, int(epoch)), index) for _, group, epoch, index in parts]
    return pods, told, [bisect(begun, group.epoch) for group in groups], world.condition("Available")


@pytest.mark.parametrize("names_come_again", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_a_crash_of_the_operator_does_not_change_the_result(
    end: Callable[[World], None], names_come_again: bool
) -> None:
    world = MortalWorld(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=names_come_again))
    world.serve()
    end(world)
    lived = copy.deepcopy(world)
    lived.settle_all()
    deaths = 0
    for reconciles in range(4):
        for acts in range(20):
            again = copy.deepcopy(world)
            for _ in range(reconciles):
                again.step()
            if not again.die_after(acts):
                break
            deaths += 1
            again.settle_all()
            assert outcome(again) == outcome(lived), f"died in reconcile {reconciles} after {acts} actions"
            assert len(again.created) == len(set(again.created)), "a name was used twice"
    assert deaths > 1


def group(world: World) -> GroupStatus:
    return parse_status(world.status).groups[0]


@pytest.mark.parametrize(
    ("away", "back"), [({"suspend": True}, {"suspend": False}), ({"replicas": 0}, {"replicas": 1})]
)
def test_a_group_keeps_serving_if_its_end_was_revoked_in_time(
    away: dict[str, Any], back: dict[str, Any]
) -> None:
    """The status has the end, but no pod was deleted, so the epoch continues."""
    world = MortalWorld(spec=cpu_pair())
    world.serve()
    pods = world.workers()
    world.change_spec(**away)
    assert world.die_after(1)
    assert not any(pod.deleting for pod in world.pods.values())
    world.change_spec(**back)
    world.settle_all()
    assert world.workers() == pods
    assert world.condition("Available") == ("True", "Serving")
    assert (group(world).epoch, group(world).failures) == (1, ())


def test_a_recorded_end_is_carried_out_unless_the_group_serves() -> None:
    """The start timed out, and the operator died before it deleted a pod."""
    world = MortalWorld(spec=cpu_pair(startup={"timeout": "10s"}))
    world.settle()
    world.answer_inspection()
    world.settle()
    world.all_started()
    world.settle()
    plan = group(world).plan_hash or ""
    ranks = tuple(RankStatus(rank=i, pod=i, phase=RankPhase.CONNECTING) for i in range(2))
    world.reports = {
        0: GroupReport(
            group_uid="u", epoch=1, plan_hash=plan, ready=False, message="rank 1 connects", ranks=ranks
        )
    }
    world.live(30)
    world.advance_time(15)
    while not world.die_after(1) or not group(world).failures:
        world.restart_operator()
        world.live(30)
        world.advance_time(15)
    assert (group(world).epoch, [f.reason for f in group(world).failures]) == (2, ["StartupTimeout"])
    met = copy.deepcopy(world)
    world.settle_all()
    assert [name for name in world.workers() if name.startswith("demo-0-1-")] == []
    assert [f.epoch for f in group(world).failures] == [1], "it is counted once"
    met.all_ready()
    met.settle_all()
    assert met.workers() == ["demo-0-1-0", "demo-0-1-1"]
    assert met.condition("Available") == ("True", "Serving")


def test_pods_stay_while_the_status_that_explains_their_deletion_is_refused() -> None:
    world = MortalWorld(spec=cpu_pair())
    world.serve()
    exits(world)
    world.refuses["HeteroInference/status", "demo"] = "no"
    decision = world.step()
    assert any(isinstance(action, PatchStatus) for action in decision.actions)
    assert not any(pod.deleting for pod in world.pods.values())
