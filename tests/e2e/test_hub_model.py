"""Tests a model from a hub on a real node: fetched into a volume with a token, then served without the hub.

The namespace denies all traffic that no NetworkPolicy allows. Its pods get a sidecar unless they opt out.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_cache import read_marker
from heteroinfer_contract.model_fetch import model_folder
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.planning.first_token import KEEP_ALIVE_S
from heteroinfer_operator.vllm_support.engine_options import KEEP_ALIVE
from tests.cluster import processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster
from tests.e2e import firewall
from tests.e2e.mesh_injector import LABEL, SIDECAR, mesh_injector
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
from tests.e2e.watching import condition_of
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
NAMED_S = 120.0
"""Until a message names a pod: containers begin, and ranks import vLLM and try for 30 s."""
MAX_MODEL_LEN = 65_536
"""Tokens. A prompt of so many tokens keeps CPU ranks busy for more than 5 s."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def hub(node_cluster: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Iterator[HubServer]:
    """Runs the hub at an address of this machine that pods reach. Its only model requires a token."""
    address = Addresses(number=node_cluster.state.number).machine
    with HubServer(host=address, content_host=address) as server:
        repository = Repository.of_folder(model[0] / "small", token=TOKEN)
        config = json.loads(repository.files["config.json"]) | {"max_position_embeddings": MAX_MODEL_LEN}
        repository.files["config.json"] = json.dumps(config).encode()
        server.repositories[MODEL] = repository
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
    """Returns the volume, the Secret, and examples/hub-model.yaml for the small model and for CPUs only.

    The pods of the model do not opt out of the mesh.
    """
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
    env = [{"name": "HF_ENDPOINT", "value": endpoint}]
    spec["engine"] |= {"maxModelLen": MAX_MODEL_LEN, "env": env}
    spec["drainTimeout"] = "0s"
    # There is no GPU, and the model is small.
    template = {"labels": {LABEL: "true"}}
    spec["roles"] = [{**spec["roles"][0], "pods": 2, "resources": ROLE, "template": template}]
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
        add_quota(installed, NAMESPACE)
        resource = Resource(cluster=installed, namespace=NAMESPACE, name="hub-model")
        with firewall.drops(installed, f"tcp dport {names.DEFAULT_CONTROL_PORT}"):
            output = check_fetched(resource, hub, cache)
            check_the_pod_without_a_way_to_the_leader_is_named(resource)
            check_a_container_of_the_mesh_is_named(resource)
        opt_out_and_start(resource)
        check_the_pod_that_the_leader_does_not_reach_is_named(resource)
        check_served(resource, output, model)


def check_fetched(resource: Resource, hub: HubServer, cache: Path) -> str:
    """Fetches the model, and closes the hub; returns the log of the fetch."""
    installed = resource.cluster
    hub.pause_after_bytes = PAUSE_BYTES
    installed.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=manifests(cache, hub.endpoint))

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
    return output


def pod_names(resource: Resource) -> list[str]:
    return [pod["metadata"]["name"] for pod in resource.pods()]


def check_the_pod_without_a_way_to_the_leader_is_named(resource: Resource) -> None:
    """While the follower cannot connect to the leader's control port, conditions name both pods."""

    def named() -> bool:
        pods, status = pod_names(resource), {"status": resource.status}
        if len(pods) < 2:
            return False
        words = (
            f"pod {pods[1]} does not reach the leader, pod {pods[0]}, at port {names.DEFAULT_CONTROL_PORT}"
        )
        return all(
            words in condition_of(status, kind).get("message", "") for kind in ("Ready", "Progressing")
        )

    processes.wait_until("the pod that does not reach the leader", named, timeout_s=NAMED_S)


def check_a_container_of_the_mesh_is_named(resource: Resource) -> None:
    """Stops the group: a container that ignores SIGTERM keeps its pod, and the group's message names both."""
    pods = pod_names(resource)
    assert containers(resource.pods()) == {names.CONTAINER_WORKER, SIDECAR}
    resource.cluster.kubectl("scale", "-n", NAMESPACE, f"hinf/{resource.name}", "--replicas=0")

    def named() -> bool:
        output = [group.get("message", "") for group in resource.status.get("groups", ())]
        return any(f"pod {pods[0]}" in each and f"container {SIDECAR} still runs" in each for each in output)

    processes.wait_until("the container of the mesh", named, timeout_s=20)
    assert pod_names(resource) == pods, "the container keeps the pods"


def opt_out_and_start(resource: Resource) -> None:
    """Starts the group again, whose pods now opt out of the mesh as those of any resource do."""
    patch = [
        {"op": "remove", "path": "/spec/roles/0/template"},
        {"op": "replace", "path": "/spec/replicas", "value": 1},
    ]
    edit = ("patch", "-n", NAMESPACE, f"hinf/{resource.name}", "--type=json", "-p", json.dumps(patch))
    resource.cluster.kubectl(*edit)


def check_the_pod_that_the_leader_does_not_reach_is_named(resource: Resource) -> None:
    """The start ends when the leader cannot connect to the follower, whose connections to it are allowed."""

    def address() -> str:
        pods = resource.pods()
        if len(pods) < 2 or any(SIDECAR in containers([pod]) for pod in pods):
            return ""
        return str(pods[1]["status"].get("podIP", ""))

    processes.wait_until("the follower's address", lambda: bool(address()), timeout_s=90)
    follower = address()

    def failures() -> list[dict[str, Any]]:
        return [each for group in resource.status.get("groups", ()) for each in group.get("failures", ())]

    with firewall.drops(resource.cluster, f"ip daddr {follower} tcp flags & (syn | ack) == syn"):
        processes.wait_until("the end of the start", lambda: bool(failures()), timeout_s=NAMED_S)
    (failure,) = failures()
    assert (failure["reason"], failure["rank"]) == (FailureReason.RANK_RAISED, 0), failure
    words = rf"pod 1 \(\S+, {re.escape(follower)}\): pod 0 cannot connect to port \d+ of this pod"
    assert re.search(words, failure["message"]), failure
    events = json.loads(resource.cluster.kubectl("get", "events", "-n", NAMESPACE, "-o", "json"))["items"]
    output = [event["message"] for event in events if event["reason"] == FailureReason.RANK_RAISED]
    assert any(re.search(words, each) for each in output), output


def keep_alive(resource: Resource) -> list[str]:
    """Returns the keep-alive of streams among the arguments of the stored plan."""
    plan_hash = resource.status["plans"][0]["hash"]
    (stored,) = resource.get("configmaps", "-l", f"{names.LABEL_PLAN}={plan_hash}")["items"]
    args = list(Plan.from_json(stored["data"][names.PLAN_KEY]).engine.extra_args)
    return args[args.index(KEEP_ALIVE) :][:2] if KEEP_ALIVE in args else []


def check_served(resource: Resource, output: str, model: tuple[Path, dict[str, Any]]) -> None:
    installed = resource.cluster
    resource.wait_ready(START_S)
    assert keep_alive(resource) == [KEEP_ALIVE, str(KEEP_ALIVE_S)], "a long prompt keeps CPUs busy"
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
