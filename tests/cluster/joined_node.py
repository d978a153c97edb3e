"""Joins a second real node to a running cluster: kubelet and containerd in their own namespaces.

Its only link leads to the first node, which also routes its pods. So one command disconnects the node, like a
failure of its machine or network. The first node resolves its names and enforces its NetworkPolicies. The
node has no Service addresses (no kube-proxy). It has a taint, so that only pods with a toleration run on it.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cluster import cluster_cgroup, processes
from tests.cluster.control_plane import site_of
from tests.cluster.image_store import SEED_MARK
from tests.cluster.namespaces import Addresses, Namespaces, create_namespaces, end_here, link
from tests.cluster.node import NODE_LIMIT, NodeCluster, NodePrograms, give_images, node_cgroup
from tests.cluster.programs import Program
from tests.cluster.state import State

TAINT = "heteroinfer.test/joined"
KEY = "joined-kubelet"
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedNode:
    """The second node of `cluster`. `state` is its own folder, with its own programs."""

    cluster: NodeCluster
    state: State
    namespaces: Namespaces
    addresses: Addresses

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def cgroup(self) -> str:
        return node_cgroup(self.state)

    def kill_kubelet(self) -> float:
        """Kills its kubelet like a crash, and leaves its pods running. Returns the time just before."""
        return Program.of(self.state, "kubelet").kill()

    def start_kubelet(self) -> None:
        """Starts its kubelet again, and waits until the node is Ready.

        The kubelet registers a deleted node.
        """
        Program.of(self.state, "kubelet").start_again()
        self.wait_ready()

    def cut_off(self) -> None:
        """Takes its link down, so that the node reaches nothing and nothing reaches the node."""
        self.cluster.namespaces.run("ip", "link", "set", self.addresses.link, "down")

    def connect(self) -> None:
        """Takes its link up again, and restores the routes over it."""
        self.cluster.namespaces.run("ip", "link", "set", self.addresses.link, "up")
        self.cluster.namespaces.run(
            "ip", "route", "replace", self.addresses.pod_range, "via", self.addresses.node
        )

    def ready(self) -> bool:
        """Returns whether the API server reports the node as Ready, and False without the node."""
        nodes = json.loads(self.cluster.kubectl("get", "nodes", "-o", "json"))["items"]
        return any(
            {"type": "Ready", "status": "True"}.items() <= condition.items()
            for node in nodes
            if node["metadata"]["name"] == self.name
            for condition in node["status"].get("conditions", ())
        )

    def wait_ready(self) -> None:
        """Waits until the node is Ready.

        Raises:
            ClusterError: the node is not Ready after a minute. The message has the end of the kubelet's
                log.
        """
        log = self.state.log("kubelet")
        processes.wait_until(f"node {self.name}", self.ready, timeout_s=READY_TIMEOUT_S, log=log)


@contextlib.contextmanager
def joined_node(cluster: NodeCluster) -> Iterator[JoinedNode]:
    """Gives a running cluster a second node until the context ends. It is Ready at the start.

    Raises:
        ClusterError: the node did not start. Nothing of it is left.
    """
    state = State.claim("joined-node", NODE_LIMIT)
    try:
        node = _join(cluster, state)
        try:
            yield node
        finally:
            cluster.kubectl("delete", "node", node.name, "--ignore-not-found")
    finally:
        _leave(cluster, state)


def _addresses(state: State) -> Addresses:
    """Returns address ranges outside those of all first nodes."""
    return Addresses(number=NODE_LIMIT + state.number)


def _join(cluster: NodeCluster, state: State) -> JoinedNode:
    """Creates the namespaces and programs of the second node, and waits until it is Ready."""
    first, addresses = Addresses(number=cluster.state.number), _addresses(state)
    namespaces = create_namespaces(state)
    end_here(state, (addresses.link_range, addresses.pod_range))  # networks that the first node does not know
    link(partial(cluster.namespaces.run, "ip"), namespaces, addresses, (addresses.pod_range,))
    state.will_change("cgroup", node_cgroup(state))
    cluster_cgroup.create(node_cgroup(state))
    give_images(state, namespaces, Path((cluster.state.folder / SEED_MARK).read_text()))
    programs = NodePrograms(state=state, namespaces=namespaces, addresses=addresses)
    programs.start_containerd()
    site, pki = site_of(cluster.state)
    pki.issue(
        KEY,
        f"/O=system:nodes/CN=system:node:{state.name}",
        server_names=[f"DNS:{state.name}", f"IP:{addresses.node}"],
    )
    taint = f"--register-with-taints={TAINT}=:NoSchedule"
    programs.start_kubelet(site, pki, KEY, dns=first.node, flags=[taint])
    node = JoinedNode(cluster=cluster, state=state, namespaces=namespaces, addresses=addresses)
    node.wait_ready()
    return node


def _leave(cluster: NodeCluster, state: State) -> None:
    link = _addresses(state).link
    if link in cluster.namespaces.run("ip", "-brief", "link"):
        cluster.namespaces.run("ip", "link", "delete", link)
    state.remove()
