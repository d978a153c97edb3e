"""The judge names the late lane, and never a lane whose answer it had no turn to read."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_heteroinfer.feed_forward.lane_judge import LATE_TURN_GRACE_S, LaneJudge, SlabState, Verdict

INTERVAL_S = 0.1
LIMIT_S = 1.5
TURNS = 25
"""Turns of a test. One interval for each turn makes 2.5 s, more than LIMIT_S."""


def state(
    asked: int,
    answered: tuple[int, ...],
    *,
    failed: tuple[bool, ...] = (),
    gave_up: bool = False,
    given_up_lane: int | None = None,
) -> SlabState:
    return SlabState(
        last_ask=asked,
        last_answers=answered,
        failed=failed or (False,) * len(answered),
        limit_s=LIMIT_S,
        gave_up=gave_up,
        given_up_lane=given_up_lane,
    )


def test_names_the_lane_that_had_no_answer_before_the_gpu_gave_up() -> None:
    judge = LaneJudge(INTERVAL_S, 0.0)
    assert judge.judge(state(1, (1, 1, 0)), 0.1) is None
    verdict = judge.judge(state(1, (1, 1, 1), gave_up=True), 0.2)
    assert verdict is not None
    assert (verdict.lane, verdict.failed) == (2, False)


def test_names_the_lane_for_which_the_gpu_gave_up_before_other_lanes() -> None:
    judge = LaneJudge(INTERVAL_S, 0.0)
    verdict = judge.judge(state(2, (1, 2, 2), gave_up=True, given_up_lane=2), 0.1)
    assert verdict is not None
    assert verdict.lane == 2


def test_names_no_lane_if_all_lanes_have_answers() -> None:
    judge = LaneJudge(INTERVAL_S, 0.0)
    verdict = judge.judge(state(1, (1, 1, 1), gave_up=True), 0.1)
    assert verdict is not None
    assert verdict.lane is None


def test_a_failed_lane_is_distinguished_from_a_late_lane() -> None:
    judge = LaneJudge(INTERVAL_S, 0.0)
    verdict = judge.judge(state(1, (1, 1), failed=(False, True), gave_up=True), 0.1)
    assert verdict is not None
    assert (verdict.lane, verdict.failed) == (1, True)


@given(
    gaps_s=st.lists(st.floats(0.0, INTERVAL_S) | st.floats(INTERVAL_S, 3600.0), min_size=1, max_size=40),
    late=st.integers(0, 2),
)
def test_does_not_count_time_in_which_the_judge_did_not_run(gaps_s: list[float], late: int) -> None:
    """The judge's thread may be frozen for any time.

    The judge names a lane only after its thread ran as often as the limit requires.
    """
    judge, now_s, awake_s = LaneJudge(INTERVAL_S, 0.0), 0.0, 0.0
    answered = tuple(0 if lane == late else 1 for lane in range(3))
    verdict: Verdict | None = None
    for gap_s in gaps_s:
        now_s += gap_s
        verdict = judge.judge(state(1, answered), now_s)
        if verdict is not None:
            break
        awake_s += min(gap_s, INTERVAL_S)
    if verdict is None:
        assert awake_s <= LIMIT_S + LATE_TURN_GRACE_S + 2 * INTERVAL_S
    else:
        assert verdict.lane == late
        assert awake_s + INTERVAL_S > LIMIT_S


@given(frozen_s=st.floats(0.0, 1e6), frozen_at=st.integers(0, TURNS), late=st.integers(0, 2))
def test_names_a_lane_that_never_answers_soon_after_the_limit(
    frozen_s: float, frozen_at: int, late: int
) -> None:
    judge, now_s = LaneJudge(INTERVAL_S, 0.0), 0.0
    answered = tuple(0 if lane == late else 1 for lane in range(3))
    for turn in range(TURNS):
        now_s += INTERVAL_S + (frozen_s if turn == frozen_at else 0.0)
        verdict = judge.judge(state(1, answered), now_s)
        if verdict is not None:
            assert verdict.lane == late
            assert turn <= (LIMIT_S + LATE_TURN_GRACE_S) / INTERVAL_S + 2
            return
    raise AssertionError(f"no lane is named after {TURNS} turns")


@given(
    asks=st.lists(st.tuples(st.floats(0.0, 1.3), st.floats(0.0, 600.0), st.integers(0, 2)), max_size=20),
)
def test_never_names_a_lane_that_answers_in_time(asks: list[tuple[float, float, int]]) -> None:
    """Each lane answers within 1.3 s, not counting the time in which all threads are frozen."""
    judge, now_s = LaneJudge(INTERVAL_S, 0.0), 0.0
    for number, (takes_s, frozen_s, slow) in enumerate(asks, start=1):
        turns = int(takes_s / INTERVAL_S)
        for turn in range(turns):
            now_s += INTERVAL_S + (frozen_s if turn == turns // 2 else 0.0)
            answered = tuple(number - 1 if lane == slow else number for lane in range(3))
            assert judge.judge(state(number, answered), now_s) is None
        now_s += INTERVAL_S
        assert judge.judge(state(number, (number,) * 3), now_s) is None
