"""How a measuring process reports what it measured: a line of JSON each."""

import json
import sys
from typing import Any, Final

BEGUN: Final = "begun"


def rounded(value: float) -> float:
    """Returns a rate or time with four digits: what is measured is worth no more."""
    return float(f"{value:.4g}")


def report(kind: str, **values: Any) -> None:
    """Writes one result."""
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


def report_begun(what: str) -> None:
    """Writes that a measurement begins which may end this process."""
    report(BEGUN, what=what)


def report_skipped(what: str, error: BaseException) -> None:
    """Writes that something could not be measured, with the first line of why."""
    lines = str(error).strip().splitlines() or [""]
    report("skipped", what=what, why=f"{type(error).__name__}: {lines[0]}")
