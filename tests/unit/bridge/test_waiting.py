"""Waits for shared memory."""

import time

from vllm_heteroinfer.distributed.bridge.waiting import SPIN_S, YIELD_S, wait_until


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
