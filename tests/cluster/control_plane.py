"""Starts etcd, kube-apiserver, kube-controller-manager and kube-scheduler within seconds."""

import contextlib
import dataclasses
import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster import processes, tools
from tests.cluster.pki import Pki
from tests.cluster.processes import ProcessIdentity
from tests.cluster.programs import Program
from tests.cluster.state import State

READY_TIMEOUT_S = 60.0
API_SERVER = "kube-apiserver"
SCHEDULER = "kube-scheduler"
CONTROLLER_MANAGER = "kube-controller-manager"
GO_ENVIRONMENT = {"GOGC": "300"}
"""Uses more memory to save time, because the control plane shares two cores with all tests."""

_GANG_VERSIONS = {"": "v1alpha1", "1.36": "v1alpha2", "1.37": "v1beta1"}
"""The gate and API version of gangs, by `Site.kubernetes`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the control plane listens: `address`, and a port for each of its listeners.

    `prefix` is the command that starts a program in the cluster's own namespaces; without one, it starts on
    the machine itself. A node without a heartbeat for `node_grace_s` becomes NotReady. `gang_scheduling`:
    whether kube-scheduler places the pods of a gang together (alpha or beta). `kubernetes`: minor version of
    the programs, as in `1.36`; empty: the version of all other tests.
    """

    address: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    controller_manager_port: int
    scheduler_port: int
    service_range: str
    node_grace_s: int
    prefix: tuple[str, ...] = ()
    reachable_by_pods: bool = False
    gang_scheduling: bool = False
    kubernetes: str = ""

    def program(self, name: str) -> str:
        """Returns the path of a program of Kubernetes."""
        tool = tools.LATER_KUBERNETES[self.kubernetes] if self.kubernetes else tools.KUBERNETES
        return str(tools.program(tool, name))

    @property
    def api_flags(self) -> tuple[str, ...]:
        """Returns the API server's options for gangs."""
        if not self.gang_scheduling:
            return ()
        version = _GANG_VERSIONS[self.kubernetes]
        return ("--feature-gates=GenericWorkload=true", f"--runtime-config=scheduling.k8s.io/{version}=true")

    @property
    def controller_flags(self) -> tuple[str, ...]:
        """Returns the controller manager's options for gangs. Before 1.36, it needs none."""
        return ("--feature-gates=GenericWorkload=true",) if self.gang_scheduling and self.kubernetes else ()

    @property
    def scheduler_flags(self) -> tuple[str, ...]:
        """Returns the scheduler's options for gangs. From 1.37 on, one gate replaces two."""
        if not self.gang_scheduling:
            return ()
        more = "" if self.kubernetes == "1.37" else ",GangScheduling=true"
        return (f"--feature-gates=GenericWorkload=true{more}",)

    @property
    def server(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"https://{host}:{self.api_port}"


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yields free loopback ports that no other program gets until the context ends.

    The sockets stay bound with SO_REUSEPORT but never listen. The programs share the ports, so they start
    while the sockets still hold them, and no other start can take a port in between.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("127.0.0.1", 0))
            ports.append(holder.getsockname()[1])
        yield ports


def build_etcd_command(site: Site, folder: Path) -> list[str]:
    """Returns etcd's command line: plain HTTP on loopback, without durable writes."""
    client = f"http://127.0.0.1:{site.etcd_port}"
    peer = f"http://127.0.0.1:{site.etcd_peer_port}"
    return [
        str(tools.program(tools.ETCD, "etcd")),
        f"--data-dir={folder}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # its data need not survive a power loss
        "--socket-reuse-port",
        "--log-level=warn",
    ]


def build_apiserver_command(site: Site, pki: Pki) -> list[str]:
    """Returns kube-apiserver's command line with the authorization of kubeadm: Node and RBAC."""
    return [
        site.program("kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{site.etcd_port}",
        f"--bind-address={site.address}",
        f"--advertise-address={site.address}",
        f"--secure-port={site.api_port}",
        "--permit-port-sharing",
        # Without a node, no pod reaches the API server through the Service `kubernetes`, and the API server
        # refuses a loopback address as an endpoint.
        f"--endpoint-reconciler-type={'lease' if site.reachable_by_pods else 'none'}",
        f"--service-cluster-ip-range={site.service_range}",
        f"--client-ca-file={pki.path('ca.crt')}",
        f"--tls-cert-file={pki.path('apiserver.crt')}",
        f"--tls-private-key-file={pki.path('apiserver.key')}",
        f"--kubelet-client-certificate={pki.path('kubelet-client.crt')}",
        f"--kubelet-client-key={pki.path('kubelet-client.key')}",
        f"--kubelet-certificate-authority={pki.path('ca.crt')}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={pki.path('sa.pub')}",
        f"--service-account-signing-key-file={pki.path('sa.key')}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--requestheader-client-ca-file={pki.path('front-ca.crt')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki.path('front.crt')}",
        f"--proxy-client-key-file={pki.path('front.key')}",
        *site.api_flags,
    ]


def _client_flags(kubeconfig: str, port: int) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--permit-port-sharing",
        "--leader-elect=false",
    ]


def build_controller_manager_command(site: Site, pki: Pki) -> list[str]:
    """Returns kube-controller-manager's command line."""
    return [
        site.program("kube-controller-manager"),
        *_client_flags(pki.path("kube-controller-manager.kubeconfig"), site.controller_manager_port),
        f"--service-account-private-key-file={pki.path('sa.key')}",
        f"--root-ca-file={pki.path('ca.crt')}",
        f"--cluster-signing-cert-file={pki.path('ca.crt')}",
        f"--cluster-signing-key-file={pki.path('ca.key')}",
        "--use-service-account-credentials",
        # With the default of 20 requests a second, the start and the removal of a namespace wait for this
        # limit.
        "--kube-api-qps=300",
        "--kube-api-burst=600",
        f"--node-monitor-grace-period={site.node_grace_s}s",
        *site.controller_flags,
    ]


def build_scheduler_command(site: Site, pki: Pki) -> list[str]:
    """Returns kube-scheduler's command line."""
    return [
        site.program("kube-scheduler"),
        *_client_flags(pki.path("kube-scheduler.kubeconfig"), site.scheduler_port),
        *site.scheduler_flags,
    ]


def api_status(site: Site, pki: Pki, path: str) -> int:
    """Sends a GET of `path` to the API server. Returns the HTTP status, or 0 without an answer."""
    connection = http.client.HTTPSConnection(
        site.address, site.api_port, context=pki.client_context("admin"), timeout=5
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _start(state: State, site: Site, name: str, command: Sequence[str]) -> ProcessIdentity:
    return Program.start(state, name, [*site.prefix, *command], GO_ENVIRONMENT).identity


@contextlib.contextmanager
def api_server_down(state: State) -> Iterator[float]:
    """Kills the API server until the context ends. Yields the Unix time of its end.

    At the end of the context, the API server starts again and is ready. Its port stays bound in between, so
    that no client gets this port by chance.

    Raises:
        ClusterError: the API server did not end, or did not start again.
    """
    program, (site, pki) = Program.of(state, API_SERVER), site_of(state)
    with socket.socket() as holder:
        if not site.prefix:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((site.address, site.api_port))
        try:
            yield program.kill()
        finally:
            again = program.start_again()
            _wait_api_server(state, site, pki, again.identity)


def site_of(state: State) -> tuple[Site, Pki]:
    """Returns where a running control plane listens, and its keys."""
    stored = json.loads((state.folder / "site.json").read_text())
    return Site(**{**stored, "prefix": tuple(stored["prefix"])}), Pki(folder=state.folder / "pki")


def _wait_api_server(state: State, site: Site, pki: Pki, process: ProcessIdentity) -> None:
    processes.wait_until(
        "the API server's /readyz",
        lambda: api_status(site, pki, "/readyz") == http.client.OK,
        timeout_s=READY_TIMEOUT_S,
        process=process,
        log=state.log(API_SERVER),
    )


def start_control_plane(state: State, site: Site, pki: Pki) -> None:
    """Starts the four programs. Waits until a pod can be created in the namespace `default`.

    Raises:
        ClusterError: a program did not start. The message has the end of its log.
    """
    pki.write_kubeconfig("admin", site.server, state.kubeconfig)
    for name in (CONTROLLER_MANAGER, SCHEDULER):
        pki.write_kubeconfig(name, site.server, pki.folder / f"{name}.kubeconfig")
    _start(state, site, "etcd", build_etcd_command(site, state.folder / "etcd"))
    _start_kubernetes(state, site, pki)


def upgrade_control_plane(state: State, kubernetes: str) -> None:
    """Ends the programs of Kubernetes, and starts those of another minor version on the same etcd.

    Raises:
        ClusterError: a program did not end, or did not start.
    """
    site, pki = site_of(state)
    for name in (SCHEDULER, CONTROLLER_MANAGER, API_SERVER):
        Program.of(state, name).kill()
    _start_kubernetes(state, dataclasses.replace(site, kubernetes=kubernetes), pki)


def _start_kubernetes(state: State, site: Site, pki: Pki) -> None:
    """Starts the three programs of Kubernetes. Waits until a pod can be created."""
    apiserver = _start(state, site, API_SERVER, build_apiserver_command(site, pki))
    _wait_api_server(state, site, pki, apiserver)
    _start(state, site, SCHEDULER, build_scheduler_command(site, pki))
    manager = _start(state, site, CONTROLLER_MANAGER, build_controller_manager_command(site, pki))
    processes.wait_until(
        "the service account of namespace default",
        lambda: api_status(site, pki, "/api/v1/namespaces/default/serviceaccounts/default") == http.client.OK,
        timeout_s=READY_TIMEOUT_S,
        process=manager,
        log=state.log(CONTROLLER_MANAGER),
    )
    (state.folder / "site.json").write_text(json.dumps(dataclasses.asdict(site)))
