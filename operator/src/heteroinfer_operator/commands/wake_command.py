"""`heteroinfer wake`: wakes the sleeping groups of a resource."""

import argparse
import asyncio
import sys
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.printable import printable
from heteroinfer_operator.api import GroupPhase
from heteroinfer_operator.commands.cluster_access import (
    add_cluster_options,
    add_namespace_option,
    open_cluster,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import read_resources
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import FORBIDDEN, ApiError
from heteroinfer_operator.manifests.identity import Owner, parse_worker_name

PATH_WAKE: Final = "/wake_up"
"""Path in vLLM's development mode (`vllm/entrypoints/serve/dev/sleep/api_router.py@v0.32.0`)."""
WAKE_TIMEOUT_S: Final = 300.0
"""Timeout of a wake request. The group may have to copy its weights back to GPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer wake`."""
    parser.add_argument("name", metavar="NAME", help="name of a HeteroInference")
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="wake only the group with this index; default: all sleeping groups",
    )
    add_namespace_option(parser)
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Wakes the groups and prints a line for each; returns 0.

    Raises:
        HeteroInferError: there is no such resource, or a leader did not wake its group.
    """
    asyncio.run(_wake_groups(arguments))
    return 0


async def _wake_groups(arguments: argparse.Namespace) -> None:
    """Wakes the chosen groups that sleep, by a request to the API of each leader."""
    async with open_cluster(arguments) as cluster:
        (resource,) = await read_resources(cluster.server, cluster.namespace, arguments.name)
        name = f"{names.SINGULAR}/{resource.key.name}"
        owner = Owner(key=resource.key, uid=str(resource.manifest["metadata"]["uid"]))
        chosen = [group for group in resource.status.groups if arguments.group in (None, group.index)]
        asleep = [
            group
            for group in chosen
            if group.phase is GroupPhase.SLEEPING
            and group.members
            # Skip names that are no pods of this resource: another writer of the status must not choose the
            # pod to which the user's request goes.
            and parse_worker_name(owner, group.members[0].pod) is not None
        ]
        if not asleep:
            sys.stdout.write(printable(f"{name}: no group is asleep") + "\n")
        for group in asleep:
            leader = f"{group.members[0].pod}:{resource.api_port}"
            try:
                await cluster.server.post_text(
                    POD.path(cluster.namespace, leader, f"proxy{PATH_WAKE}"), timeout_s=WAKE_TIMEOUT_S
                )
            except ApiError as error:
                fix = (
                    "Ask an administrator for the right to create pods/proxy"
                    if error.status == FORBIDDEN
                    else f"Read the logs of pod {group.members[0].pod}, and try again"
                )
                raise HeteroInferError(f"group {group.index}: {error.message}. {fix}") from error
            sys.stdout.write(printable(f"{name} group {group.index} woken") + "\n")
