"""Tests moe.yaml and moe-nodes.yaml on a real node: experts on other ranks of the pod, and in other pods.

The tests upgrade the chart and kill ranks. The node has no GPU, so the attention runs on a CPU rank, which
uses the same protocol as a GPU rank. The tests depend on each other and run in this order.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.failure import FailureReason
from tests.cluster import processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.node import NodeCluster
from tests.cluster.volumes import volume_manifests
from tests.e2e.serving import RELEASE, SYSTEM, VALUES, Resource, install
from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.groups import make_model, reference

NAMESPACE = "experts"
START_S = 420.0
SAID_WITHIN_S = 2.0

pytestmark = [pytest.mark.timeout(900), pytest.mark.every_fault]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yields the folder of a volume that has the model in `moe`. Workers are not root, and can read it."""
    volume = tmp_path_factory.mktemp("volume")
    made = make_model("qwen3_moe", volume)
    made.rename(volume / "moe")
    for path in (volume, *volume.parents[:2], *volume.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return volume


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return reference(folder / "moe")


@pytest.fixture(scope="module")
def experts(node_cluster: NodeCluster, folder: Path) -> Iterator[Resource]:
    """Yields the example, which serves in a namespace that enforces the restricted Pod Security Standard."""
    install(node_cluster)
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    node_cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    node_cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, folder))
    node_cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(REPOSITORY / "examples/moe.yaml"))
    resource = Resource(cluster=node_cluster, namespace=NAMESPACE, name="moe")
    resource.wait_ready(START_S)
    yield resource
    node_cluster.kubectl(
        "delete", "hinf", "-n", NAMESPACE, "--all", "--cascade=foreground", "--timeout=60s", timeout_s=70
    )
    node_cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")


def check_tokens(resource: Resource, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(tiny_models.PROMPTS, expected, strict=True):
        assert resource.complete(list(prompt), len(tokens)) == tokens


def uids(resource: Resource) -> list[str]:
    return [pod["metadata"]["uid"] for pod in resource.pods()]


def test_tokens_equal_those_of_the_reference(experts: Resource, expected: list[list[int]]) -> None:
    check_tokens(experts, expected)
    assert len(experts.pods()) == 1
    ranks = experts.status["plans"][0]["ranks"]
    assert [(rank["rank"], rank["device"]) for rank in ranks] == [(0, "CPU"), (1, "CPU")]


def test_the_feed_forward_rank_counts_computed_rows(experts: Resource) -> None:
    (pod,) = experts.pods()
    ports = (names.DEFAULT_METRICS_PORT, names.DEFAULT_METRICS_PORT + 1)
    texts = [experts.cluster.pod_http(pod["status"]["podIP"], port, "/metrics")[1] for port in ports]
    rows = [
        float(line.split()[-1])
        for text in texts
        for line in text.splitlines()
        if line.startswith(f"{metric_names.FEED_FORWARD_ROWS_TOTAL}{{")
    ]
    assert sum(rows) > 0


def test_an_upgrade_of_the_chart_changes_no_pod(experts: Resource, expected: list[list[int]]) -> None:
    before, cluster = uids(experts), experts.cluster
    secret = ("get", "secret", f"{RELEASE}-operator-key", "--namespace", SYSTEM, "-o", "jsonpath={.data}")
    key = cluster.kubectl(*secret)
    for way in ((), ("--force",)):
        cluster.helm(
            "upgrade", RELEASE, str(REPOSITORY / "charts/heteroinfer"), "--namespace", SYSTEM,
            "--values", str(VALUES), "--set", "podAnnotations.upgraded=yes",
            "--wait", "--timeout", "120s", *way,
        )  # fmt: skip
    time.sleep(5)  # the new operator has reconciled each resource
    assert uids(experts) == before
    assert cluster.kubectl(*secret) == key
    check_tokens(experts, expected)


def check_death(resource: Resource, pod: str, rank: int) -> None:
    """Kills a rank. The status must name the rank in time, and the group must start again and serve."""
    epoch = resource.status["groups"][0]["epoch"]
    resource.execute(pod, f"import os; os.kill({resource.rank_pid(pod, rank)}, 9)")
    killed = time.monotonic()

    def failures() -> list[dict[str, object]]:
        group = resource.status["groups"][0]
        return [failure for failure in group.get("failures", ()) if failure["epoch"] == epoch]

    processes.wait_until("the failure in the status", lambda: bool(failures()), timeout_s=SAID_WITHIN_S + 1)
    print(f"reported after {time.monotonic() - killed:.2f} s: {json.dumps(failures())}")
    (failure,) = failures()
    assert (failure["reason"], failure["rank"]) == (FailureReason.RANK_EXITED, rank)
    processes.wait_until(
        "the next epoch", lambda: resource.status["groups"][0]["epoch"] > epoch, timeout_s=60
    )
    resource.wait_ready(START_S)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_killed_is_reported_and_the_group_serves_again(
    experts: Resource, expected: list[list[int]], rank: int
) -> None:
    (pod,) = experts.pods()
    check_death(experts, pod["metadata"]["name"], rank)
    check_tokens(experts, expected)


@pytest.fixture(scope="module")
def experts_in_pods(experts: Resource) -> Resource:
    """Yields the example with experts in two pods of their own, after the other example was removed."""
    cluster = experts.cluster
    cluster.kubectl(
        "delete", "hinf", "-n", NAMESPACE, "--all", "--cascade=foreground", "--timeout=60s", timeout_s=70
    )
    text = (REPOSITORY / "examples/moe-nodes.yaml").read_text()
    assert 'cpu: "1"' in text
    smaller = text.replace('cpu: "1"', "cpu: 500m")  # all three pods must fit a node with two cores
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=smaller)
    resource = Resource(cluster=cluster, namespace=NAMESPACE, name="moe-nodes")
    resource.wait_ready(START_S)
    return resource


def names_of(resource: Resource) -> list[str]:
    """Returns the names of a group's pods by their index."""
    return sorted(pod["metadata"]["name"] for pod in resource.pods())


def test_experts_on_two_pods_give_the_tokens_of_the_reference(
    experts_in_pods: Resource, expected: list[list[int]]
) -> None:
    check_tokens(experts_in_pods, expected)
    assert len(experts_in_pods.pods()) == 3
    ranks = experts_in_pods.status["plans"][0]["ranks"]
    assert [(rank["rank"], rank["role"]) for rank in ranks] == [(0, "gpu"), (1, "cpu"), (2, "cpu")]


def test_a_killed_rank_of_another_pod_is_reported_and_the_group_serves_again(
    experts_in_pods: Resource, expected: list[list[int]]
) -> None:
    check_death(experts_in_pods, names_of(experts_in_pods)[2], 2)
    check_tokens(experts_in_pods, expected)


def test_a_rollout_replaces_all_three_pods(experts_in_pods: Resource, expected: list[list[int]]) -> None:
    before = set(uids(experts_in_pods))
    patch = json.dumps({"spec": {"engine": {"maxModelLen": 512}}})
    experts_in_pods.cluster.kubectl(
        "patch", "hinf", "moe-nodes", "-n", NAMESPACE, "--type=merge", "--patch", patch
    )
    processes.wait_until(
        "new pods",
        lambda: len(experts_in_pods.pods()) == 3 and not before & set(uids(experts_in_pods)),
        timeout_s=120,
    )
    experts_in_pods.wait_ready(START_S)
    check_tokens(experts_in_pods, expected)
