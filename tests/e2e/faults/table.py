"""Writes the table of docs/contributor/faults.md from the matrix and the measurements of a run.

OUT=DIR python -m pytest tests/e2e/faults && python -m tests.e2e.faults.table DIR/faults.json
"""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.folders import REPOSITORY
from tests.e2e.faults.matrix import MATRIX, Blocked, Ends, Fault, GoesOn, Waits

PAGE = REPOSITORY / "docs/contributor/faults.md"
BEGIN, END = "<!-- the matrix -->", "<!-- end of the matrix -->"
HEADER = (
    "| fault | how | reaction | Ready=False | old pods gone | next epoch's pods | serves again |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured seconds of one row; None if the row has no such time.

    Attributes:
        ready_false_s: seconds from the fault until Ready was False.
        old_gone_s: seconds from the fault until the last old pod was gone.
        next_epoch_s: seconds from the end of the old pods until the last pod of the next epoch was
            created.
        ready_s: seconds from the fault until the next epoch served.
        said_s: seconds from the fault until the status reported it.
        well_s: seconds from the fault until the operator worked as before.
    """

    ready_false_s: float | None = None
    old_gone_s: float | None = None
    next_epoch_s: float | None = None
    ready_s: float | None = None
    said_s: float | None = None
    well_s: float | None = None

    def dump(self) -> dict[str, float | None]:
        """Returns the times with two decimals."""
        return {
            name: None if value is None else round(value, 2)
            for name, value in dataclasses.asdict(self).items()
        }


def build_table(measured: Mapping[str, Measured]) -> str:
    """Returns the table with a line for each row of the matrix. Rows without measurements have no times."""
    return "\n".join([HEADER, *(_line(fault, measured.get(fault.name, Measured())) for fault in MATRIX)])


def expectation(fault: Fault) -> str:
    """Describes the expected outcome of a fault."""
    match fault.outcome:
        case Ends(reason=reason, or_reason=or_reason, rank=rank, exit_code=exit_code, counted=counted):
            other = f" or `{or_reason}`" if or_reason else ""
            culprit = "" if rank is None else f", rank {rank}, exit code {exit_code}"
            return f"`{reason}`{other}{culprit}{'' if counted else '; not counted as a restart'}"
        case GoesOn(slowest_rank=slowest):
            named = f"; `slowestRank` names rank {slowest.strip()}" if slowest else ""
            return f"keeps serving, no pod changed{named}"
        case Blocked(condition=condition, status=status, reason=reason):
            return (
                f"`{condition}` {status}, `{reason}`; the group restarts by its own plan, suspends, resumes"
            )
        case Waits(condition=condition, reason=reason):
            return f"`{condition}` not True, `{reason}`; nothing restarts"


def _line(fault: Fault, took: Measured) -> str:
    seen = expectation(fault)
    if took.said_s is not None:
        seen += f" (in the status after {took.said_s:.1f} s)"
    times = (took.ready_false_s, took.old_gone_s, took.next_epoch_s, took.ready_s)
    cells = [fault.name, fault.how, seen, *("" if time is None else f"{time:.1f} s" for time in times)]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> None:
    """Writes the table of a run into the page. `arguments` has the run's faults.json."""
    (report,) = arguments
    stored = json.loads(Path(report).read_text())
    table = build_table({name: Measured(**times) for name, times in stored.items()})
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    page, count = between.subn(lambda _: f"{BEGIN}\n{table}\n{END}", PAGE.read_text())
    assert count == 1, f"{PAGE} has no {BEGIN}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
