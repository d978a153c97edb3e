"""`heteroinfer report`: writes a support bundle about one resource."""

import argparse
import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from heteroinfer_contract.printable import printable
from heteroinfer_operator.commands.cluster_access import (
    add_cluster_options,
    add_namespace_option,
    open_cluster,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import read_resources
from heteroinfer_operator.fleet.support_bundle import SupportBundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer report`."""
    parser.add_argument("name", metavar="NAME", help="name of a HeteroInference")
    add_namespace_option(parser)
    parser.add_argument(
        "-f",
        "--filename",
        type=Path,
        metavar="FILE",
        help="file to write; default: heteroinfer-NAMESPACE-NAME-TIME.tar.gz in the current folder",
    )
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the bundle and prints its path; returns 0.

    Raises:
        HeteroInferError: there is no such resource, or the file cannot be written.
    """
    asyncio.run(_write_report(arguments))
    return 0


async def _write_report(arguments: argparse.Namespace) -> None:
    """Gathers objects and logs of a resource, and writes them to an archive."""
    async with open_cluster(arguments) as cluster:
        (resource,) = await read_resources(cluster.server, cluster.namespace, arguments.name)
        bundle = SupportBundle(cluster.server, resource)
        await bundle.gather()
    key = resource.key
    folder = f"heteroinfer-{key.namespace}-{key.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    file = arguments.filename or Path(f"{folder}.tar.gz")
    try:
        # Logs can contain prompts: only the user may read the file. An existing file is not replaced.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            written.write(bundle.pack(folder))
    except OSError as error:
        raise HeteroInferError(
            f"--filename: cannot write {file} ({error.strerror}). Name another file", reason="NotWritten"
        ) from error
    for line in bundle.missing:
        sys.stderr.write(f"left out: {printable(line)}\n")
    sys.stdout.write(f"wrote {printable(str(file))}. Read the logs in this file before you send the file\n")
