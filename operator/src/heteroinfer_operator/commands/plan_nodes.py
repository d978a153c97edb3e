"""Reads nodes, pods and priority classes from kubectl's output, and counts free capacity."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube import trim
from heteroinfer_operator.nodes.demand import sum_requests
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.nodes.priorities import PriorityClassView
from heteroinfer_operator.planning import build_free_nodes
from heteroinfer_operator.stored_fields import UnreadableError

_JSON: Final = re.compile(r'\s*\{\s*["}]')
"""Beginning of a JSON object; YAML such as `{kind: List}` does not match."""
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml if PyYAML was built with libyaml. It is ten times as fast as PyYAML's own loader."""
_NOT_OBJECTS: Final = (
    yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError, UnreadableError
)  # fmt: skip
"""Exceptions that a file without Kubernetes objects can cause."""
HOW_TO_CREATE: Final = "Create the file with `kubectl get nodes,pods,priorityclasses -A -o json`"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenNodes:
    """The nodes and priority classes of a file.

    Attributes:
        priority_classes: priority classes of the cluster; None if the file has none (every cluster has some).
    """

    free_nodes: list[FreeNode]
    priority_classes: tuple[PriorityClassView, ...] | None


def load_nodes(file: str) -> GivenNodes:
    """Returns the free capacity of the nodes in a file.

    Args:
        file: path of the file; - reads stdin.

    Raises:
        HeteroInferError: the file cannot be read or holds no nodes.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        items = _list_items(_parse(text))
        nodes = [trim.node_view(item) for item in items if item.get("kind") == "Node"]
        pods = [trim.pod_requests(item) for item in items if item.get("kind") == "Pod"]
        classes = [PriorityClassView.of(item) for item in items if item.get("kind") == "PriorityClass"]
    except OSError as error:
        raise HeteroInferError(
            f"--nodes: cannot read {file} ({error.strerror}). {HOW_TO_CREATE}", reason="NodesNotReadable"
        ) from error
    except _NOT_OBJECTS as error:
        raise HeteroInferError(
            f"--nodes: {file} is not a list of Kubernetes objects{_error_position(error)}. {HOW_TO_CREATE}",
            reason="NodesNotReadable",
        ) from error
    if not nodes:
        raise HeteroInferError(
            f"--nodes: {file} contains no nodes. {HOW_TO_CREATE}", reason="NodesNotReadable"
        )
    active_pods = [pod for pod in pods if pod is not None]  # None is a pod that has ended
    pods_by_node: defaultdict[str, list[trim.PodRequests]] = defaultdict(list)
    for pod in active_pods:
        pods_by_node[pod.node].append(pod)
    loaded_nodes = [_with_requests(node, pods_by_node[node.name]) for node in nodes]
    reserved = [pod.reservation.demand for pod in active_pods if pod.reservation is not None]
    return GivenNodes(
        free_nodes=build_free_nodes(loaded_nodes, reserved), priority_classes=tuple(classes) or None
    )


def _with_requests(node: NodeView, pods: Iterable[trim.PodRequests]) -> NodeView:
    """Returns the node with the total requests of its pods, and with the total for each priority."""
    requests: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
    for pod in pods:
        requests[pod.priority].append(pod.requests)
    by_priority = {priority: sum_requests(of_pods) for priority, of_pods in requests.items()}
    return replace(node, requested=sum_requests(by_priority.values()), by_priority=by_priority)


def _parse(text: str) -> Any:
    """Returns the objects of a JSON or YAML text; raises ValueError or yaml.YAMLError.

    The YAML reader also accepts JSON, but for 300 nodes with 4,500 pods (33 MB) it took 54 s and 1.1 GB.
    """
    if _JSON.match(text):
        return json.loads(text)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - both are safe loaders


def _error_position(error: Exception) -> str:
    """Returns the line and the reason of a YAML or JSON error, or "" if they are unknown."""
    if isinstance(error, json.JSONDecodeError):
        return f" (line {error.lineno}: {error.msg})"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    return f" (line {mark.line + 1}: {problem})" if mark is not None and problem else ""


def _list_items(stored: Any) -> list[Mapping[str, Any]]:
    """Returns the objects of a list, or a list with the only object if the text is a single Node.

    Objects of a typed list, such as a NodeList, have no kind. They get the kind of the list.
    """
    if stored.get("kind") == "Node":
        return [stored]
    kind = str(stored["kind"]).removesuffix("List")
    return [{"kind": kind, **item} for item in stored["items"]]
