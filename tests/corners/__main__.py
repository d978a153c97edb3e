"""Runs random resources on a real API server, each with a random fault. Must be root.

    python -m tests.corners [--count 1000] [--seed NUMBER] [--lanes 12]

The API server, controllers, scheduler and operator are real processes; kwok plays the kubelets. Each resource
runs until its state is stable: it serves, rests, or its conditions report why not. Then one fault of
`faults.py` happens to it. After that, it must reach this state again, or have used up its restarts.

The program checks these invariants all the time: conditions match the pods, and are of the present
generation; no two epochs of a group overlap; no two pods that ran have the same name; a deleted resource
disappears with all objects that it owned. It prints a table and the findings, and exits 1 if there are any.
"""

import argparse
import asyncio
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.progress import say
from tests.cluster.running_cluster import Cluster
from tests.corners.lives import Result, draw_bodies, run_lives
from tests.corners.site import connected, make_lanes, running_operator, site

_SAY_EVERY_S = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if there are findings."""
    options = _parser().parse_args(arguments)
    say(f"seed {options.seed}: {options.count} resources in {options.lanes} lanes")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cluster ends with this process
    with tempfile.TemporaryDirectory() as folder, site() as cluster:
        log = Path(folder) / "operator.log"
        began = time.monotonic()
        result = asyncio.run(_run(cluster, log, options))
        took_s = time.monotonic() - began
        text = log.read_text()
    result.findings += [f"the operator's log: {line}" for line in text.splitlines() if "defect" in line]
    if options.log:
        options.log.write_text(text)
    print(build_table(result))
    for finding in result.findings:
        print(f"FINDING: {finding}\n")
    lives = result.lives.total()
    print(f"{lives} lives, {result.refused} refused at apply, {len(result.findings)} findings; "
          f"seed {options.seed}, {took_s:.0f} s")  # fmt: skip
    return 1 if result.findings else 0


async def _run(cluster: Cluster, log: Path, options: argparse.Namespace) -> Result:
    """Runs all resources, and prints each finding and the progress."""
    bodies = draw_bodies(options.count, number=options.seed)
    reported_at = time.monotonic()
    told = 0

    def report(result: Result) -> None:
        nonlocal reported_at, told
        for finding in result.findings[told:]:
            say(f"FINDING: {finding}")
        told = len(result.findings)
        if time.monotonic() - reported_at > _SAY_EVERY_S:
            reported_at = time.monotonic()
            say(f"{result.lives.total()} lives, {result.refused} refused, {len(result.findings)} findings")

    async with connected(cluster) as server, running_operator(cluster, log):
        lanes = await make_lanes(cluster, server, options.lanes, number=options.seed)
        return await run_lives(server, lanes, bodies, reported=report)


def build_table(result: Result) -> str:
    """Returns a Markdown table of the outcomes by fault."""
    by_fault: dict[str, Counter[str]] = {}
    for (fault, before, after), count in sorted(result.lives.items()):
        words = before if before == after else f"{before} -> {after}"
        by_fault.setdefault(fault, Counter())[words] += count
    lines = ["| fault | lives | state before and after the fault |", "|---|---|---|"]
    for fault, counts in by_fault.items():
        text = ", ".join(f"{count} {words}" for words, count in counts.most_common())
        lines.append(f"| {fault} | {counts.total()} | {text} |")
    if result.noticed_s:
        median = statistics.median(result.noticed_s)
        lines.append(f"\nThe status reported the end of {len(result.noticed_s)} epochs after "
                     f"{median:.1f} s in the median, {max(result.noticed_s):.1f} s at most.")  # fmt: skip
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.corners", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of resources")
    parser.add_argument("--lanes", type=int, default=12, help="resources at the same time")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="seed of an earlier run, to repeat it"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="also write the operator's log here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
