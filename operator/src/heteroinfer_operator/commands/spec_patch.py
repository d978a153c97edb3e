"""Patches the spec of the resources that the user names, for restart, suspend and resume."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.printable import printable
from heteroinfer_operator.commands.cluster_access import (
    add_cluster_options,
    add_namespace_option,
    add_selector_option,
    open_cluster,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import StoredResource, read_resources
from heteroinfer_operator.kube.paths import HETERO_INFERENCE

Spec = Mapping[str, Any]
Change = Callable[[Spec], tuple[Spec, str]]
"""Takes a stored spec. Returns the fields to set (none if nothing changes), and a text for the user."""


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose resources."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="name of a HeteroInference")
    add_selector_option(parser)
    add_namespace_option(parser)
    add_cluster_options(parser)


async def patch_specs(arguments: argparse.Namespace, change: Change) -> None:
    """Applies a change to each chosen resource, and prints a line for each.

    Raises:
        HeteroInferError: no resource is chosen or found, or the user lacks the right to patch it.
    """
    if bool(arguments.names) == bool(arguments.selector):
        raise HeteroInferError(
            "the command needs either NAMEs of resources or -l LABELS. Give one of the two",
            reason="BadArguments",
        )
    async with open_cluster(arguments) as cluster:
        resources: list[StoredResource] = []
        # Read all resources before changing the first, so that a misspelt name changes nothing.
        for name in arguments.names or [None]:  # None: all resources with the labels
            resources += await read_resources(
                cluster.server, cluster.namespace, name, selector=arguments.selector
            )
        if not resources:
            raise HeteroInferError(
                f"namespace {cluster.namespace}: no {names.KIND} has the labels {arguments.selector}. "
                "Correct -l, or name another namespace with -n",
                reason="NotFound",
            )
        for resource in resources:
            fields, outcome = change(resource.manifest["spec"])
            if fields:
                path = HETERO_INFERENCE.path(resource.key.namespace, resource.key.name)
                await cluster.server.merge(path, {"spec": fields})
            sys.stdout.write(printable(f"{names.SINGULAR}/{resource.key.name} {outcome}") + "\n")
