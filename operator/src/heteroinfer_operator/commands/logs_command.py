"""`heteroinfer logs`: what the ranks of a resource printed, the culprit's first."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.printable import printable
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import current_namespace, read_resources
from heteroinfer_operator.fleet.story import PodStory, build_stories, epochs, tell_failure, tell_group
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import ApiError, ApiServer, Query, load_configuration
from heteroinfer_operator.kube.trim import pod_view
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile.reading import pods_by_group, with_complete_labels
from heteroinfer_operator.stored_fields import UnreadableError

_TAIL_LINES: Final = 50
_TAB: Final = "\t"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer logs`."""
    parser.add_argument("name", metavar="NAME", help="a HeteroInference")
    parser.add_argument("-n", "--namespace", metavar="NS", help="default: the kubeconfig's current one")
    parser.add_argument("--group", type=int, metavar="N", help="one group; default: all")
    parser.add_argument(
        "--previous", action="store_true", help="why earlier epochs ended, and what is left of their pods"
    )
    parser.add_argument(
        "--tail",
        type=_lines,
        default=_TAIL_LINES,
        metavar="LINES",
        help=f"of each pod; default {_TAIL_LINES}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the logs; returns 0.

    Raises:
        HeteroInferError: there is no such resource or group, or the user may not read pods.
    """
    asyncio.run(_print_logs(arguments))
    return 0


def _lines(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of lines, 1 or more")
    return int(text)


async def _print_logs(arguments: argparse.Namespace) -> None:
    namespace = arguments.namespace or await current_namespace()
    server = ApiServer(await load_configuration())
    try:
        (resource,) = await read_resources(server, namespace, arguments.name)
        groups = _chosen(resource.status.groups, arguments.group, resource.key)
        by_group = pods_by_group(await _read_pods(server, resource.key))
        for group in groups:
            own = by_group.get(group.index, ())
            if arguments.previous:
                await _tell_previous(server, namespace, group, own, arguments.tail)
            else:
                await _tell_current(server, namespace, group, own, arguments.tail)
    finally:
        await server.close()


def _chosen(groups: Sequence[GroupStatus], index: int | None, key: ResourceKey) -> list[GroupStatus]:
    chosen = [group for group in groups if index is None or group.index == index]
    if not chosen:
        have = ", ".join(str(group.index) for group in groups) or "none yet; `kubectl describe` says why"
        which = "a group" if index is None else f"group {index}"
        raise HeteroInferError(f"{key} has not {which}; its groups: {have}", reason="NoGroup")
    return chosen


async def _read_pods(server: ApiServer, key: ResourceKey) -> tuple[PodView, ...]:
    selector = f"{names.LABEL_RESOURCE}={key.name},{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"
    listed = await server.get(POD.path(key.namespace), {"labelSelector": selector})
    found = []
    for item in listed["items"]:
        try:
            found.append(pod_view(item))
        except UnreadableError as error:
            _say(f"a pod is left out, since it cannot be read ({error.message})")
    return with_complete_labels(found, Owner(key=key, uid=""))


async def _tell_current(
    server: ApiServer, namespace: str, group: GroupStatus, pods: Sequence[PodView], tail: int
) -> None:
    _say(f"==> {tell_group(group)}")
    if group.failures:
        _say(f"last failure: {tell_failure(group.failures[-1])}")
    known = epochs(pods)
    if not known:
        _say("it has no pods now" + (": what is left of the last ones is above" if group.failures else ""))
        return
    for story in build_stories(group, pods, known[-1]):
        await _tell_pod(server, namespace, story, tail)


async def _tell_previous(
    server: ApiServer, namespace: str, group: GroupStatus, pods: Sequence[PodView], tail: int
) -> None:
    _say(f"==> {tell_group(group)}")
    if not group.failures:
        _say("no epoch of it has failed")
    for failure in reversed(group.failures):
        _say(tell_failure(failure))
    left = [epoch for epoch in epochs(pods) if epoch < group.epoch]
    if group.failures and not left:
        _say(
            "their pods and logs are gone: pods are deleted before the next epoch starts; "
            "the lines above are what is kept (status.groups[].failures)"
        )
    for epoch in reversed(left):
        for story in build_stories(group, pods, epoch):
            await _tell_pod(server, namespace, story, tail)


async def _tell_pod(server: ApiServer, namespace: str, story: PodStory, tail: int) -> None:
    mark = " (ended the epoch)" if story.culprit else ""
    _say(f"--> {story.title}{mark}")
    if story.ended:
        _say(story.ended)
    try:
        query: Query = {"container": names.CONTAINER_WORKER, "tailLines": tail}
        text = await server.get_text(POD.path(namespace, story.name, "log"), query)
    except ApiError as error:
        _say(f"no log: {error.message}")
        return
    for line in text.splitlines():
        _say(f"[{story.prefix}] {line}")


def _say(line: str) -> None:
    """Prints one line. Pods, leaders and the status can hold any text, terminal sequences too."""
    sys.stdout.write(f"{printable(line, keep=_TAB)}\n")
