"""The whole way on a real node: install the chart, apply an example, ask, break it, remove it.

The tests are one story and run in this order; each leaves the group serving for the next.
"""

import concurrent.futures
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metrics, names
from tests.cluster import processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.node import NodeCluster
from tests.cluster.volumes import volume_manifests
from tests.e2e.serving import ReadyWatch, Resource
from tests.models import PROMPTS, REFERENCE_TOKENS

RELEASE = "heteroinfer"
VALUES = REPOSITORY / "tests/cluster/values.yaml"
SYSTEM = "heteroinfer-system"
NAMESPACE = "serving"
NOT_READY_S = 2.0
"""Ready must be false so soon after a rank's death."""
START_S = 420.0
OPERATOR_LABELS = "app.kubernetes.io/name=heteroinfer-operator"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Returns a folder for a volume with the model in `small`, and what transformers answers."""
    python = REPOSITORY / ".venv-worker/bin/python"
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.parent.chmod(0o755)  # workers are not root

    def run(*arguments: str) -> str:
        command = [str(python), "-m", "tests.models", *arguments]
        return subprocess.run(
            command, cwd=REPOSITORY, check=True, text=True, stdout=subprocess.PIPE, timeout=300
        ).stdout

    run(str(folder))
    return folder.parent, json.loads(run("reference", str(folder)))


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster) -> NodeCluster:
    """The chart, installed as the README says, with the images of this tree."""
    node_cluster.helm(
        "install", RELEASE, str(REPOSITORY / "charts/heteroinfer"), "--namespace", SYSTEM,
        "--create-namespace", "--values", str(VALUES), "--wait", "--timeout", "120s",
    )  # fmt: skip
    return node_cluster


@pytest.fixture(scope="module")
def pair(installed: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Iterator[Resource]:
    """examples/cpu-pair.yaml, applied in a namespace that enforces the restricted Pod Security Standard."""
    installed.kubectl("create", "namespace", NAMESPACE)
    installed.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    installed.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, model[0]))
    installed.kubectl("apply", "-n", NAMESPACE, "-f", str(REPOSITORY / "examples/cpu-pair.yaml"))
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="cpu-pair")
    resource.wait_ready(START_S)
    yield resource
    shutil.rmtree(model[0])


@pytest.fixture(scope="module")
def watch(pair: Resource) -> Iterator[ReadyWatch]:
    with ReadyWatch(pair) as ready:
        yield ready


def check_tokens(pair: Resource, reference: dict[str, Any]) -> None:
    """All prompts at once give the reference's tokens."""
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = {
            prompt: pool.submit(pair.complete, reference[prompt]["prompt_token_ids"], REFERENCE_TOKENS)
            for prompt in PROMPTS
        }
        for prompt, answer in asked.items():
            assert answer.result() == reference[prompt]["token_ids"]


def wait_next_epoch(pair: Resource, watch: ReadyWatch, fell_at: float, epoch: int) -> None:
    watch.wait_for(lambda status, _: status == "True", START_S, since=fell_at)
    (group,) = pair.status["groups"]
    assert group["epoch"] == epoch


def test_the_installation_tests_itself(installed: NodeCluster) -> None:
    said = installed.helm("test", RELEASE, "--namespace", SYSTEM, "--timeout", "60s")
    assert "Phase:          Succeeded" in said


def test_tokens_are_the_references(pair: Resource, model: tuple[Path, dict[str, Any]]) -> None:
    check_tokens(pair, model[1])


def test_the_columns_tell_the_state(pair: Resource) -> None:
    def row() -> dict[str, str]:
        header, values = pair.cluster.kubectl("get", "hinf", "-n", NAMESPACE, pair.name).splitlines()
        starts = [word.start() for word in re.finditer(r"\S+", header)]
        ends = [*starts[1:], len(values)]
        return {header[a:b].strip(): values[a:b].strip() for a, b in zip(starts, ends, strict=True)}

    # Step times come with the first look after the requests, at most a minute later.
    processes.wait_until("step times", lambda: row()["SLOWESTRANK"] != "", timeout_s=90)
    got = row()
    assert (got["READY"], got["GROUPS"], got["GPU"], got["CPU"]) == ("True", "1/1", "0", "2")
    assert float(got["STEPMS"]) > 0


def test_each_rank_has_metrics(pair: Resource) -> None:
    for pod in pair.pods():
        status, text = pair.cluster.pod_http(pod["status"]["podIP"], names.DEFAULT_METRICS_PORT, "/metrics")
        assert status == 200
        rank = pod["metadata"]["labels"][names.LABEL_POD_INDEX]
        decode = [
            line
            for line in text.splitlines()
            if line.startswith(f"{metrics.STEP_SECONDS}_count") and 'phase="decode"' in line
        ]
        assert len(decode) == 1
        assert f'rank="{rank}"' in decode[0]
        assert float(decode[0].split()[-1]) > 0


def test_the_groups_own_ports_are_closed_to_others(pair: Resource) -> None:
    leader = pair.pods()[0]["status"]["podIP"]
    operator = pair.cluster.kubectl("get", "pods", "-n", SYSTEM, "-l", OPERATOR_LABELS, "-o", "name").strip()

    def reaches(port: int) -> bool:
        dial = (
            "import socket\n"
            f"try: socket.create_connection(('{leader}', {port}), timeout=2); print('reached')\n"
            "except TimeoutError: print('no answer')"
        )
        said = pair.cluster.kubectl("exec", "-n", SYSTEM, operator, "--", "python3", "-c", dial).strip()
        assert said in {"reached", "no answer"}
        return said == "reached"

    assert reaches(names.DEFAULT_API_PORT)
    assert reaches(names.DEFAULT_HEALTH_PORT)
    assert not reaches(names.DEFAULT_CONTROL_PORT)
    assert not reaches(names.DEFAULT_RENDEZVOUS_PORT)
    assert not reaches(names.DEFAULT_EXECUTOR_PORT)


def test_a_deleted_follower_ends_the_epoch_and_the_next_serves(
    pair: Resource, watch: ReadyWatch, model: tuple[Path, dict[str, Any]]
) -> None:
    follower = pair.pods()[1]["metadata"]["name"]
    deleted_at = time.time()
    pair.cluster.kubectl("delete", "pod", "-n", NAMESPACE, follower, "--wait=false")
    fell_at = watch.wait_for(lambda status, _: status == "False", 10, since=deleted_at)
    assert fell_at - deleted_at < NOT_READY_S
    wait_next_epoch(pair, watch, fell_at, epoch=2)
    (group,) = pair.status["groups"]
    assert group["restarts"] == 1
    assert group["failures"][-1]["reason"] == "PodDeleted"
    assert follower in group["failures"][-1]["message"]
    check_tokens(pair, model[1])


def test_a_killed_rank_is_named_and_the_next_epoch_serves(
    pair: Resource, watch: ReadyWatch, model: tuple[Path, dict[str, Any]]
) -> None:
    killed_at = pair.kill_rank(pair.pods()[1], rank=1)
    fell_at = watch.wait_for(lambda status, _: status == "False", 10, since=killed_at)
    assert fell_at - killed_at < NOT_READY_S
    wait_next_epoch(pair, watch, fell_at, epoch=3)
    (group,) = pair.status["groups"]
    failure = group["failures"][-1]
    assert (failure["reason"], failure["rank"], failure["exitCode"]) == ("RankExited", 1, -9)
    assert group["restarts"] == 2
    events = pair.get("events")["items"]
    culprit = [event for event in events if event["reason"] == "RankExited"]
    assert any("rank 1" in event.get("message", event.get("note", "")) for event in culprit), events
    check_tokens(pair, model[1])


def test_the_operator_goes_and_comes_back_and_serving_goes_on(
    pair: Resource, model: tuple[Path, dict[str, Any]]
) -> None:
    before = [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in pair.pods()]
    version = pair.get(names.SINGULAR, pair.name)["metadata"]["resourceVersion"]
    cluster = pair.cluster
    old = cluster.kubectl("get", "pods", "-n", SYSTEM, "-l", OPERATOR_LABELS, "-o", "name").strip()
    cluster.kubectl("delete", "-n", SYSTEM, old, "--wait=false")
    reference = model[1][PROMPTS[0]]
    answered = 0

    def new_operator_works() -> bool:
        nonlocal answered
        assert pair.complete(reference["prompt_token_ids"], 4) == reference["token_ids"][:4]
        answered += 1
        pods = json.loads(cluster.kubectl("get", "pods", "-n", SYSTEM, "-l", OPERATOR_LABELS, "-o", "json"))
        living = [pod for pod in pods["items"] if f"pod/{pod['metadata']['name']}" != old]
        if len(pods["items"]) != 1 or not living or not living[0]["status"].get("podIP"):
            return False
        try:
            _, text = cluster.pod_http(living[0]["status"]["podIP"], 8080, "/metrics")
        except OSError:
            return False
        passes = [
            line
            for line in text.splitlines()
            if line.startswith(metrics.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS)
        ]
        return bool(passes) and float(passes[0].split()[-1]) > 0

    processes.wait_until("a pass of the new operator", new_operator_works, timeout_s=90)
    assert answered > 1
    assert [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in pair.pods()] == before
    after = pair.get(names.SINGULAR, pair.name)
    assert after["status"]["groups"][0]["epoch"] == 3
    if after["metadata"]["resourceVersion"] != version:
        # Step times are the one thing that may have been written meanwhile.
        assert after["status"]["groups"][0]["measuredTime"]


def test_delete_leaves_nothing(pair: Resource) -> None:
    pair.cluster.kubectl("delete", "hinf", "-n", NAMESPACE, pair.name, "--timeout=60s", timeout_s=70)
    kinds = "pods,services,configmaps,networkpolicies"
    selector = f"{names.LABEL_RESOURCE}={pair.name}"

    def left() -> list[str]:
        return pair.cluster.kubectl("get", "-n", NAMESPACE, kinds, "-l", selector, "-o", "name").split()

    # The garbage collector takes over 20 s for children of a new kind.
    processes.wait_until("the end of all children", lambda: not left(), timeout_s=60)


def test_uninstall_takes_the_operator_and_keeps_the_kind(pair: Resource) -> None:
    cluster = pair.cluster
    cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    assert cluster.kubectl("get", "deployments", "-n", SYSTEM, "-o", "name").strip() == ""
    crd = f"{names.PLURAL}.{names.API_GROUP}"
    assert crd in cluster.kubectl("get", "crd", "-o", "name")
    cluster.kubectl("delete", "crd", crd, "--timeout=30s")
