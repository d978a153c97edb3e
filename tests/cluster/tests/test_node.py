"""Tests the test cluster's node: pods run, names resolve, HTTP reaches pods, and nothing is left."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import processes
from tests.cluster.image_store import PAUSE
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster, start_node_cluster
from tests.cluster.traces import observe_traces

HARDENED = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def build_pod(name: str, container: dict[str, Any], labels: dict[str, str] | None = None) -> str:
    """Builds a hardened pod, as JSON, with a stable host name in the headless Service `group`."""
    spec = {
        "hostname": name,
        "subdomain": "group",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{"name": "main", "securityContext": HARDENED, **container}],
    }
    metadata = {"name": name, "labels": {"app": "group", **(labels or {})}}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


NEVER_READY = {
    "image": PAUSE,
    "readinessProbe": {"exec": {"command": ["/no-such-program"]}, "periodSeconds": 1},
}
HEADLESS = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "group"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "group"}},
    }
)
WEB = {
    "image": "localhost/heteroinfer/operator:test",
    "command": ["python3", "-m", "http.server", "8000"],
    "workingDir": "/etc",
    "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
}


@pytest.fixture
def namespace(node_cluster: NodeCluster) -> Iterator[str]:
    name = "smoke"
    node_cluster.kubectl("create", "namespace", name)
    node_cluster.kubectl("wait", "-n", name, "--for=create", "serviceaccount/default", "--timeout=20s")
    yield name
    node_cluster.kubectl("delete", "namespace", name, "--timeout=60s", timeout_s=70)


def pod_address(cluster: NodeCluster, namespace: str, name: str) -> str:
    """Returns the address of a running pod. Raises ClusterError if the pod has none after 30 s."""
    wait = "--for=jsonpath={.status.phase}=Running"
    cluster.kubectl("wait", "-n", namespace, wait, f"pod/{name}", "--timeout=30s")
    return cluster.kubectl("get", "-n", namespace, "pod", name, "-o", "jsonpath={.status.podIP}")


def test_the_node_is_ready(node_cluster: NodeCluster) -> None:
    (node,) = json.loads(node_cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    assert node["metadata"]["name"] == node_cluster.node_name
    assert {"type": "Ready", "status": "True"}.items() <= node["status"]["conditions"][-1].items()


def test_the_name_of_a_pod_that_is_not_ready_resolves(node_cluster: NodeCluster, namespace: str) -> None:
    node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=HEADLESS)
    node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=build_pod("p0", NEVER_READY))
    node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=build_pod("web", WEB))
    address = pod_address(node_cluster, namespace, "p0")
    ready = node_cluster.kubectl(
        "get", "-n", namespace, "pod", "p0", "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    )
    assert ready == "False"
    pod_address(node_cluster, namespace, "web")
    lookup = f"import socket; print(socket.gethostbyname('p0.group.{namespace}.svc.cluster.local'))"

    def resolved() -> bool:
        answer = node_cluster.kubectl(
            "exec", "-n", namespace, "web", "--", "sh", "-c", f'python3 -c "{lookup}" || true'
        )
        return answer.strip() == address

    processes.wait_until("the pod's name", resolved, timeout_s=15)


def test_http_reaches_a_pod_from_the_node_and_from_the_machine(
    node_cluster: NodeCluster, namespace: str
) -> None:
    node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=build_pod("web", WEB))
    node_cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/web", "--timeout=30s")
    address = pod_address(node_cluster, namespace, "web")
    status, text = node_cluster.pod_http(address, 8000, "/passwd")
    assert (status, "heteroinfer:x:65532" in text) == (200, True)
    with socket.create_connection((address, 8000), timeout=5):
        pass


POLICY = json.dumps(
    {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "group-only"},
        "spec": {
            "podSelector": {"matchLabels": {"role": "server"}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"role": "friend"}}}], "ports": [{"port": 8000}]}
            ],
        },
    }
)


def test_a_network_policy_admits_only_the_listed_sources(node_cluster: NodeCluster, namespace: str) -> None:
    for name in ("server", "friend", "stranger"):
        pod = build_pod(name, WEB, {"role": name})
        node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=pod)
    node_cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod", "--all", "--timeout=30s")
    address = pod_address(node_cluster, namespace, "server")
    dial = f"import socket; socket.create_connection(('{address}', 8000), timeout=1); print('reached')"

    def reaches(name: str) -> bool:
        script = f'python3 -c "{dial}" 2>/dev/null || echo refused'
        output = node_cluster.kubectl("exec", "-n", namespace, name, "--", "sh", "-c", script).strip()
        assert output in ("reached", "refused")
        return output == "reached"

    assert reaches("stranger")
    node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=POLICY)
    processes.wait_until("the policy", lambda: not reaches("stranger"), timeout_s=10)
    assert reaches("friend")
    assert node_cluster.pod_http(address, 8000, "/passwd")[0] == 200
    node_cluster.kubectl("delete", "-n", namespace, "networkpolicy", "group-only")
    processes.wait_until("the end of the policy", lambda: reaches("stranger"), timeout_s=10)


def test_a_network_policy_permits_only_the_listed_destinations(
    node_cluster: NodeCluster, namespace: str
) -> None:
    for name in ("server", "client"):
        pod = build_pod(name, WEB, {"role": name})
        node_cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=pod)
    node_cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod", "--all", "--timeout=30s")
    address = pod_address(node_cluster, namespace, "server")
    apply = ("apply", "-n", namespace, "-f", "-")

    def reaches(what: str) -> bool:
        script = f'python3 -c "import socket; {what}; print(1)" 2>/dev/null || echo 0'
        output = node_cluster.kubectl("exec", "-n", namespace, "client", "--", "sh", "-c", script).strip()
        assert output in ("0", "1")
        return output == "1"

    to_pod = f"socket.create_connection(('{address}', 8000), timeout=1)"
    resolver = Addresses(number=node_cluster.state.number).node
    to_node = f"socket.create_connection(('{resolver}', 53), timeout=1)"
    assert reaches(to_pod)
    assert reaches(to_node)
    node_cluster.kubectl(*apply, stdin=build_egress_policy("nothing"))
    processes.wait_until("the policy", lambda: not reaches(to_pod), timeout_s=10)
    assert not reaches(to_node)
    server = {"to": [{"podSelector": {"matchLabels": {"role": "server"}}}]}
    node_cluster.kubectl(*apply, stdin=build_egress_policy("server-only", server))
    processes.wait_until("the policy for the server", lambda: reaches(to_pod), timeout_s=10)
    assert not reaches(to_node)
    dns = {"ports": [{"port": 53, "protocol": "TCP"}]}
    node_cluster.kubectl(*apply, stdin=build_egress_policy("dns", dns))
    processes.wait_until("the policy for DNS", lambda: reaches(to_node), timeout_s=10)


def build_egress_policy(name: str, *rules: dict[str, Any]) -> str:
    spec = {"podSelector": {}, "policyTypes": ["Egress"], "egress": list(rules)}
    api_version = "networking.k8s.io/v1"
    return json.dumps(
        {"apiVersion": api_version, "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}
    )


def test_a_test_node_can_advertise_fake_gpus(node_cluster: NodeCluster) -> None:
    node_cluster.offer("nvidia.com/gpu", 2)
    path = r"jsonpath={.status.allocatable.nvidia\.com/gpu}"
    processes.wait_until(
        "two GPUs",
        lambda: node_cluster.kubectl("get", "node", node_cluster.node_name, "-o", path) == "2",
        timeout_s=20,
    )
    node_cluster.offer("nvidia.com/gpu", 0)


def test_a_node_stops_and_leaves_nothing_although_its_pods_run() -> None:
    before = observe_traces()
    with start_node_cluster() as cluster:
        wait = ("wait", "--for=create", "serviceaccount/default", "--timeout=20s")
        cluster.kubectl(*wait)
        cluster.kubectl("apply", "-f", "-", stdin=build_pod("p0", {"image": PAUSE}))
        pod_address(cluster, "default", "p0")
        made = observe_traces() - before
        kinds = {trace.split()[0] for trace in made}
        pids = processes.marked_pids(cluster.state.folder)
    assert kinds == {"route", "link", "cgroup", "namespace"}
    assert len(pids) >= 10
    # The kernel removes a network namespace a moment after its last process has ended.
    processes.wait_until("the end of all traces", lambda: not (observe_traces() & made), timeout_s=10)
    assert processes.marked_pids(cluster.state.folder) == []
    assert not cluster.state.folder.exists()
