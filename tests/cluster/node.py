"""Starts a real Kubernetes node (containerd, kubelet, kube-proxy, CoreDNS, CNI) in its own namespaces."""

import dataclasses
import http.client
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster import cluster_cgroup, debian, image_store, policy_enforcer, processes, tools
from tests.cluster.control_plane import Site, start_control_plane
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.namespaces import Addresses, Namespaces, connect_namespaces, create_namespaces
from tests.cluster.oci import Image, Layout
from tests.cluster.pki import Pki, create_pki
from tests.cluster.processes import ProcessIdentity
from tests.cluster.programs import Program
from tests.cluster.running_cluster import Cluster, ensure_tools, removed_on_failure
from tests.cluster.state import State

NODE_LIMIT = 4
NODE_GRACE_S = 20
"""Kubernetes' default of 50 s is long for tests that wait for a lost node."""
LEASE_S = 16
"""The lease is renewed four times in this time, so a busy machine may miss some renewals."""
READY_TIMEOUT_S = 60.0
SOCKET = "/run/containerd/containerd.sock"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCluster(Cluster):
    """A control plane with one Ready node."""

    namespaces: Namespaces

    @property
    def node_name(self) -> str:
        return self.state.name

    @property
    def ctr(self) -> list[str]:
        """The command that starts containerd's client for the node's containerd."""
        return [*self.namespaces.prefix, *build_ctr_command()]

    def pod_http(
        self, address: str, port: int, path: str, *, body: bytes | None = None, timeout_s: float = 10
    ) -> tuple[int, str]:
        """Sends a GET from the node to a pod, or a POST of JSON if there is a `body`.

        Returns status and text. The request takes the way of the kubelet's probes, which no NetworkPolicy
        stops.

        Raises:
            OSError: the pod does not answer.
        """
        connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
        connection.sock = self.namespaces.connect(address, port, timeout_s)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def load(self, images: Sequence[Image], layout: Layout | None = None) -> None:
        """Imports images into the running node, by default from the cache's layout."""
        image_store.import_images(self.ctr, images, layout)

    def offer(self, resource: str, quantity: int) -> None:
        """Makes the node report `quantity` of a resource that no device plugin offers."""
        key = resource.replace("~", "~0").replace("/", "~1")
        patch = [{"op": "add", "path": f"/status/capacity/{key}", "value": str(quantity)}]
        self.kubectl(
            "patch", "node", self.node_name, "--subresource=status", "--type=json", "-p", json.dumps(patch)
        )


def start_node_cluster(images: Sequence[Image] = ()) -> NodeCluster:
    """Starts a cluster whose only node is Ready and has these images. Up to 4 run on one machine.

    Raises:
        ClusterError: the user is not root, a tool is missing, or a program did not start. Nothing is
            left.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterError("a node needs root on Linux, for namespaces, mounts and cgroups. Run it as root")
    debian.ensure_packages({**debian.CONTROL_PLANE_NEEDS, **debian.NODE_NEEDS})
    ensure_tools((tools.ETCD, tools.KUBERNETES, tools.COREDNS, tools.CONTAINERD))
    seed = image_store.ensure_seed([image_store.ensure_pause_image(), *images])
    state = State.claim("node", NODE_LIMIT)
    with removed_on_failure(state):
        return _start(state, seed)


def attach(state: State) -> NodeCluster:
    """Returns the cluster of a running node."""
    holder = ProcessIdentity(**json.loads((state.folder / "holder.json").read_text()))
    return NodeCluster(state=state, namespaces=Namespaces(holder=holder))


def _start(state: State, seed: Path) -> NodeCluster:
    """Starts the control plane and the node's programs in new namespaces. Waits until the node is Ready."""
    addresses = Addresses(number=state.number)
    namespaces = create_namespaces(state)
    (state.folder / "holder.json").write_text(json.dumps(dataclasses.asdict(namespaces.holder)))
    connect_namespaces(state, namespaces, addresses)
    state.will_change("cgroup", node_cgroup(state))
    cluster_cgroup.create(node_cgroup(state))
    give_images(state, namespaces, seed)
    programs = NodePrograms(state=state, namespaces=namespaces, addresses=addresses)
    programs.start_containerd()
    site = Site(
        address=addresses.node,
        api_port=6443,
        etcd_port=2379,
        etcd_peer_port=2380,
        controller_manager_port=10257,
        scheduler_port=10259,
        service_range=addresses.service_range,
        prefix=namespaces.prefix,
        reachable_by_pods=True,
        node_grace_s=NODE_GRACE_S,
    )
    pki = create_pki(state.folder / "pki", addresses.node, addresses.api_service, node=state.name)
    start_control_plane(state, site, pki)
    cluster = NodeCluster(state=state, namespaces=namespaces)
    programs.start_the_rest(site, pki)
    _wait_ready(cluster)
    return cluster


def node_cgroup(state: State) -> str:
    """Returns the name of the cgroup of all processes of a node."""
    return f"heteroinfer-{state.name}"


def give_images(state: State, namespaces: Namespaces, seed: Path) -> None:
    """Mounts a seed of images at the place where containerd in these namespaces expects images."""
    (state.folder / image_store.SEED_MARK).write_text(str(seed))
    namespaces.run("sh", "-c", image_store.build_mount_script(seed, Path("/var/lib/containerd")))


def _wait_ready(cluster: NodeCluster) -> None:
    """Waits until the node is Ready and the NetworkPolicy enforcer has made its first rules."""

    def ready() -> bool:
        nodes: dict[str, Any] = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))
        conditions = [c for node in nodes["items"] for c in node["status"].get("conditions", [])]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def enforced() -> bool:
        return policy_enforcer.TABLE in cluster.namespaces.run("nft", "list", "tables")

    processes.wait_until("the node", ready, timeout_s=READY_TIMEOUT_S, log=cluster.state.log("kubelet"))
    log = cluster.state.log("network-policy")
    processes.wait_until("the NetworkPolicy enforcer", enforced, timeout_s=READY_TIMEOUT_S, log=log)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePrograms:
    """A node's own programs. Each has its configuration file in the state folder."""

    state: State
    namespaces: Namespaces
    addresses: Addresses

    def _spawn(self, name: str, *command: str) -> ProcessIdentity:
        environment = {"TMPDIR": "/run", "PYTHONPATH": str(REPOSITORY)}
        return Program.start(self.state, name, [*self.namespaces.prefix, *command], environment).identity

    def _configure(self, name: str, content: str) -> str:
        file = self.state.folder / "etc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return str(file)

    def start_containerd(self) -> None:
        runc = shutil.which("runc")
        assert runc is not None
        network = self._configure("cni/10-pods.conflist", json.dumps(build_network(self.addresses)))
        shim = str(tools.program(tools.CONTAINERD, "containerd-shim-runc-v2"))
        content = build_containerd_config(str(Path(network).parent), runc, shim)
        config = self._configure("containerd.toml", content)
        program = str(tools.program(tools.CONTAINERD, "containerd"))
        containerd = self._spawn("containerd", program, "--config", config)
        ctr = [*self.namespaces.prefix, *build_ctr_command()]
        image_store.wait_for_containerd(ctr, containerd, self.state.log("containerd"))

    def start_the_rest(self, site: Site, pki: Pki) -> None:
        """Starts kubelet, kube-proxy, CoreDNS and the NetworkPolicy enforcer, without waiting for them."""
        kubeconfigs = {}
        for name in ("kube-proxy", "coredns"):
            kubeconfigs[name] = pki.path(f"{name}.kubeconfig")
            pki.write_kubeconfig(name, site.server, Path(kubeconfigs[name]))
        binaries = tools.ensure_built(tools.KUBERNETES)
        self.start_kubelet(site, pki, "kubelet", dns=self.addresses.node)
        self._spawn("kube-proxy", str(binaries / "kube-proxy"), *self._proxy_flags(kubeconfigs["kube-proxy"]))
        corefile = self._configure("Corefile", build_corefile(self.addresses, kubeconfigs["coredns"]))
        self._spawn("coredns", str(tools.program(tools.COREDNS, "coredns")), "-conf", corefile)
        enforcer = (sys.executable, "-B", "-m", "tests.cluster.policy_enforcer")
        self._spawn("network-policy", *enforcer, str(pki.folder), site.address, str(site.api_port))

    def start_kubelet(self, site: Site, pki: Pki, key: str, *, dns: str, flags: Sequence[str] = ()) -> None:
        """Starts the kubelet with the certificate `key` of the cluster. Its pods resolve names at `dns`."""
        kubeconfig = pki.path(f"{key}.kubeconfig")
        pki.write_kubeconfig(key, site.server, Path(kubeconfig))
        resolver = self._configure("resolv.conf", "# pods get cluster DNS only\n")
        config = build_kubelet_config(
            self.addresses, pki, resolver, node_cgroup(self.state), key=key, dns=dns
        )
        self._spawn(
            "kubelet",
            str(tools.program(tools.KUBERNETES, "kubelet")),
            f"--config={self._configure('kubelet.json', json.dumps(config))}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.state.name}",
            f"--node-ip={self.addresses.node}",
            *flags,
        )

    def _proxy_flags(self, kubeconfig: str) -> list[str]:
        return [
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.state.name}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={self.addresses.pod_range}",
            # The limits of the connection tracker belong to the machine, so kube-proxy leaves them unchanged.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ]


def build_network(addresses: Addresses) -> dict[str, object]:
    """Returns the CNI configuration: a routed link for each pod.

    The link is routed (ptp) and not bridged. So traffic between two pods passes the node's firewall, which
    implements Services and NetworkPolicies, without a kernel module for bridges.
    """
    ranges = [[{"subnet": addresses.pod_range}]]
    routes = [{"dst": "0.0.0.0/0"}]
    ipam = {"type": "host-local", "ranges": ranges, "routes": routes, "dataDir": "/run/cni-addresses"}
    plugin = {"type": "ptp", "ipMasq": False, "ipam": ipam}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [plugin]}


def build_ctr_command() -> list[str]:
    """Returns the command of containerd's client for the network namespace of a node."""
    return [str(tools.program(tools.CONTAINERD, "ctr")), "--address", SOCKET, "--namespace", "k8s.io"]


def build_containerd_config(network_folder: str, runc: str, shim: str) -> str:
    """Returns containerd's configuration."""
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    return f"""version = 4
disabled_plugins = {json.dumps(list(image_store.DISABLED_PLUGINS))}
[plugins.'io.containerd.server.v1.grpc']
  address = "{SOCKET}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{image_store.PAUSE}"
[{runtime}]
  # Without CAP_SYS_RESOURCE, runc could not lower a container's score below containerd's own.
  restrict_oom_score_adj = true
  [{runtime}.cni]
    bin_dirs = ["{debian.CNI_FOLDER}"]
    conf_dir = "{network_folder}"
  [{runtime}.containerd]
    default_runtime_name = "runc"
  [{runtime}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = "{shim}"
    [{runtime}.containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
{image_store.COLLECT_WHEN_ASKED}"""


def build_kubelet_config(
    addresses: Addresses, pki: Pki, resolver: str, cgroup: str, *, key: str, dns: str
) -> dict[str, object]:
    """Returns the kubelet's configuration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "x509": {"clientCAFile": pki.path("ca.crt")},
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
        },
        "authorization": {"mode": "Webhook"},
        "address": addresses.node,
        "tlsCertFile": pki.path(f"{key}.crt"),
        "tlsPrivateKeyFile": pki.path(f"{key}.key"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [dns],
        "resolvConf": resolver,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # The images cannot be pulled again, so the kubelet must never delete them.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeLeaseDurationSeconds": LEASE_S,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    }


def build_corefile(addresses: Addresses, kubeconfig: str) -> str:
    """Returns CoreDNS's configuration: cluster names are cached for a second; other names get NXDOMAIN."""
    return f"""cluster.local in-addr.arpa {{
  bind {addresses.node}
  errors
  kubernetes {{
    kubeconfig {kubeconfig}
    ttl 1
  }}
}}
. {{
  bind {addresses.node}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
