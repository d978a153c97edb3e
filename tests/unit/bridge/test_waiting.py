"""Waits for shared memory."""

import time

import pytest

from vllm_heteroinfer.distributed.bridge.waiting import SPIN_S, YIELD_S, wait_until
from vllm_heteroinfer.group.deadline import MOST_TURN_S, Patience


def test_a_wait_ends_with_what_it_waits_for() -> None:
    end = time.perf_counter() + 2 * YIELD_S  # past the spins, into the sleeps
    assert wait_until(lambda: time.perf_counter() > end, 10.0)
    assert time.perf_counter() - end < 5


def test_a_wait_ends_in_time() -> None:
    for timeout_s in (0.0, SPIN_S, 4 * YIELD_S):
        start = time.perf_counter()
        assert not wait_until(lambda: False, timeout_s)
        assert timeout_s <= time.perf_counter() - start < timeout_s + 5


def test_there_is_a_look_after_the_time_is_over() -> None:
    """A process that was not scheduled for long must not say that a peer is lost which has come meanwhile."""
    looks = iter([False, True])
    assert wait_until(lambda: next(looks), 0.0)


def test_time_without_a_turn_is_not_counted() -> None:
    """A process that was stopped looks again, for as long as it has patience left."""
    looks = 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:  # as a stop of this process: nothing happens for longer than the time-out
            until = time.perf_counter() + 0.4
            while time.perf_counter() < until:
                pass
        return looks > 10

    assert wait_until(ready, 0.3)


def test_patience_counts_naps_and_no_stops() -> None:
    patience = Patience(1.0)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        pass
    patience.napped(0.1)
    assert patience.left_s == pytest.approx(1.0 - 0.1 - MOST_TURN_S)
    patience.napped(5.0)
    assert 0.7 < patience.left_s < 0.81, "a nap that ended early counts as long as it was"
