"""Measures the operator with a thousand resources of four pods, on a real control plane and kwok nodes.

    python -m tests.scale [--resources 1000] [--idle-seconds 600] [--write FILE]

The program creates the resources at the same time, waits until every group serves, leaves the operator idle,
kills it and starts another one. It prints a table, and writes it to FILE. It exits 1 if a figure exceeds its
limit. Must be root.
"""

import argparse
import asyncio
import datetime
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.scale.measure import measure
from tests.scale.report import build_page, build_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if a figure exceeds its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument(
        "--resources", type=int, default=1000, help="resources of 4 pods (default: %(default)s)"
    )
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=600,
        help="seconds in which the operator must write nothing (default: %(default)s)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="new folder for the operators' logs")
    chosen = parser.parse_args(arguments)
    # in either case, the cluster and the operator end with this process
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        load = os.getloadavg()[2]
        logs = chosen.log or Path(scratch) / "log"
        figures = asyncio.run(measure(chosen.resources, chosen.idle_seconds, logs))
    print("\n".join(build_table(figures)))
    if chosen.write:
        command = f"make scale SCALE='--resources {chosen.resources} --idle-seconds {chosen.idle_seconds:g}'"
        chosen.write.write_text(
            build_page(figures, command, datetime.datetime.now(datetime.UTC).date(), load)
        )
    return 0 if all(figure.met for figure in figures.limited) else 1


if __name__ == "__main__":
    sys.exit(main())
