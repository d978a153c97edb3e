"""Checks that each of many random resources is refused with a message, or becomes valid objects.

    python -m tests.integration.specs [--count 10000] [--seed NUMBER]

A real API server judges the objects. Prints the progress, and one line with the result. If there are
findings, or after an interruption, it prints the first findings and exits 1.
"""

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Sequence

from tests.cluster.progress import say
from tests.integration.specs.checking import Result, check_specs, start_cluster

_SAY_EVERY_S = 10.0
_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks. Returns the exit code: 0, or 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.specs", description=__doc__)
    parser.add_argument(
        "--count", type=int, default=10_000, help="number of resources (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="seed of an earlier run, to repeat it"
    )
    chosen = parser.parse_args(arguments)
    say(f"seed {chosen.seed}")
    started = reported_at = time.monotonic()
    latest = Result()
    # the cluster ends with this process, and the findings so far are reported
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.default_int_handler)

    def reported(result: Result) -> None:
        nonlocal reported_at, latest
        latest = result
        if time.monotonic() - reported_at > _SAY_EVERY_S:
            reported_at = time.monotonic()
            say(f"{reported_at - started:5.0f} s: {result.line}")

    interrupted = False
    try:
        with start_cluster() as cluster:
            check_specs(cluster, chosen.count, number=chosen.seed, reported=reported)
    except KeyboardInterrupt:
        interrupted = True
    for finding in latest.findings[:_SHOWN]:
        print(f"{finding}\n", file=sys.stderr)
    print(f"{latest.line}; seed {chosen.seed}, {time.monotonic() - started:.0f} s")
    return 1 if latest.findings or interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
