"""Nodes and pods as kubectl prints them, to what is free."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube import trim
from heteroinfer_operator.nodes.demand import total
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.planning import build_free_nodes
from heteroinfer_operator.stored_fields import UnreadableError

_JSON: Final = re.compile(r'\s*\{\s*["}]')
"""How a JSON object begins; in YAML `{kind: List}` does not."""
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, ten times as fast, where PyYAML was built with it."""
_HOW = "Create the file with `kubectl get nodes,pods -A -o json`"


def load_free_nodes(file: str) -> list[FreeNode]:
    """Returns what is free on the nodes of a file.

    Args:
        file: its path; - for stdin.

    Raises:
        HeteroInferError: it cannot be read, or holds no nodes.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        items = _items(_parse(text))
        nodes = [trim.node_view(item) for item in items if item.get("kind") == "Node"]
        pods = [trim.pod_requests(item) for item in items if item.get("kind") == "Pod"]
    except OSError as error:
        raise HeteroInferError(f"--nodes: {file}: {error.strerror}", reason="NodesNotReadable") from error
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, UnreadableError) as error:
        raise HeteroInferError(
            f"--nodes: {file} is not a list of Kubernetes objects{_where(error)}. {_HOW}",
            reason="NodesNotReadable",
        ) from error
    if not nodes:
        raise HeteroInferError(f"--nodes: {file} contains no nodes. {_HOW}", reason="NodesNotReadable")
    requests: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    for pod in pods:
        if pod is not None:
            requests[pod.node].append(pod.requests)
    placed = [replace(node, requested=total(requests[node.name])) for node in nodes]
    return build_free_nodes(
        placed, [pod.promise.demand for pod in pods if pod is not None and pod.promise is not None]
    )


def _parse(text: str) -> Any:
    """Returns the objects of a JSON or YAML text; raises ValueError or yaml.YAMLError.

    YAML's reader takes JSON too, but 300 nodes with 4,500 pods (33 MB) took it 54 s and 1.1 GB.
    """
    if _JSON.match(text):
        return json.loads(text)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - both are safe loaders


def _where(error: Exception) -> str:
    """Returns line and problem of a file that is no YAML or JSON, in words, or ""."""
    if isinstance(error, json.JSONDecodeError):
        return f" (line {error.lineno}: {error.msg})"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    return f" (line {mark.line + 1}: {problem})" if mark is not None and problem else ""


def _items(stored: Any) -> list[Mapping[str, Any]]:
    if stored.get("kind") == "Node":
        return [stored]
    kind = str(stored["kind"]).removesuffix("List")
    return [{"kind": kind, **item} for item in stored["items"]]
