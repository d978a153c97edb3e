"""An unreachable leader whose pod is still Ready: conditions become Unknown, and no epoch ends."""

import pytest

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.reconcile.silent_leaders import MIN_SILENT_S
from tests.unit.reconcile.world import World, cpu_pair


@pytest.fixture
def world() -> World:
    world = World(spec=cpu_pair())
    world.serve()
    world.reap()
    return world


def test_a_silent_leader_makes_the_status_unknown_without_ending_its_group(world: World) -> None:
    workers = world.workers()
    world.silences = {0: MIN_SILENT_S}
    world.step()
    assert world.condition("Available") == ("Unknown", "LeaderSilent")
    assert world.condition("Ready") == ("Unknown", "LeaderSilent")
    world.silences = {0: 10 * MIN_SILENT_S}
    world.step()
    assert world.writes == [], "the message does not change with time"
    assert world.look_again_s is not None
    assert world.look_again_s <= 10
    assert world.workers() == workers
    world.silences = {}
    world.step()
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Ready") == ("True", "Serving")
    assert world.workers() == workers


@pytest.mark.parametrize("silent_s", [0.0, MIN_SILENT_S / 2])
def test_one_failed_connection_changes_nothing_but_causes_a_recheck(world: World, silent_s: float) -> None:
    world.silences = {0: silent_s}
    world.step()
    assert world.writes == []
    assert world.look_again_s is not None
    assert world.look_again_s <= 1


def test_another_group_that_serves_keeps_the_resource_available() -> None:
    world = World(spec={**cpu_pair(), "replicas": 2})
    world.serve()
    world.reap()
    world.silences = {1: MIN_SILENT_S}
    world.step()
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Degraded") == ("True", "LeaderSilent")
    assert world.condition("Ready") == ("Unknown", "LeaderSilent")


def test_an_ended_pod_takes_precedence_over_a_silent_leader(world: World) -> None:
    world.silences = {0: MIN_SILENT_S}
    world.end_pod(world.workers()[1])
    world.step()
    assert world.condition("Available")[0] == "False"


def _report(*, ready: bool, epoch: int = 1) -> GroupReport:
    ranks = tuple(
        RankStatus(rank=rank, pod=rank, phase=RankPhase.READY, steps=9, step_s=0.01, compute_s=0.01)
        for rank in (0, 1)
    )
    return GroupReport(group_uid="u", epoch=epoch, plan_hash="h", ready=ready, message="", ranks=ranks)


@pytest.mark.parametrize("report", [None, _report(ready=False), _report(ready=True, epoch=7)])
def test_the_leaders_report_decides_while_pods_are_not_watched(
    world: World, report: GroupReport | None
) -> None:
    world.reports = {0: _report(ready=True)}
    world.settle()
    workers = world.workers()
    world.pods_unwatched = True
    world.step()
    assert world.writes == [], "the leader reports its group as ready"
    assert world.look_again_s is not None
    assert world.look_again_s <= 1
    world.reports = {} if report is None else {0: report}
    world.step()
    assert world.condition("Available") == ("Unknown", "LeaderSilent")
    assert world.condition("Ready") == ("Unknown", "LeaderSilent")
    assert world.workers() == workers
    world.pods_unwatched = False
    world.step()
    assert world.condition("Available") == ("True", "Serving")


def test_silence_of_a_leader_that_never_answered_has_no_effect(world: World) -> None:
    world.pods_unwatched = True
    world.step()
    assert world.condition("Available") == ("True", "Serving")
