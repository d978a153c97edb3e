"""Times calls by the median of several rounds. Stdlib only."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

ROUNDS: Final = 5
MIN_S: Final = 0.05
"""Minimum time of a measurement. Short rounds are repeated for this time, so the clock is precise enough."""
MAX_S: Final = 1.5
"""Time after which no further round begins."""


def median_s(calls: Sequence[Callable[[], Any]], *, min_s: float = MIN_S, max_s: float = MAX_S) -> float:
    """Returns the median time of a round over all calls, in seconds. The warm-up round before does not count.

    Measures at least ROUNDS rounds, and for at least `min_s` seconds. But no round begins after `max_s`
    seconds.
    """
    _round(calls)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < ROUNDS or time.perf_counter() - start < min_s:
        times.append(_round(calls))
        if time.perf_counter() - start > max_s:
            break
    return statistics.median(times)


def _round(calls: Sequence[Callable[[], Any]]) -> float:
    """Returns the seconds that one round over all calls takes."""
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start
