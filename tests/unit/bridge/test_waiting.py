"""Waits for a word of shared memory."""

import time

import pytest

from vllm_heteroinfer.distributed.bridge.waiting import SPIN_S, YIELD_S, wait_until
from vllm_heteroinfer.group.deadline import MAX_TURN_S, WaitCountdown


def test_wait_ends_when_the_condition_is_true() -> None:
    end = time.perf_counter() + 2 * YIELD_S  # after the time of spinning and yielding, so the wait sleeps
    assert wait_until(lambda: time.perf_counter() > end, 10.0)
    assert time.perf_counter() - end < 5


def test_wait_ends_at_the_time_out() -> None:
    for timeout_s in (0.0, SPIN_S, 4 * YIELD_S):
        start = time.perf_counter()
        assert not wait_until(lambda: False, timeout_s)
        assert timeout_s <= time.perf_counter() - start < timeout_s + 5


def test_checks_once_more_after_the_time_out() -> None:
    """The peer may have written the word while this process was not scheduled."""
    checks = iter([False, True])
    assert wait_until(lambda: next(checks), 0.0)


def test_does_not_count_time_without_a_cpu() -> None:
    """After a pause of the process, the rest of the time-out still counts."""
    checks = 0

    def ready() -> bool:
        nonlocal checks
        checks += 1
        if checks == 1:  # like a pause of this process that is longer than the time-out
            until = time.perf_counter() + 0.4
            while time.perf_counter() < until:
                pass
        return checks > 10

    assert wait_until(ready, 0.3)


def test_a_limit_counts_naps_but_no_time_without_cpu() -> None:
    countdown = WaitCountdown(1.0)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        pass
    countdown.record_nap(0.1)
    assert countdown.left_s == pytest.approx(1.0 - 0.1 - MAX_TURN_S)
    countdown.record_nap(5.0)
    assert 0.7 < countdown.left_s < 0.81, "a nap that ended early counts with its real length"
