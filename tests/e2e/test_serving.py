"""Tests what a user does on a real node: install the chart, apply an example, send requests, uninstall.

The tests depend on each other and run in this order. Each leaves the group serving for the next. The folder
faults/ has the tests of faults.
"""

import concurrent.futures
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.calibration import Calibration
from heteroinfer_operator.nodes.calibrations import MeasuredKind
from heteroinfer_operator.nodes.cpu_features import AVX512_BF16
from heteroinfer_operator.planning.rates import describe_cpu_defaults
from tests.cluster import processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.node import NodeCluster
from tests.cluster.volumes import volume_manifests
from tests.e2e.serving import OPERATOR_LABELS, RELEASE, SYSTEM, Resource, install
from tests.models import PROMPTS, REFERENCE_TOKENS

NAMESPACE = "serving"
START_S = 420.0
CALIBRATION = (
    "calibration.limitSeconds=20",
    "calibration.nodeKinds[0].name=small",
    "calibration.nodeKinds[0].nodeSelector.kind=small",
)
MEASURED_S = 180.0
"""Three tries of 20 s, each with a start. The node runs nothing else, but the machine may be busy."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster) -> NodeCluster:
    """Installs the chart as the README says, with images of this tree and calibration of a kind of nodes."""
    install(node_cluster, *CALIBRATION)
    return node_cluster


@pytest.fixture(scope="module")
def pair(installed: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Resource:
    """Yields examples/cpu-pair.yaml in a namespace that enforces the restricted Pod Security Standard."""
    installed.kubectl("create", "namespace", NAMESPACE)
    installed.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    installed.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, model[0]))
    installed.kubectl("apply", "-n", NAMESPACE, "-f", str(REPOSITORY / "examples/cpu-pair.yaml"))
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="cpu-pair")
    resource.wait_ready(START_S)
    return resource


DENY_CALIBRATIONS = json.dumps(
    {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny-calibrations", "namespace": SYSTEM},
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "heteroinfer-calibration"}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }
)
"""Has the effect of a policy that denies all traffic of the namespace. The operator keeps its own
policies."""


def check_tokens(pair: Resource, reference: dict[str, Any]) -> None:
    """Sends all prompts at the same time, and compares the tokens with the reference."""
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = {
            prompt: pool.submit(pair.complete, reference[prompt]["prompt_token_ids"], REFERENCE_TOKENS)
            for prompt in PROMPTS
        }
        for prompt, answer in asked.items():
            assert answer.result() == reference[prompt]["token_ids"]


def test_helm_test_succeeds_after_an_installation(installed: NodeCluster) -> None:
    output = installed.helm("test", RELEASE, "--namespace", SYSTEM, "--timeout", "60s")
    assert "Phase:          Succeeded" in output


def test_tokens_equal_those_of_the_reference(pair: Resource, model: tuple[Path, dict[str, Any]]) -> None:
    check_tokens(pair, model[1])


def test_kubectl_columns_show_the_state(pair: Resource) -> None:
    def row() -> dict[str, str]:
        header, values = pair.cluster.kubectl("get", "hinf", "-n", NAMESPACE, pair.name).splitlines()
        starts = [word.start() for word in re.finditer(r"\S+", header)]
        ends = [*starts[1:], len(values)]
        return {header[a:b].strip(): values[a:b].strip() for a, b in zip(starts, ends, strict=True)}

    # Step times come with the first query after the requests, at most a minute later.
    processes.wait_until("step times", lambda: row()["SLOWESTRANK"] != "", timeout_s=90)
    got = row()
    assert (got["READY"], got["GROUPS"], got["GPU"], got["CPU"]) == ("True", "1/1", "0", "2")
    assert float(got["STEPMS"]) > 0


LOCKED_LIMIT = f"{metric_names.LOCKED_MEMORY_LIMIT_BYTES}{{"


def test_each_rank_has_metrics(pair: Resource) -> None:
    for pod in pair.pods():
        status, text = pair.cluster.pod_http(pod["status"]["podIP"], names.DEFAULT_METRICS_PORT, "/metrics")
        assert status == 200
        rank = pod["metadata"]["labels"][names.LABEL_POD_INDEX]
        decode = [
            line
            for line in text.splitlines()
            if line.startswith(f"{metric_names.STEP_SECONDS}_count") and 'phase="decode"' in line
        ]
        assert len(decode) == 1
        assert f'rank="{rank}"' in decode[0]
        assert float(decode[0].split()[-1]) > 0
        # The limit of the pod's container runtime. RDMA needs a large one.
        (limit,) = (line for line in text.splitlines() if line.startswith(LOCKED_LIMIT))
        assert float(limit.split()[-1]) > 0


def test_the_status_has_the_locked_memory_and_the_transport_of_each_rank(pair: Resource) -> None:
    (group,) = pair.status["groups"]
    assert len(group["members"]) == 2
    for member in group["members"]:
        assert member["lockedMemoryLimitBytes"] > 0
        assert member["lockedMemoryBytes"] >= 0
        assert member["transports"] == ["stages:gloo"]


def test_the_groups_own_ports_are_closed_to_other_pods(pair: Resource) -> None:
    leader = pair.pods()[0]["status"]["podIP"]
    operator = pair.cluster.kubectl("get", "pods", "-n", SYSTEM, "-l", OPERATOR_LABELS, "-o", "name").strip()

    def reaches(port: int) -> bool:
        dial = (
            "import socket\n"
            f"try: socket.create_connection(('{leader}', {port}), timeout=2); print('reached')\n"
            "except TimeoutError: print('no answer')"
        )
        output = pair.cluster.kubectl("exec", "-n", SYSTEM, operator, "--", "python3", "-c", dial).strip()
        assert output in {"reached", "no answer"}
        return output == "reached"

    assert reaches(names.DEFAULT_API_PORT)
    assert reaches(names.DEFAULT_HEALTH_PORT)
    assert not reaches(names.DEFAULT_CONTROL_PORT)
    assert not reaches(names.DEFAULT_RENDEZVOUS_PORT)
    assert not reaches(names.DEFAULT_EXECUTOR_PORT)


def planned_by(calibration: Calibration, folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Returns what `heteroinfer plan` prints for the same resource and calibration."""
    file = tmp_path / "calibration.json"
    file.write_text(calibration.to_json())
    example = str(REPOSITORY / "examples/cpu-pair.yaml")
    command = [sys.executable, "-m", "heteroinfer_operator.cli", "plan", "-f", example, "-o", "json"]
    command += ["--model-dir", str(folder), "--calibration", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


def test_a_new_node_is_measured_and_predictions_use_the_result(
    pair: Resource, model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    cluster, node = pair.cluster, pair.cluster.node_name

    def made_of() -> str:
        return str(pair.status["plans"][0]["calibration"])

    def uids() -> list[str]:
        return [pod["metadata"]["uid"] for pod in pair.pods()]

    before, pods = pair.status["plans"][0], uids()
    assert made_of() == f"role cpu: {describe_cpu_defaults(AVX512_BF16)}"
    selector = "app.kubernetes.io/component=calibration"
    (job,) = json.loads(cluster.kubectl("get", "jobs", "-n", SYSTEM, "-l", selector, "-o", "json"))["items"]
    assert job["status"]["active"] == 1, "it waits for a node of its kind"
    # the chart's own policy allows their traffic
    cluster.kubectl("apply", "-f", "-", stdin=DENY_CALIBRATIONS)
    cluster.kubectl("label", "node", node, "kind=small")
    name = job["metadata"]["name"]
    cluster.kubectl(
        "wait", "-n", SYSTEM, "--for=condition=Complete", f"job/{name}", f"--timeout={MEASURED_S:.0f}s",
        timeout_s=MEASURED_S + 10,
    )  # fmt: skip
    # On a busy node, a first measuring pod may have exceeded its deadline.
    of_job = ("-l", f"batch.kubernetes.io/job-name={name}", "--field-selector=status.phase=Succeeded")
    succeeded = cluster.kubectl("get", "pods", "-n", SYSTEM, *of_job, "-o", "name").strip()
    output = cluster.kubectl("logs", "-n", SYSTEM, succeeded)
    config_map = cluster.kubectl("get", "configmap", "-n", SYSTEM, f"{RELEASE}-measured", "-o", "json")
    kept = MeasuredKind.from_entry("small.json", json.loads(config_map)["data"]["small.json"])
    system = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    assert kept.selector == {"kind": "small", **system}
    assert kept.calibration.hardware.cpu in Path("/proc/cpuinfo").read_text()
    assert f"calibration {kept.calibration.hash} of" in output

    processes.wait_until("its prediction", lambda: kept.calibration.hash in made_of(), timeout_s=30)
    after, planned = pair.status["plans"][0], planned_by(kept.calibration, model[0] / "small", tmp_path)
    assert after["calibration"] == f"role cpu: {planned['rates']['cpu']}"
    assert after["predictedStepMs"] == planned["predictedStepMs"]["predicted"]
    assert (uids(), after["hash"]) == (pods, before["hash"])
    cluster.kubectl("label", "node", node, "kind-")


def test_a_deletion_leaves_no_object(pair: Resource) -> None:
    pair.cluster.kubectl("delete", "hinf", "-n", NAMESPACE, pair.name, "--timeout=60s", timeout_s=70)
    kinds = "pods,services,configmaps,networkpolicies"
    selector = f"{names.LABEL_RESOURCE}={pair.name}"

    def left() -> list[str]:
        return pair.cluster.kubectl("get", "-n", NAMESPACE, kinds, "-l", selector, "-o", "name").split()

    # The garbage collector takes over 20 s for children of a new kind.
    processes.wait_until("the end of all children", lambda: not left(), timeout_s=60)


def test_uninstall_removes_the_operator_and_keeps_the_crd(pair: Resource) -> None:
    cluster = pair.cluster
    cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    kinds = "deployments,jobs,roles,rolebindings,serviceaccounts,configmaps"
    left = set(cluster.kubectl("get", kinds, "-n", SYSTEM, "-o", "name").split())
    measured = {f"configmap/{RELEASE}-measured"}  # stays if a calibration has ended
    assert left - measured == {"serviceaccount/default", "configmap/kube-root-ca.crt"}
    crd = f"{names.PLURAL}.{names.API_GROUP}"
    assert crd in cluster.kubectl("get", "crd", "-o", "name")
    cluster.kubectl("delete", "crd", crd, "--timeout=30s")
