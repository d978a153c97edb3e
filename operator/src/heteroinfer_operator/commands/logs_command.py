"""`heteroinfer logs`: prints the logs of a resource's pods, starting with the pod that ended the epoch."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.printable import printable
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.commands.cluster_access import (
    add_cluster_options,
    add_namespace_option,
    open_cluster,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import read_resources
from heteroinfer_operator.fleet.story import PodStory, build_stories, epochs, failure_text, group_text
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import ApiError, ApiServer, Query
from heteroinfer_operator.kube.trim import pod_view
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile.reading import pods_by_group, with_complete_labels
from heteroinfer_operator.stored_fields import UnreadableError

_TAIL_LINES: Final = 50
_TAB: Final = "\t"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer logs`."""
    parser.add_argument("name", metavar="NAME", help="name of a HeteroInference")
    add_namespace_option(parser)
    parser.add_argument("--group", type=int, metavar="N", help="index of one group; default: all groups")
    parser.add_argument(
        "--previous",
        action="store_true",
        help="show why earlier epochs ended, and the logs of their pods that still exist",
    )
    parser.add_argument(
        "--tail",
        type=_line_count,
        default=_TAIL_LINES,
        metavar="LINES",
        help=f"lines of each pod; default: {_TAIL_LINES}",
    )
    add_cluster_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the logs; returns 0.

    Raises:
        HeteroInferError: the resource or group does not exist, or the user lacks the right to read pods.
    """
    asyncio.run(_print_logs(arguments))
    return 0


def _line_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of lines, 1 or more (got {text!r})")
    return int(text)


async def _print_logs(arguments: argparse.Namespace) -> None:
    """Prints the logs of the chosen groups' pods: of the newest epoch, or of earlier epochs (--previous)."""
    async with open_cluster(arguments) as cluster:
        server, namespace = cluster.server, cluster.namespace
        (resource,) = await read_resources(server, namespace, arguments.name)
        groups = _choose_groups(resource.status.groups, arguments.group, resource.key)
        by_group = pods_by_group(await _read_pods(server, resource.key))
        for group in groups:
            pods = by_group.get(group.index, ())
            if arguments.previous:
                await _print_previous(server, namespace, group, pods, arguments.tail)
            else:
                await _print_current(server, namespace, group, pods, arguments.tail)


def _choose_groups(groups: Sequence[GroupStatus], index: int | None, key: ResourceKey) -> list[GroupStatus]:
    """Returns the group with the index, or all groups if it is None.

    Raises:
        HeteroInferError: there is no such group.
    """
    chosen = [group for group in groups if index is None or group.index == index]
    if chosen:
        return chosen
    if groups:
        indexes = ", ".join(str(group.index) for group in groups)
        raise HeteroInferError(
            f"{key} has no group {index}. Choose one of its groups: {indexes}", reason="NoGroup"
        )
    raise HeteroInferError(
        f"{key} has no groups yet. Run `heteroinfer status {key.name} -n {key.namespace}` to see why",
        reason="NoGroup",
    )


async def _read_pods(server: ApiServer, key: ResourceKey) -> tuple[PodView, ...]:
    """Reads the worker pods of a resource. Prints a line for each pod that cannot be read."""
    selector = f"{names.LABEL_RESOURCE}={key.name},{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"
    listed = await server.get(POD.path(key.namespace), {"labelSelector": selector})
    pods = []
    for item in listed["items"]:
        try:
            pods.append(pod_view(item))
        except UnreadableError as error:
            _print_line(f"skipping a pod that cannot be read: {error.message}")
    return with_complete_labels(pods, Owner(key=key, uid=""))


async def _print_current(
    server: ApiServer, namespace: str, group: GroupStatus, pods: Sequence[PodView], tail: int
) -> None:
    """Prints a group's state, its last failure, and the logs of the newest epoch that has pods."""
    _print_line(f"==> {group_text(group)}")
    if group.failures:
        _print_line(f"last failure: {failure_text(group.failures[-1])}")
    epochs_with_pods = epochs(pods)
    if not epochs_with_pods:
        hint = ". The line above reports why its last pods ended" if group.failures else ""
        _print_line(f"the group has no pods now{hint}")
        return
    for story in build_stories(group, pods, epochs_with_pods[-1]):
        await _print_pod_log(server, namespace, story, tail)


async def _print_previous(
    server: ApiServer, namespace: str, group: GroupStatus, pods: Sequence[PodView], tail: int
) -> None:
    """Prints the failures of a group, and the logs of earlier epochs' pods that still exist."""
    _print_line(f"==> {group_text(group)}")
    if not group.failures:
        _print_line(
            "the status has no failure of this group. A new revision (a change of the spec, or heteroinfer "
            f"restart) clears earlier failures. Look for their events: kubectl get events -n {namespace}"
        )
    for failure in reversed(group.failures):
        _print_line(failure_text(failure))
    earlier_epochs = [epoch for epoch in epochs(pods) if epoch < group.epoch]
    if group.failures and not earlier_epochs:
        _print_line(
            "the pods and logs of these epochs no longer exist, because the operator deletes the pods of an "
            "epoch before the next epoch starts. The lines above come from status.groups[].failures"
        )
    for epoch in reversed(earlier_epochs):
        for story in build_stories(group, pods, epoch):
            await _print_pod_log(server, namespace, story, tail)


async def _print_pod_log(server: ApiServer, namespace: str, story: PodStory, tail: int) -> None:
    """Prints a pod's description and the end of its log."""
    mark = " (ended the epoch)" if story.culprit else ""
    _print_line(f"--> {story.title}{mark}")
    if story.ended:
        _print_line(story.ended)
    try:
        query: Query = {"container": names.CONTAINER_WORKER, "tailLines": tail}
        text = await server.get_text(POD.path(namespace, story.name, "log"), query)
    except ApiError as error:
        _print_line(f"no log: {error.message}")
        return
    for line in text.splitlines():
        _print_line(f"[{story.prefix}] {line}")


def _print_line(line: str) -> None:
    """Prints one line without terminal sequences, which text of pods and the status can contain."""
    sys.stdout.write(f"{printable(line, keep=_TAB)}\n")
