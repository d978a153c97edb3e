"""Waits for a word of shared memory to change."""

import time
from collections.abc import Callable

from vllm_heteroinfer.group.deadline import MAX_TURN_S

SPIN_S = 200e-6
"""Time of checks without a pause: a decode step has 65 of these waits, and the shortest sleep is 60 us."""
YIELD_S = 5e-3
"""Time of checks that yield the CPU and the interpreter after each check; sleeps follow."""
_SLEEP_S = 50e-6
_LONG_S = 1.0
_LONG_SLEEP_S = 500e-6
"""Sleep between checks after a wait of `_LONG_S`, so that an idle engine uses little CPU."""


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until `ready` is true. Returns False after `timeout_s` seconds.

    Counts at most MAX_TURN_S for each check, so that a time without CPU does not use up the time-out.
    """
    waited_s, last_check_s = 0.0, time.perf_counter()
    while True:
        if ready():
            return True
        now_s = time.perf_counter()
        waited_s += min(now_s - last_check_s, MAX_TURN_S)
        last_check_s = now_s
        if waited_s < SPIN_S:
            continue  # checks again without a pause
        if waited_s > timeout_s:
            return ready()  # the word may have changed since the check above
        if waited_s < YIELD_S:
            time.sleep(0)  # yields the CPU
        else:
            time.sleep(_SLEEP_S if waited_s < _LONG_S else _LONG_SLEEP_S)
