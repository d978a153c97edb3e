"""Times of measurements, and how a measuring process reports them: a line of JSON each."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

BEGUN: Final = "begun"
ROUNDS: Final = 5
LEAST_S: Final = 0.05
"""Of one measurement: shorter rounds are repeated, so that a tick of the clock is nothing of it."""
MOST_S: Final = 1.5
"""After which no further round begins."""


def median_s(calls: Sequence[Callable[[], Any]], *, most_s: float = MOST_S) -> float:
    """Returns the median time of a round over all calls, in seconds; the first round counts for nothing."""
    _round(calls)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < ROUNDS or time.perf_counter() - start < LEAST_S:
        times.append(_round(calls))
        if time.perf_counter() - start > most_s:
            break
    return statistics.median(times)


def _round(calls: Sequence[Callable[[], Any]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def rounded(value: float) -> float:
    """Returns a rate or time with four digits: what is measured is worth no more."""
    return float(f"{value:.4g}")


def report(kind: str, **values: Any) -> None:
    """Writes one result.

    Args:
        kind: name of the list of `Calibration` that it goes into.
        values: of its fields.
    """
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


def report_begun(what: str) -> None:
    """Writes that a measurement begins which may end this process."""
    report(BEGUN, what=what)


def report_skipped(what: str, error: BaseException) -> None:
    """Writes that something could not be measured, with the first line of why."""
    lines = str(error).strip().splitlines() or [""]
    report("skipped", what=what, why=f"{type(error).__name__}: {lines[0]}")
