"""Defines the group of two ranks on two real nodes to which the faults happen, and observes it."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from tests.cluster import cluster_cgroup, processes
from tests.cluster.joined_node import JoinedNode
from tests.cluster.node import NodeCluster, node_cgroup
from tests.e2e.faults.resources import WINDOW
from tests.e2e.serving import Resource
from tests.e2e.watching import Watch
from tests.worker_processes import is_rank

_PF_EXITING = 0x4
"""A process's flag (`include/linux/sched.h`)."""
CHILDREN = "services,configmaps,networkpolicies,poddisruptionbudgets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The expected answer of the model: transformers' tokens. `url` is the URL of the clients' Service."""

    url: str
    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One serving group, with its leader on the first node and its follower on the second.

    Attributes:
        pair: the resource.
        second: node of the follower.
        resources: watch of all resources of the namespace.
        pods: watch of the pair's worker pods.
        answer: expected answer to one prompt.
    """

    pair: Resource
    second: JoinedNode
    resources: Watch
    pods: Watch
    answer: Answer

    @property
    def cluster(self) -> NodeCluster:
        return self.pair.cluster

    @property
    def group(self) -> dict[str, Any]:
        """Returns the present status of the pair's first group."""
        return dict(self.pair.status["groups"][0])

    def wait_out_failures(self, *, counted: bool) -> None:
        """Waits until the window has no failure of this kind, so that the next failure has no back-off.

        Times in a status are whole seconds, so a failure 60.0 s after another may seem to be within a window
        of 60 s.
        """
        times = [each["time"] for each in self.group.get("failures", ()) if each["counted"] == counted]
        if times:
            left = datetime.fromisoformat(max(times)) + WINDOW + timedelta(seconds=1) - datetime.now(UTC)
            time.sleep(max(left.total_seconds(), 0.0))

    def pod(self, index: int) -> str:
        """Returns the name of a worker pod."""
        return str(self.pair.pods()[index]["metadata"]["name"])

    def place(self, timeout_s: float) -> None:
        """Moves the follower to the second node by a new start, if the last row left it on the first."""
        if self._follower_node() == self.second.name:
            return
        self.second.wait_ready()
        epoch = self.group["epoch"]
        self.change_spec(restartedAt=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        processes.wait_until(
            "a new start of the group", lambda: self.group["epoch"] > epoch, timeout_s=timeout_s
        )
        self.pair.wait_ready(timeout_s)
        assert self._follower_node() == self.second.name, "the scheduler prefers the second node"

    def change_spec(self, **fields: Any) -> float:
        """Changes fields of the pair's spec. Returns the Unix time before the change."""
        at, namespace = time.time(), self.pair.namespace
        patch = json.dumps({"spec": fields})
        self.cluster.kubectl("patch", "-n", namespace, "hinf", self.pair.name, "--type=merge", "-p", patch)
        return at

    def _follower_node(self) -> str:
        return str(self.pair.pods()[1]["spec"]["nodeName"])

    def check_answer(self) -> None:
        """Requests some tokens, and compares them."""
        asked = self.answer
        assert self.pair.complete(asked.prompt, len(asked.tokens), url=asked.url) == asked.tokens

    def pod_uids(self) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self.pair.pods()]

    def children(self) -> Counter[str]:
        """Returns the number of objects of each kind that the pair owns, without pods."""
        found = self.pair.get(CHILDREN, "-l", f"{names.LABEL_RESOURCE}={self.pair.name}")["items"]
        return Counter(item["kind"] for item in found)

    def process_epochs(self) -> set[int]:
        """Returns the epochs of all worker processes on both nodes, whatever Kubernetes knows of them."""
        groups = (node_cgroup(self.cluster.state), self.second.cgroup)
        found = (
            variables(pid).get(names.ENV_EPOCH) for group in groups for pid in cluster_cgroup.pids(group)
        )
        return {int(epoch) for epoch in found if epoch is not None}

    def rank_process(self, rank: int) -> int:
        """Returns the process of a rank that is alone in its pod, as this machine's process id.

        The pod's cgroup identifies it, because vLLM's title for the process overwrites its environment.
        """
        uid = self.pod_uids()[rank]
        groups = (node_cgroup(self.cluster.state), self.second.cgroup)
        pids = [pid for group in groups for pid in cluster_cgroup.pids(group)]
        return next(pid for pid in pids if is_rank(pid) and uid in Path(f"/proc/{pid}/cgroup").read_text())

    def events(self, resource: str) -> list[Mapping[str, Any]]:
        """Returns the operator's events about a resource."""
        items = self.pair.get("events.events.k8s.io")["items"]
        return [event for event in items if _regards(event, resource)]


def _regards(event: Mapping[str, Any], resource: str) -> bool:
    regarding = event.get("regarding", {})
    return (regarding.get("kind"), regarding.get("name")) == (names.KIND, resource)


def variables(pid: int) -> dict[str, str]:
    """Returns the environment of a process, or nothing for an ended one."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in environment.split("\0"))}


def is_exiting(pid: int) -> bool:
    """Returns whether a process has begun to end. This is visible before its memory is freed."""
    try:
        # After the name: the state, and six fields later the flags (proc_pid_stat(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
