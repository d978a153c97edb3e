"""`heteroinfer version`: prints the versions of this client, of the operators and of the CRD."""

import argparse
import asyncio
import sys
from dataclasses import dataclass
from typing import Any

from heteroinfer_contract.printable import printable
from heteroinfer_operator.commands.cluster_access import add_cluster_options, open_cluster
from heteroinfer_operator.commands.structured_output import add_output_option, write_value
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.installations import (
    InstalledCrd,
    InstalledOperator,
    read_crd,
    read_operators,
    skew_warnings,
)
from heteroinfer_operator.kube.server import FORBIDDEN, ApiError, ApiServer
from heteroinfer_operator.version import own_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer version`."""
    parser.add_argument(
        "--client", action="store_true", help="print only the client's version; needs no cluster"
    )
    add_output_option(parser, "text")
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the versions, and on stderr a warning for each pair that differs; returns 0.

    Raises:
        HeteroInferError: the API server does not answer.
    """
    asyncio.run(_print_versions(arguments))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Installation:
    """The installed operators and CRD, as far as the user may read them."""

    operators: tuple[InstalledOperator, ...]
    crd: InstalledCrd | None
    problems: tuple[str, ...]
    """A message for each part that could not be read."""


async def _print_versions(arguments: argparse.Namespace) -> None:
    """Prints the versions of client, operators and CRD, and a warning for each difference.

    If a part of the installation cannot be read, the warnings are about the unreadable parts, and the
    versions are not compared.
    """
    client = own_version()
    as_text = arguments.output == "text"
    if as_text:
        _print_line(f"client    {client}")
    if arguments.client:
        if not as_text:
            write_value({"client": client}, arguments.output)
        return
    async with open_cluster(arguments) as cluster:
        installation = await _read_installation(cluster.server)
    warnings = installation.problems or skew_warnings(client, installation.operators, installation.crd)
    if as_text:
        _print_installation(installation)
    else:
        value: dict[str, Any] = {
            "client": client,
            "operators": [operator.dump() for operator in installation.operators],
            "crd": installation.crd and installation.crd.dump(),
            "warnings": list(warnings),
        }
        write_value(value, arguments.output)
    for warning in warnings:
        sys.stderr.write(f"warning: {printable(warning)}\n")


async def _read_installation(server: ApiServer) -> _Installation:
    """Reads operators and CRD. A part that the user may not read becomes a problem."""
    problems: list[str] = []
    operators: tuple[InstalledOperator, ...] = ()
    crd: InstalledCrd | None = None
    try:
        operators = await read_operators(server)
    except ApiError as error:
        problems.append(_describe_unreadable("operators", error))
    try:
        crd = await read_crd(server)
    except ApiError as error:
        problems.append(_describe_unreadable("CRD", error))
    return _Installation(operators=operators, crd=crd, problems=tuple(problems))


def _print_installation(installation: _Installation) -> None:
    """Prints the version of each operator, and of the CRD."""
    for operator in installation.operators:
        pods = f"{operator.ready} of {operator.replicas} ready"
        _print_line(f"operator  {operator.version}  {operator.name}, {pods}")
    if not installation.operators and not installation.problems:
        _print_line("operator  none found")
    if installation.crd is not None:
        _print_line(f"CRD       {installation.crd}")


def _describe_unreadable(name: str, error: ApiError) -> str:
    """Describes a part that the user may not read; raises HeteroInferError for any other error."""
    if error.status != FORBIDDEN:
        raise HeteroInferError(error.message, reason=error.reason) from error
    return f"{name}: {error.message}. Ask an administrator to run `heteroinfer version`"


def _print_line(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
