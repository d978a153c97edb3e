"""`heteroinfer top`: shows resources, groups and ranks of a cluster as a live table."""

import argparse
import asyncio
from typing import Final

from rich.console import Console
from rich.live import Live as LiveTable

from heteroinfer_operator.commands.cluster_access import (
    add_cluster_options,
    add_namespace_option,
    add_selector_option,
    open_cluster,
)
from heteroinfer_operator.commands.structured_output import add_output_option, write_value
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import LeaderReader, read_resources
from heteroinfer_operator.fleet.lines import ResourceLine, build_line
from heteroinfer_operator.fleet.screen import build_screen
from heteroinfer_operator.kube.server import ApiError

INTERVAL_S: Final = 2.0
_WIDTH_OF_FILES: Final = 2000
"""Columns if the output is not a terminal: rich then breaks no line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer top`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one HeteroInference; default: all")
    namespace_options = parser.add_mutually_exclusive_group()
    add_namespace_option(namespace_options)
    namespace_options.add_argument(
        "-A", "--all-namespaces", action="store_true", help="show the resources of all namespaces"
    )
    add_selector_option(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print once and exit (the default if the output is not a terminal)",
    )
    add_output_option(parser, "table", note="json and yaml print once")
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows the table until Ctrl-C, or once; returns 0.

    Raises:
        HeteroInferError: the API server does not answer, or the resource does not exist.
    """
    for option in ("all_namespaces", "selector"):
        if arguments.name and getattr(arguments, option):
            raise HeteroInferError(
                f"NAME and --{option.replace('_', '-')} cannot be combined. Remove one of the two",
                reason="BadArguments",
            )
    asyncio.run(_show(arguments))
    return 0


async def _show(arguments: argparse.Namespace) -> None:
    """Prints the resources once, or shows a live table until Ctrl-C."""
    async with open_cluster(arguments) as cluster:
        namespace = None if arguments.all_namespaces else cluster.namespace
        leaders = LeaderReader(cluster.server)

        async def read_lines() -> list[ResourceLine]:
            """Reads the resources and the reports of their leaders. Returns a line for each resource."""
            resources = await read_resources(
                cluster.server, namespace, arguments.name, selector=arguments.selector
            )
            live = await leaders.read(resources)
            return [
                build_line(resource.key, resource.status, live.get(resource.key, {}))
                for resource in resources
            ]

        if arguments.output != "table":
            value = {"resources": [line.dump() for line in await read_lines()], "note": leaders.problem}
            write_value(value, arguments.output)
            return
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH_OF_FILES
        if arguments.once or not console.is_terminal:
            console.print(build_screen(await read_lines(), _source_note(leaders)))
            return
        with LiveTable(console=console, auto_refresh=False, screen=True) as table:
            lines: list[ResourceLine] = []
            while True:
                try:
                    lines, note = await read_lines(), _source_note(leaders)
                except ApiError as error:  # the API server may be restarting: keep the last values
                    note = f"not up to date: {error.message}"
                table.update(build_screen(lines, note), refresh=True)
                await asyncio.sleep(INTERVAL_S)


def _source_note(leaders: LeaderReader) -> str:
    """Returns a note if some values are old, or ""."""
    if not leaders.problem:
        return ""
    return f"some values come from the stored status and may be up to a minute old, because {leaders.problem}"
