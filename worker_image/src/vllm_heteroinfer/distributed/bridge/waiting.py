"""Waits for a word of shared memory to change."""

import time
from collections.abc import Callable

from vllm_heteroinfer.group.deadline import MOST_TURN_S

SPIN_S = 200e-6
"""Looks without a pause: a decode step has 65 of these waits, and a sleep is 60 us at the least."""
YIELD_S = 5e-3
"""Looks and gives the CPU and the interpreter to others between looks, before it sleeps."""
_SLEEP_S = 50e-6
_LONG_S = 1.0
_LONG_SLEEP_S = 500e-6
"""Between looks when nothing came for `_LONG_S`: an idle engine should cost no CPU."""


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Returns whether `ready` became true within `timeout_s` seconds in which this process had its turns."""
    waited, before = 0.0, time.perf_counter()
    while True:
        if ready():
            return True
        now = time.perf_counter()
        waited += min(now - before, MOST_TURN_S)
        before = now
        if waited < SPIN_S:
            continue
        if waited > timeout_s:
            return ready()
        if waited < YIELD_S:
            time.sleep(0)
        else:
            time.sleep(_SLEEP_S if waited < _LONG_S else _LONG_SLEEP_S)
