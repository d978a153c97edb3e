"""A peer's silence counts only while this process runs. Busy machines get more time, up to a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_heteroinfer.launch.loop_clock import (
    MAX_EXTENSION,
    NEXT_DELAY,
    WINDOW_S,
    LoopClock,
    silence_limit_s,
)

BEAT_S = 0.2
LIMIT_S = 1.5


def run(clock: LoopClock, now_s: float, until_s: float, every_s: float = BEAT_S) -> float:
    """Records a turn every `every_s` seconds until `until_s`. Returns the time of the last turn."""
    while now_s + every_s <= until_s + 1e-9:
        now_s += every_s
        clock.turn(now_s)
    return now_s


def test_the_clock_of_an_idle_supervisor_counts_all_time() -> None:
    clock = LoopClock(BEAT_S, 100.0)
    run(clock, 100.0, 110.0)
    assert clock.late_s() == pytest.approx(0.0, abs=1e-9)
    assert clock.awake_s(110.1) - clock.awake_s(110.0) == pytest.approx(0.1)


def test_time_in_which_the_process_does_not_run_does_not_count() -> None:
    """Of 5 s without a CPU, only 0.4 s count as silence of a peer."""
    clock = LoopClock(BEAT_S, 100.0)
    begin_s = clock.awake_s(100.0)
    assert clock.awake_s(105.0) - begin_s == pytest.approx(2 * BEAT_S)  # the late turn is not recorded yet
    clock.turn(105.0)
    assert clock.awake_s(105.0) - begin_s == pytest.approx(2 * BEAT_S)
    assert clock.late_s() == pytest.approx(4.8)


def test_delays_of_more_than_an_interval_add_up() -> None:
    """Of each second with one turn instead of five, 0.4 s count."""
    clock = LoopClock(BEAT_S, 100.0)
    begin_s = clock.awake_s(100.0)
    run(clock, 100.0, 107.0, every_s=1.0)
    assert clock.awake_s(107.0) - begin_s == pytest.approx(7 * 2 * BEAT_S)


@given(st.lists(st.floats(0.0, BEAT_S), min_size=1, max_size=60))
def test_limits_take_no_longer_on_a_busy_node(delays_s: list[float]) -> None:
    """Delays of less than an interval count in full."""
    clock, now_s = LoopClock(BEAT_S, 0.0), 0.0
    for delay_s in delays_s:
        now_s += BEAT_S + delay_s
        clock.turn(now_s)
    assert clock.awake_s(now_s) == pytest.approx(now_s)


def test_a_late_turn_counts_for_the_length_of_the_window() -> None:
    clock = LoopClock(BEAT_S, 100.0)
    clock.turn(101.2)
    now_s = run(clock, 101.2, 101.2 + WINDOW_S - 1)
    assert clock.late_s() == pytest.approx(1.0)
    run(clock, now_s, now_s + 2)
    assert clock.late_s() == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=60))
def test_the_delay_is_the_largest_of_the_window(pauses_s: list[float]) -> None:
    clock, now_s, turns = LoopClock(BEAT_S, 0.0), 0.0, []
    for pause_s in pauses_s:
        now_s += pause_s
        clock.turn(now_s)
        turns.append((now_s, max(0.0, pause_s - BEAT_S)))
    assert clock.late_s() == pytest.approx(max(late_s for at_s, late_s in turns if now_s - at_s <= WINDOW_S))
    assert 0 <= clock.awake_s(now_s) <= len(pauses_s) * 2 * BEAT_S + 1e-6


@pytest.mark.parametrize(
    ("own_late_s", "peer_late_s", "limit_s"),
    [
        (0.0, 0.0, LIMIT_S),
        (0.5, 0.0, LIMIT_S + NEXT_DELAY * 0.5),
        (0.0, 1.0, LIMIT_S + NEXT_DELAY * 1.0),
        (2.0, 1.0, LIMIT_S + NEXT_DELAY * 2.0),
        (0.0, 1e6, LIMIT_S * (1 + MAX_EXTENSION)),
    ],
)
def test_the_limit_grows_with_delays_up_to_a_bound(
    own_late_s: float, peer_late_s: float, limit_s: float
) -> None:
    late = {"own_late_s": own_late_s, "peer_late_s": peer_late_s}
    assert silence_limit_s(LIMIT_S, acknowledged=True, **late) == pytest.approx(limit_s)
    assert silence_limit_s(LIMIT_S, acknowledged=False, **late) == LIMIT_S
