"""`heteroinfer check`: checks for administrators whether a cluster meets the needs of HeteroInfer."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Final

from heteroinfer_contract.printable import printable
from heteroinfer_operator.commands.cluster_access import add_cluster_options, open_cluster
from heteroinfer_operator.commands.structured_output import add_output_option, write_value
from heteroinfer_operator.fleet.cluster_checks import CheckResult, CheckState, run_checks
from heteroinfer_operator.kube.server import ApiError
from heteroinfer_operator.quantity import parse_duration_s

EXIT_FAILED: Final = 1
POLL_S: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer check`."""
    parser.add_argument(
        "--wait",
        type=_parse_wait,
        default=0.0,
        metavar="TIME",
        help="repeat the checks until none fails, for at most this time, such as 2m",
    )
    add_output_option(parser, "text")
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the result of each check; returns EXIT_FAILED if a check failed.

    Raises:
        HeteroInferError: the API server does not answer.
    """
    results = asyncio.run(_run_checks(arguments))
    failed = [result for result in results if result.state is CheckState.FAILED]
    if arguments.output == "text":
        _print_table(results)
    else:
        write_value({"ok": not failed, "checks": [result.dump() for result in results]}, arguments.output)
    return EXIT_FAILED if failed else 0


async def _run_checks(arguments: argparse.Namespace) -> Sequence[CheckResult]:
    """Runs the checks. With --wait, repeats them until none fails or the time is over.

    Raises:
        ApiError: the API server still does not answer when the time is over.
    """
    deadline = time.monotonic() + arguments.wait
    async with open_cluster(arguments) as cluster:
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                results = await run_checks(cluster.server)
            except ApiError:
                if remaining_s <= 0:
                    raise
            else:
                none_failed = all(result.state is not CheckState.FAILED for result in results)
                if none_failed or remaining_s <= 0:
                    return results
            await asyncio.sleep(min(POLL_S, remaining_s))


def _print_table(results: Sequence[CheckResult]) -> None:
    """Prints a line for each check. If a check failed, the last line asks the user to solve the problems."""
    width = max(len(result.name) for result in results)
    for result in results:
        state = result.state.value.upper() if result.state is CheckState.FAILED else result.state.value
        sys.stdout.write(printable(f"{state:<8} {result.name:<{width}}  {result.message}") + "\n")
    if any(result.state is CheckState.FAILED for result in results):
        sys.stdout.write("not ready. Solve each problem in a line with FAILED\n")


def _parse_wait(text: str) -> float:
    """Returns the seconds of a duration such as 2m."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a duration such as 2m or 90s (got {text!r})") from error
