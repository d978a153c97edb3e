"""A start without progress is overdue after the time-out."""

from dataclasses import replace

from heteroinfer_contract.group_report import RankPhase, RankStatus
from tests.unit.launch.test_environment import PLAN
from vllm_heteroinfer.launch.readiness import GroupView, StartClock
from vllm_heteroinfer.launch.supervisor_messages import RankBeat

TIMEOUT_S = 10.0


def view(phase: RankPhase = RankPhase.LOADING, loaded_bytes: int = 0) -> GroupView:
    beats = [RankBeat(status=RankStatus(rank=r.rank, pod=r.pod)) for r in PLAN.ranks]
    last = replace(beats[-1].status, phase=phase, loaded_bytes=loaded_bytes)
    return GroupView(plan=PLAN, beats=(*beats[:-1], RankBeat(status=last)), api_healthy=False)


def test_a_start_without_progress_is_overdue_after_the_timeout() -> None:
    clock = StartClock(TIMEOUT_S)
    assert not clock.is_overdue(view(), 100.0)
    assert not clock.is_overdue(view(), 110.0)
    assert clock.is_overdue(view(), 110.1)


def test_loaded_bytes_phases_and_the_api_count_as_progress() -> None:
    clock = StartClock(TIMEOUT_S)
    moves = [
        view(loaded_bytes=1),
        view(loaded_bytes=2),
        view(RankPhase.WARMING_UP, 2),
        view(RankPhase.READY, 2),
        replace(view(RankPhase.READY, 2), api_healthy=True),
    ]
    for number, moved in enumerate(moves):
        assert not clock.is_overdue(moved, 9.0 * number)
    assert clock.is_overdue(moves[-1], 9.0 * len(moves) + 2.0)


def test_waiting_for_a_pod_does_not_count_as_missing_progress() -> None:
    clock = StartClock(TIMEOUT_S)
    waiting = replace(view(), missing_pods=(1,))
    assert not clock.is_overdue(waiting, 0.0)
    assert not clock.is_overdue(waiting, 5000.0)
    assert not clock.is_overdue(view(), 5005.0)
    assert clock.is_overdue(view(), 5010.1)
