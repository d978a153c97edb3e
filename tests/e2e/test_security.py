"""Tests a namespaced release with two operators under quotas and the restricted Pod Security Standard.

The tests check which ports are open, which rights the operator has, and that no report contains a secret.
"""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from tests.cluster import processes
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.node import NodeCluster
from tests.cluster.volumes import volume_manifests
from tests.e2e.serving import LIMITED, Resource, add_quota
from tests.e2e.watching import condition_of

RELEASE = "secured"
OPERATOR = f"{RELEASE}-heteroinfer"
SYSTEM = "secured-system"
NAMESPACE = "secured"
VALUES = REPOSITORY / "tests/cluster/values.yaml"
OPERATOR_LABELS = "app.kubernetes.io/name=heteroinfer-operator"
START_S = 420.0
TOKEN = secrets.token_hex(24)
"""A Secret gives this value to workers. No log or report may contain it."""
SECRET_ENV = ("HF_TOKEN", "VLLM_API_KEY")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster) -> Iterator[NodeCluster]:
    """Installs the chart with Roles only, two replicas with all logs, and restricted pods only."""
    for namespace in (SYSTEM, NAMESPACE):
        node_cluster.kubectl("create", "namespace", namespace)
        node_cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        add_quota(node_cluster, namespace)
    sets = (
        *("scope=Namespaced", f"watchNamespaces={{{NAMESPACE}}}", "replicas=2", *LIMITED),
        *("logLevel=DEBUG", "logFormat=json", "networkPolicy.enabled=true"),
    )
    node_cluster.helm(
        "install", RELEASE, str(REPOSITORY / "charts/heteroinfer"), "--namespace", SYSTEM,
        "--values", str(VALUES), *(word for each in sets for word in ("--set", each)),
        "--wait", "--timeout", "120s",
    )  # fmt: skip
    yield node_cluster
    node_cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    node_cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.API_GROUP}", "--timeout=30s")


@pytest.fixture(scope="module")
def pair(installed: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Iterator[Resource]:
    """Yields examples/cpu-pair.yaml. The workers have a secret in their environment and log everything."""
    installed.kubectl(
        "create", "-n", NAMESPACE, "secret", "generic", "hub", "--from-file=token=/dev/stdin", stdin=TOKEN
    )
    installed.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, model[0]))
    document = yaml.safe_load((REPOSITORY / "examples/cpu-pair.yaml").read_text())
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    document["spec"]["engine"]["env"] = [
        *({"name": name, "valueFrom": reference} for name in SECRET_ENV),
        {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"},
    ]
    installed.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(document))
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="cpu-pair")
    resource.wait_ready(START_S)
    yield resource
    installed.kubectl(
        "delete", "hinf", "-n", NAMESPACE, "cpu-pair", "--cascade=foreground", "--timeout=60s", timeout_s=70
    )


def test_pods_have_the_limits_that_a_quota_requires(pair: Resource) -> None:
    for pod in pair.pods():
        (container,) = pod["spec"]["containers"]
        limits = {"cpu": "2", "memory": "3Gi", "ephemeral-storage": "1Gi"}
        assert container["resources"] == {
            "limits": limits,
            "requests": {"cpu": "500m", "memory": "3Gi", "ephemeral-storage": "1Gi"},
        }
        (scratch,) = (each for each in pod["spec"]["volumes"] if each["name"] == "scratch")
        assert scratch["emptyDir"] == {"sizeLimit": "1Gi"}
        # Its files count towards the container's memory, so the default of 8Gi is lowered to the limit.
        (shared,) = (each for each in pod["spec"]["volumes"] if each["name"] == "shm")
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    quota = pair.get("quota", "limits")["status"]["used"]
    assert quota == {"limits.cpu": "4", "limits.memory": "6Gi", "limits.ephemeral-storage": "2Gi"}


def operators(cluster: NodeCluster) -> list[str]:
    names_of = cluster.kubectl("get", "pods", "-n", SYSTEM, "-l", OPERATOR_LABELS, "-o", "name")
    return sorted(name.removeprefix("pod/") for name in names_of.split())


def run_python(cluster: NodeCluster, namespace: str, pod: str, script: str) -> str:
    return cluster.kubectl("exec", "-n", namespace, pod, "--", "python3", "-c", script).strip()


def reaches(cluster: NodeCluster, namespace: str, pod: str, address: str, port: int) -> bool:
    dial = (
        "import socket\n"
        f"try: socket.create_connection(('{address}', {port}), timeout=2); print('reached')\n"
        "except TimeoutError: print('no answer')"
    )
    output = run_python(cluster, namespace, pod, dial)
    assert output in {"reached", "no answer"}
    return output == "reached"


@contextlib.contextmanager
def stranger(cluster: NodeCluster, operator: str) -> Iterator[str]:
    """Yields a pod with the operator's image, in another namespace, that no policy selects."""
    where = ("-o", "jsonpath={.spec.containers[0].image}")
    image = cluster.kubectl("get", "pod", "-n", SYSTEM, operator, *where).strip()
    command = ("--restart=Never", "--image-pull-policy=Never", "--command", "--", "sleep", "600")
    cluster.kubectl("run", "-n", "default", "stranger", f"--image={image}", *command)
    try:
        cluster.kubectl("wait", "-n", "default", "--for=condition=Ready", "pod/stranger", "--timeout=60s")
        yield "stranger"
    finally:
        cluster.kubectl("delete", "pod", "-n", "default", "stranger", "--force", "--grace-period=0")


def test_an_operator_without_rights_on_nodes_serves(pair: Resource) -> None:
    (group,) = pair.status["groups"]
    assert (group.get("failures", []), group["phase"]) == ([], "Ready")
    log = pair.cluster.kubectl("logs", "-n", SYSTEM, "-l", OPERATOR_LABELS, "--tail=-1")
    for line in log.splitlines():
        assert {"level", "message"} <= json.loads(line).keys(), line
    assert "holding lease" in log
    assert " 403 " not in log
    roles = pair.cluster.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").split()
    ours = {role.partition("/")[2] for role in roles if OPERATOR in role}
    assert ours == {f"{OPERATOR}-view", f"{OPERATOR}-edit"}, (
        "only the roles for users, and none of the operator"
    )


def test_the_groups_own_ports_are_open_inside_and_closed_outside(pair: Resource) -> None:
    leader, follower = pair.pods()
    address = leader["status"]["podIP"]
    inside, operator = follower["metadata"]["name"], operators(pair.cluster)[0]
    assert reaches(pair.cluster, SYSTEM, operator, address, names.DEFAULT_HEALTH_PORT)
    assert not reaches(pair.cluster, SYSTEM, operator, address, names.DEFAULT_API_PORT), "its own policy"
    with stranger(pair.cluster, operator) as outside:
        for port in (names.DEFAULT_CONTROL_PORT, names.DEFAULT_EXECUTOR_PORT):
            assert reaches(pair.cluster, NAMESPACE, inside, address, port), port
            assert not reaches(pair.cluster, "default", outside, address, port), port
        assert not reaches(pair.cluster, "default", outside, address, names.DEFAULT_RENDEZVOUS_PORT)
        for port in (names.DEFAULT_API_PORT, names.DEFAULT_HEALTH_PORT, names.DEFAULT_METRICS_PORT):
            assert reaches(pair.cluster, "default", outside, address, port), port


def heteroinfer(cluster: NodeCluster, *arguments: str) -> str:
    """Runs a command of `heteroinfer` as a user with all rights, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "heteroinfer_operator.cli", *arguments, "-n", NAMESPACE],
        env={**os.environ, **cluster.environment()}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def test_top_shows_the_present_report_of_the_leader(pair: Resource) -> None:
    value = json.loads(heteroinfer(pair.cluster, "top", pair.name, "-o", "json"))
    assert value["note"] == ""
    (group,) = value["resources"][0]["groups"]
    (stored,) = pair.status["groups"]
    assert (group["live"], group["phase"], group["epoch"]) == (True, "Ready", stored["epoch"])
    assert group["kvUse"] == 0.0
    assert [(rank["rank"], rank["phase"]) for rank in group["ranks"]] == [(0, "Ready"), (1, "Ready")]
    assert {rank["node"] for rank in group["ranks"]} == {pair.cluster.node_name}
    assert "rank 1 cpu" in heteroinfer(pair.cluster, "top")


def log_of(cluster: NodeCluster, namespace: str, name: str) -> str:
    """Returns the log of a pod, or "" if the pod has gone or has not started."""
    try:
        return cluster.kubectl("logs", "-n", namespace, name)
    except ClusterError as error:
        if "NotFound" not in str(error) and "is waiting to start" not in str(error):
            raise
        return ""


def everything_reported(cluster: NodeCluster) -> dict[str, str]:
    """Returns all logs, events and objects that people read, except the Secret itself."""
    reported = {}
    kinds = "pods,services,configmaps,networkpolicies,leases,events,hinf"
    for namespace in (SYSTEM, NAMESPACE):
        reported[f"objects of {namespace}"] = cluster.kubectl("get", "-n", namespace, kinds, "-o", "yaml")
        for name in cluster.kubectl("get", "pods", "-n", namespace, "-o", "name").split():
            reported[f"log of {name}"] = log_of(cluster, namespace, name)
    reported["description"] = cluster.kubectl("describe", "-n", NAMESPACE, "hinf,pods")
    reported["top"] = heteroinfer(cluster, "top", "-o", "json")
    reported["logs"] = heteroinfer(cluster, "logs", "cpu-pair", "--tail", "100000")
    reported["previous"] = heteroinfer(cluster, "logs", "cpu-pair", "--previous")
    return reported


def test_secrets_are_in_no_report(pair: Resource) -> None:
    cluster = pair.cluster
    follower = pair.pods()[1]["metadata"]["name"]
    for name in SECRET_ENV:
        assert run_python(cluster, NAMESPACE, follower, f"import os; print(os.environ['{name}'])") == TOKEN
    path = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    hidden = {"the secret": TOKEN}
    for name in operators(cluster):
        hidden[name] = run_python(cluster, SYSTEM, name, f"print(open('{path}').read())")
    reported = everything_reported(cluster)
    assert "started rank 1 as process" in reported["logs"]

    started = re.search(r"started rank 1 as process (\d+)", reported[f"log of pod/{follower}"])
    assert started is not None
    run_python(cluster, NAMESPACE, follower, f"import os; os.kill({started[1]}, 9)")
    processes.wait_until("the failure", lambda: pair.status["groups"][0].get("failures"), timeout_s=30)
    after = {f"{what} after the failure": text for what, text in everything_reported(cluster).items()}
    assert "RankExited, rank 1, exit code -9" in after["previous after the failure"]
    found = [
        (who, what)
        for who, text in hidden.items()
        for what, output in (reported | after).items()
        if text in output
    ]
    assert found == []


def test_a_model_of_links_that_lead_outside_is_not_readable(
    pair: Resource, model: tuple[Path, dict[str, Any]]
) -> None:
    """A snapshot folder of a hub's cache has links to files elsewhere, which a volume of it lacks."""
    snapshot = model[0] / "snapshot"
    snapshot.mkdir()
    snapshot.chmod(0o755)
    (snapshot / "config.json").symlink_to("../../blobs/0123abcd")
    document = yaml.safe_load((REPOSITORY / "examples/cpu-pair.yaml").read_text())
    document["metadata"]["name"] = "of-links"
    document["spec"]["model"]["uri"] = "pvc://models/snapshot"
    pair.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(document))
    resource = Resource(cluster=pair.cluster, namespace=NAMESPACE, name="of-links")

    def said() -> dict[str, Any]:
        return condition_of({"status": resource.status}, "ModelReady")

    def is_reported() -> bool:
        return said().get("reason") == "ModelNotReadable"

    processes.wait_until("the model that is not readable", is_reported, timeout_s=60)
    condition = said()
    assert condition["status"] == "False"
    assert "config.json: is a link to ../../blobs/0123abcd, which does not exist here" in condition["message"]
    assert "cp -rL" in condition["message"]
    assert resource.pods() == []
    gone = ("--cascade=foreground", "--timeout=60s")
    pair.cluster.kubectl("delete", "hinf", "-n", NAMESPACE, "of-links", *gone, timeout_s=70)


def test_the_second_operator_takes_over(pair: Resource) -> None:
    cluster = pair.cluster

    def holder() -> str:
        lease = json.loads(cluster.kubectl("get", "lease", "-n", SYSTEM, OPERATOR, "-o", "json"))
        return str(lease["spec"].get("holderIdentity", "")).partition("_")[0]

    before = holder()
    assert before in operators(cluster)
    cluster.kubectl("delete", "pod", "-n", SYSTEM, before, "--grace-period=0", "--force", "--wait=false")
    processes.wait_until("another holder", lambda: holder() not in {"", before}, timeout_s=40)
