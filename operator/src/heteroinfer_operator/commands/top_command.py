"""`heteroinfer top`: resources, groups and ranks of a cluster, as a table that is kept up to date."""

import argparse
import asyncio
import json
import sys
from typing import Final

from rich.console import Console
from rich.live import Live as LiveTable

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import LeaderReader, current_namespace, read_resources
from heteroinfer_operator.fleet.lines import ResourceLine, build_line
from heteroinfer_operator.fleet.screen import build_screen
from heteroinfer_operator.kube.server import ApiError, ApiServer, load_configuration

INTERVAL_S: Final = 2.0
_WIDTH_OF_FILES: Final = 2000
"""Columns where the output is no terminal: no line is ever broken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer top`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one HeteroInference; default: all")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--namespace", metavar="NS", help="default: the kubeconfig's current one")
    where.add_argument("-A", "--all-namespaces", action="store_true")
    parser.add_argument(
        "--once", action="store_true", help="print once; so it does where the output is no terminal"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="json: once")


def run(arguments: argparse.Namespace) -> int:
    """Shows the table until Ctrl-C, or once; returns 0.

    Raises:
        HeteroInferError: the API server cannot be asked, or there is no such resource.
    """
    if arguments.name and arguments.all_namespaces:
        message = f"got the name {arguments.name} with -A: a name is of one namespace, give -n"
        raise HeteroInferError(message, reason="BadArguments")
    asyncio.run(_show(arguments))
    return 0


async def _show(arguments: argparse.Namespace) -> None:
    namespace = None if arguments.all_namespaces else arguments.namespace or await current_namespace()
    server = ApiServer(await load_configuration())
    leaders = LeaderReader(server)

    async def look() -> list[ResourceLine]:
        resources = await read_resources(server, namespace, arguments.name)
        live = await leaders.read(resources)
        return [build_line(each.key, each.status, live.get(each.key, {})) for each in resources]

    try:
        if arguments.output == "json":
            value = {"resources": [line.dump() for line in await look()], "note": leaders.problem}
            sys.stdout.write(json.dumps(value, indent=2) + "\n")
            return
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH_OF_FILES
        if arguments.once or not console.is_terminal:
            console.print(build_screen(await look(), _note(leaders)))
            return
        with LiveTable(console=console, auto_refresh=False, screen=True) as table:
            lines: list[ResourceLine] = []
            while True:
                try:
                    lines, note = await look(), _note(leaders)
                except ApiError as error:  # it may be starting again: what was seen last stays
                    note = f"not up to date: {error.message}"
                table.update(build_screen(lines, note), refresh=True)
                await asyncio.sleep(INTERVAL_S)
    finally:
        await server.close()


def _note(leaders: LeaderReader) -> str:
    if not leaders.problem:
        return ""
    return f"some values are from the status, a minute old at most: {leaders.problem}"
