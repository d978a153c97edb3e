"""`heteroinfer status`: shows one resource at a glance, with its problems and the next step."""

import argparse
import asyncio
import sys
from datetime import UTC, datetime

from heteroinfer_contract.printable import printable
from heteroinfer_operator.commands.cluster_access import (
    add_cluster_options,
    add_namespace_option,
    open_cluster,
)
from heteroinfer_operator.commands.structured_output import add_output_option, write_value
from heteroinfer_operator.fleet.fleet_reader import LeaderReader, read_resources
from heteroinfer_operator.fleet.lines import build_line
from heteroinfer_operator.fleet.summary import ResourceSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer status`."""
    parser.add_argument("name", metavar="NAME", help="name of a HeteroInference")
    add_namespace_option(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show all conditions, kept failures, the pods and times of ranks, and the notes of plans",
    )
    add_output_option(parser, "text")
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the status; returns 0.

    Raises:
        HeteroInferError: the API server does not answer, or there is no such resource.
    """
    asyncio.run(_print_status(arguments))
    return 0


async def _print_status(arguments: argparse.Namespace) -> None:
    """Prints the status of a resource, with live values of its ranks if leaders answer."""
    async with open_cluster(arguments) as cluster:
        (resource,) = await read_resources(cluster.server, cluster.namespace, arguments.name)
        leaders = LeaderReader(cluster.server)
        live = await leaders.read([resource])
    line = build_line(resource.key, resource.status, live.get(resource.key, {}))
    summary = ResourceSummary(manifest=resource.manifest, status=resource.status, line=line)
    if arguments.output != "text":
        write_value({**summary.dump(), "note": leaders.problem}, arguments.output)
        return
    lines = summary.render(datetime.now(UTC), verbose=arguments.verbose)
    if leaders.problem:
        lines += [
            "",
            (
                "Values of ranks come from the stored status and may be up to a minute old, "
                f"because {leaders.problem}"
            ),
        ]
    for each in lines:
        sys.stdout.write(f"{printable(each)}\n")
