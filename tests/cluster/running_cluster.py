"""A running cluster as tests use it, and the two ways to start one."""

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
    """A control plane: an API server that answers, with its controllers and scheduler, and no node.

    As a context manager it stops itself. `kubeconfig` has all rights (system:masters).
    """

    state: State

    @property
    def kubeconfig(self) -> Path:
        return self.state.kubeconfig

    def environment(self) -> dict[str, str]:
        """Returns what a program needs in its environment to use this cluster and leave no files behind."""
        helm = self.state.folder / "helm"
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.state.folder / "kubectl-cache"),
            "HELM_CACHE_HOME": str(helm / "cache"),
            "HELM_CONFIG_HOME": str(helm / "config"),
            "HELM_DATA_HOME": str(helm / "data"),
            # The cluster is on this machine: a proxy of the shell must not be asked for it.
            "NO_PROXY": "*",
            "no_proxy": "*",
        }

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Returns what kubectl printed.

        Raises:
            ClusterError: kubectl failed; the message holds what it said.
        """
        command = [str(tools.program(tools.KUBERNETES, "kubectl")), *arguments]
        return processes.run(command, stdin=stdin, timeout_s=timeout_s, environment=self.environment())

    def helm(self, *arguments: str, stdin: str | None = None, timeout_s: float = 300) -> str:
        """Returns what helm printed.

        Raises:
            ClusterError: helm failed; the message holds what it said.
        """
        command = [str(tools.program(tools.HELM, "helm")), *arguments]
        return processes.run(command, stdin=stdin, timeout_s=timeout_s, environment=self.environment())

    def stop(self) -> None:
        """Ends the cluster and everything of it, without a trace."""
        self.state.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextlib.contextmanager
def removed_on_failure(state: State) -> Iterator[None]:
    """Takes a half-started cluster away when its start fails; HETEROINFER_KEEP=1 keeps it for a look."""
    try:
        yield
    except BaseException:
        if not os.environ.get("HETEROINFER_KEEP"):
            state.remove()
        raise


def start_control_plane_only(*, gang_scheduling: bool = False, kubernetes: str = "") -> Cluster:
    """Returns a ready control plane on free loopback ports; up to 32 run side by side on one machine.

    No kubelet tells that its nodes live: a node and its pods stay for an hour what a test says of them.

    Args:
        gang_scheduling: whether kube-scheduler places the pods of a gang together (alpha or beta).
        kubernetes: minor version of another Kubernetes than all tests have, as in `1.36`.

    Raises:
        ClusterError: it did not come up; nothing of it is left.
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
    """Builds those that the cache lacks, before any cluster is claimed."""
    for tool in wanted:
        tools.ensure_built(tool)
