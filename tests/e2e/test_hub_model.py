"""Tests a model from a hub on a real node: fetched into a volume with a token, then served without the hub.

The namespace denies all traffic that no NetworkPolicy allows. Its pods get a sidecar unless they opt out.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_contract.model_cache import read_marker
from heteroinfer_contract.model_fetch import model_folder
from tests.cluster import processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster
from tests.e2e.mesh_injector import SIDECAR, mesh_injector
from tests.e2e.serving import (
    LIMITED,
    OPERATOR_LABELS,
    RELEASE,
    SYSTEM,
    Resource,
    add_quota,
    cache_volume,
    install,
)
from tests.hub_server import HubServer, Repository
from tests.models import PROMPTS, REFERENCE_TOKENS

NAMESPACE = "hub"
MODEL = "acme/small"
TOKEN = "hf_e2eSecretThatNobodyMaySee"
WORKER_USER = 65532
PAUSE_BYTES = 8_000_000
"""A third of the model's weights."""
ROLE = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
FETCH_S = 120.0
PROGRESS_S = 30.0
"""The operator queries a fetch pod every 5 s. A busy node may not answer some of the queries."""
START_S = 420.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def hub(node_cluster: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Iterator[HubServer]:
    """Runs the hub at an address of this machine that pods reach. Its only model requires a token."""
    address = Addresses(number=node_cluster.state.number).machine
    with HubServer(host=address, content_host=address) as server:
        server.repositories[MODEL] = Repository.of_folder(model[0] / "small", token=TOKEN)
        yield server


@pytest.fixture
def cache() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="heteroinfer-cache-"))
    folder.chmod(0o755)
    # fsGroup does not change a volume that is a path of the node, so the folder must belong to the workers.
    shutil.chown(folder, WORKER_USER, WORKER_USER)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def installed(node_cluster: NodeCluster, hub: HubServer) -> Iterator[NodeCluster]:
    install(node_cluster, *LIMITED, f"fetchEgress.ports={{{hub.port}}}")
    yield node_cluster
    node_cluster.kubectl(
        "delete", "hinf", "-n", NAMESPACE, "--all", "--cascade=foreground", "--timeout=60s", timeout_s=70
    )
    node_cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    node_cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.API_GROUP}", "--timeout=30s")
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s", timeout_s=70)
    node_cluster.kubectl("delete", "pv", "hub-cache", "--ignore-not-found", "--timeout=30s", timeout_s=40)


def manifests(cache: Path, endpoint: str) -> str:
    """Returns the volume, the Secret, and examples/hub-model.yaml for the small model and for CPUs only."""
    volume = cache_volume("hub-cache", cache)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub"},
        "stringData": {"token": TOKEN},
    }
    resource = yaml.safe_load((REPOSITORY / "examples/hub-model.yaml").read_text())
    spec = resource["spec"]
    spec["model"] |= {"uri": f"hf://{MODEL}", "cache": {"size": "1Gi"}}
    spec["engine"] |= {"maxModelLen": 1024, "env": [{"name": "HF_ENDPOINT", "value": endpoint}]}
    # There is no GPU, and the model is small.
    spec["roles"] = [{**spec["roles"][0], "pods": 2, "resources": ROLE}]
    return yaml.safe_dump_all([volume, secret, resource])


WORKER_IMAGE = "localhost/heteroinfer/worker-cpu:test"
DENY_ALL = json.dumps(
    {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "default-deny"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }
)
STRANGER = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": WORKER_USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": WORKER_IMAGE,
                    "command": ["sleep", "infinity"],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
)


def cut_off(cluster: NodeCluster, hub: HubServer) -> None:
    """Denies all traffic of the namespace. Waits until a pod that reached hub and DNS reaches neither."""
    apply = ("apply", "-n", NAMESPACE, "-f", "-")
    cluster.kubectl(*apply, stdin=STRANGER)
    cluster.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod/stranger", "--timeout=60s")
    node = Addresses(number=cluster.state.number)
    to_hub, to_dns = f"('{node.machine}', {urlsplit(hub.endpoint).port})", f"('{node.node}', 53)"

    def reaches(where: str) -> bool:
        script = f"import socket; socket.create_connection({where}, timeout=1)"
        shell = f'python3 -c "{script}" 2>/dev/null && echo 1 || echo 0'
        in_pod = ("stranger", "-c", "main", "--", "sh", "-c", shell)
        output = cluster.kubectl("exec", "-n", NAMESPACE, *in_pod)
        return bool(int(output))

    assert reaches(to_hub)
    assert reaches(to_dns)
    cluster.kubectl(*apply, stdin=DENY_ALL)
    processes.wait_until(
        "the effect of the policy that denies all traffic", lambda: not reaches(to_hub), timeout_s=10
    )
    assert not reaches(to_dns)


def containers(pods: Iterable[dict[str, Any]]) -> set[str]:
    """Returns the names of all containers of pods."""
    return {container["name"] for pod in pods for container in pod["spec"]["containers"]}


def fetch_log(resource: Resource) -> str:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_FETCH}"
    return resource.cluster.kubectl("logs", "-n", NAMESPACE, "-l", selector, "--tail=-1")


def test_a_model_of_a_hub_is_fetched_with_its_token_and_served_without_the_hub(
    installed: NodeCluster,
    hub: HubServer,
    cache: Path,
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    installed.kubectl("create", "namespace", NAMESPACE)
    installed.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    with mesh_injector(installed, NAMESPACE, tmp_path, WORKER_IMAGE):
        cut_off(installed, hub)
        stranger = json.loads(installed.kubectl("get", "pod", "-n", NAMESPACE, "stranger", "-o", "json"))
        assert SIDECAR in containers([stranger]), "a pod that does not opt out gets a sidecar"
        check_fetched_and_served(installed, hub, cache, model)


def check_fetched_and_served(
    installed: NodeCluster, hub: HubServer, cache: Path, model: tuple[Path, dict[str, Any]]
) -> None:
    """Checks the fetch with its progress, the serving without the hub, and the deletion."""
    add_quota(installed, NAMESPACE)
    hub.pause_after_bytes = PAUSE_BYTES
    installed.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=manifests(cache, hub.endpoint))
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="hub-model")

    def model_status() -> dict[str, Any]:
        return dict(resource.status.get("model", {}))

    def part_way() -> bool:
        status = model_status()
        return 0 < status.get("bytesDone", 0) < status.get("bytesTotal", 0)

    def is_paused() -> bool:
        return max(hub.seen.sent_bytes.values(), default=0) >= PAUSE_BYTES

    processes.wait_until("a third of the weights", is_paused, timeout_s=FETCH_S)
    processes.wait_until("progress in the status", part_way, timeout_s=PROGRESS_S)
    hub.pause_after_bytes = None
    output = fetch_log(resource)
    assert "bytes" in output
    processes.wait_until("the profile", lambda: model_status().get("phase") == "Ready", timeout_s=FETCH_S)
    commit = hub.repositories[MODEL].commit
    assert model_status()["commit"] == commit
    assert read_marker(cache / model_folder(MODEL, commit)) is not None
    hub.close()  # The hub stops here, so the group serves the model from the volume.

    resource.wait_ready(START_S)
    assert containers(resource.pods()) == {names.CONTAINER_WORKER}
    reference = model[1][PROMPTS[0]]
    assert resource.complete(reference["prompt_token_ids"], REFERENCE_TOKENS) == reference["token_ids"]
    leader = resource.pods()[0]["metadata"]["name"]
    write = "touch /model/written 2>&1 || true"
    refused = installed.kubectl("exec", "-n", NAMESPACE, leader, "--", "sh", "-c", write)
    assert "Read-only file system" in refused
    env = installed.kubectl("exec", "-n", NAMESPACE, leader, "--", "env")
    assert "HF_HUB_OFFLINE=1" in env

    events = installed.kubectl("get", "events", "-A", "-o", "json")
    assert any(event["reason"] == "ModelFetched" for event in json.loads(events)["items"])
    operator = installed.kubectl("logs", "-n", SYSTEM, "-l", OPERATOR_LABELS, "--tail=-1")
    stored = json.dumps(resource.get(names.SINGULAR, resource.name)) + json.dumps(resource.get("pods"))
    for text in (output, events, operator, stored, env, resource.logs()):
        assert TOKEN not in text

    installed.kubectl(
        "delete",
        "hinf",
        "-n",
        NAMESPACE,
        resource.name,
        "--cascade=foreground",
        "--timeout=60s",
        timeout_s=70,
    )

    def claims() -> list[Any]:
        return list(resource.get("pvc")["items"])

    # The garbage collector deletes the claim after the resource. The volume belongs to the user, and stays.
    processes.wait_until("the end of the claim", lambda: not claims(), timeout_s=60)
