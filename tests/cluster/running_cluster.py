"""Gives tests access to a running cluster, and starts a control plane without nodes."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import debian, processes, tools
from tests.cluster.control_plane import Site, reserved_ports, start_control_plane
from tests.cluster.pki import create_pki
from tests.cluster.state import State

CONTROL_PLANE_LIMIT = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A control plane: an API server with its controllers and scheduler, without a node.

    As a context manager, it stops itself. `kubeconfig` has all permissions (system:masters).
    """

    state: State

    @property
    def kubeconfig(self) -> Path:
        return self.state.kubeconfig

    def environment(self) -> dict[str, str]:
        """Returns the environment with which a program uses this cluster and leaves no files."""
        helm = self.state.folder / "helm"
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.state.folder / "kubectl-cache"),
            "HELM_CACHE_HOME": str(helm / "cache"),
            "HELM_CONFIG_HOME": str(helm / "config"),
            "HELM_DATA_HOME": str(helm / "data"),
            # The cluster is on this machine, so programs must not use a proxy of the shell.
            "NO_PROXY": "*",
            "no_proxy": "*",
        }

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Runs kubectl, and returns its output.

        Raises:
            ClusterError: kubectl failed. The message has its output.
        """
        command = [str(tools.program(tools.KUBERNETES, "kubectl")), *arguments]
        return processes.run(command, stdin=stdin, timeout_s=timeout_s, environment=self.environment())

    def helm(self, *arguments: str, stdin: str | None = None, timeout_s: float = 300) -> str:
        """Runs helm, and returns its output.

        Raises:
            ClusterError: helm failed. The message has its output.
        """
        command = [str(tools.program(tools.HELM, "helm")), *arguments]
        return processes.run(command, stdin=stdin, timeout_s=timeout_s, environment=self.environment())

    def stop(self) -> None:
        """Ends the cluster, and removes everything of it."""
        self.state.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextlib.contextmanager
def removed_on_failure(state: State) -> Iterator[None]:
    """Removes a cluster whose start has failed. HETEROINFER_KEEP=1 keeps it for an inspection."""
    try:
        yield
    except BaseException:
        if not os.environ.get("HETEROINFER_KEEP"):
            state.remove()
        raise


def start_control_plane_only(*, gang_scheduling: bool = False, kubernetes: str = "") -> Cluster:
    """Starts a control plane on free loopback ports. Up to 32 run on one machine.

    No kubelet reports the state of nodes: a node and its pods keep for an hour the state that a test writes.

    Args:
        gang_scheduling: whether kube-scheduler places the pods of a gang together (alpha or beta).
        kubernetes: minor version of another Kubernetes than that of all other tests, as in `1.36`.

    Raises:
        ClusterError: the control plane did not start. Nothing of it is left.
    """
    debian.ensure_packages(debian.CONTROL_PLANE_NEEDS)
    later = (tools.LATER_KUBERNETES[kubernetes],) if kubernetes else ()
    ensure_tools((tools.ETCD, tools.KUBERNETES, *later))
    state = State.claim("control-plane", CONTROL_PLANE_LIMIT)
    with removed_on_failure(state), reserved_ports(5) as ports:
        site = Site(
            address="127.0.0.1",
            api_port=ports[0],
            etcd_port=ports[1],
            etcd_peer_port=ports[2],
            controller_manager_port=ports[3],
            scheduler_port=ports[4],
            service_range="10.96.0.0/16,fd00:10:96::/112",  # of both families
            gang_scheduling=gang_scheduling,
            kubernetes=kubernetes,
            node_grace_s=3600,
        )
        pki = create_pki(state.folder / "pki", site.address, "10.96.0.1", node=None)
        start_control_plane(state, site, pki)
    return Cluster(state=state)


def ensure_tools(wanted: Sequence[tools.Tool]) -> None:
    """Builds the tools that the cache lacks, before a cluster is started."""
    for tool in wanted:
        tools.ensure_built(tool)
