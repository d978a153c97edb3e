"""Tests each row of the fault matrix on a group of real ranks on two real nodes.

All rows use one group, one row after another. Each row leaves the group serving for the next row. `make e2e`
leaves out the rows marked `every_fault`; `make faults` runs all.

With OUT=DIR in the environment, the measured times are stored in DIR/faults.json. From this file, `python -m
tests.e2e.faults.table` makes the table of docs/contributor/faults.md.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from heteroinfer_contract import names
from tests.cluster import processes
from tests.cluster.joined_node import JoinedNode, joined_node
from tests.cluster.node import NodeCluster
from tests.cluster.volumes import volume_manifests
from tests.e2e.faults import injections
from tests.e2e.faults.matrix import MATRIX, NEXT_EPOCH_S, RANK_DIES_S, Blocked, Ends, Fault, GoesOn, Waits
from tests.e2e.faults.measuring import find_epochs, find_turn, keep
from tests.e2e.faults.resources import PAIR, build_pair
from tests.e2e.faults.scene import Answer, Scene
from tests.e2e.faults.table import Measured
from tests.e2e.serving import RELEASE, SYSTEM, Resource, install
from tests.e2e.watching import Change, Watch, condition_of
from tests.models import PROMPTS

NAMESPACE = "faults"
Model: TypeAlias = tuple[Path, dict[str, Any]]
START_S = 300.0
CLEAN_S = 40.0
"""Time in which the kernel and a returning kubelet remove the processes and pods of an old epoch."""

pytestmark = pytest.mark.timeout(480)
ROWS = [
    pytest.param(fault, id=fault.name, marks=() if fault.always else pytest.mark.every_fault)
    for fault in MATRIX
]


@pytest.fixture(scope="module")
def second(node_cluster: NodeCluster) -> Iterator[JoinedNode]:
    with joined_node(node_cluster) as node:
        yield node


@pytest.fixture(scope="module")
def scene(node_cluster: NodeCluster, second: JoinedNode, model: Model) -> Iterator[Scene]:
    """Installs the chart, and yields a group that serves on two nodes."""
    cluster = node_cluster
    install(cluster)
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, model[0]))
    pair = Resource(cluster=cluster, namespace=NAMESPACE, name=PAIR)
    group = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
    workers = f"{names.LABEL_RESOURCE}={PAIR},{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={workers}"
    with Watch(cluster, group) as resources, Watch(cluster, pods) as of_pods:
        manifest = json.dumps(build_pair(second.name))
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=manifest)
        pair.wait_ready(START_S)
        reference = model[1][PROMPTS[0]]
        answer = Answer(
            url=pair.url(), prompt=reference["prompt_token_ids"], tokens=reference["token_ids"][:8]
        )
        yield Scene(pair=pair, second=second, resources=resources, pods=of_pods, answer=answer)
    _remove(cluster)


def _remove(cluster: NodeCluster) -> None:
    """Removes everything, and checks that no object of any row is left."""
    cluster.kubectl(
        "delete", "hinf", "-n", NAMESPACE, "--all", "--cascade=foreground", "--timeout=60s", timeout_s=70
    )
    kinds = "pods,services,configmaps,networkpolicies,poddisruptionbudgets"

    def left() -> list[str]:
        selector = f"{names.LABEL_RESOURCE}"
        return cluster.kubectl("get", "-n", NAMESPACE, kinds, "-l", selector, "-o", "name").split()

    # The garbage collector takes over 20 s for children of a new kind.
    processes.wait_until("the end of all children", lambda: not left(), timeout_s=60)
    cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.API_GROUP}", "--timeout=30s")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s", timeout_s=70)


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Measured]]:
    """Collects the measured times of each row, and writes them to $OUT/faults.json at the end."""
    found: dict[str, Measured] = {}
    yield found
    report = {name: value.dump() for name, value in found.items()}
    keep("faults.json", json.dumps(report, indent=1))


@pytest.mark.parametrize("fault", ROWS)
def test_the_group_reacts_to_each_fault_as_expected(
    fault: Fault, scene: Scene, measured: dict[str, Measured]
) -> None:
    scene.pair.wait_ready(START_S)
    match fault.outcome:
        case Ends() as ends:
            scene.place(START_S)
            scene.wait_out_failures(counted=ends.counted)
            measured[fault.name] = check_end(scene, fault, ends)
        case GoesOn() as goes_on:
            measured[fault.name] = check_going_on(scene, fault, goes_on)
        case Waits() as waits:
            measured[fault.name] = check_waiting(scene, fault, waits)
        case Blocked() as blocked:
            scene.wait_out_failures(counted=True)  # a pod is deleted, as in the row above
            measured[fault.name] = check_blocked(scene, fault, blocked)


def check_end(scene: Scene, fault: Fault, expected: Ends) -> Measured:
    """Checks that the fault ends the epoch with the expected culprit, and the next epoch serves in time."""
    epoch, count = scene.group["epoch"], len(scene.pair.pods())
    children = scene.children()
    with fault.inject(scene) as at:
        ended_epoch = scene.resources.wait_for(
            "Ready=False", lambda change: _ready(change) == "False", expected.ready_false_s + 10, since=at
        )
        ready = scene.resources.wait_for(
            "the next epoch", lambda change: _ready(change) == "True", START_S, since=ended_epoch.at
        )
        group = scene.group
        turn = find_turn(scene.pods.changes, epoch, count)
        scene.check_answer()
    failure = group["failures"][-1]
    check_failure(failure, expected, epoch)
    check_event(scene, PAIR, failure["reason"], f"epoch {epoch}")
    took = Measured(
        ready_false_s=ended_epoch.at - at,
        old_gone_s=turn.old_gone - at,
        next_epoch_s=turn.wait_s,
        ready_s=ready.at - at,
    )
    assert took.ready_false_s is not None
    assert took.ready_false_s <= expected.ready_false_s, took
    assert turn.first_created >= turn.old_gone, f"two epochs at the same time: {turn}"
    assert turn.wait_s <= NEXT_EPOCH_S, took
    assert turn.old_gone - ended_epoch.at <= expected.old_gone_s, took
    assert turn.epoch == group["epoch"], "the group serves in the next epoch"
    check_nothing_orphaned(scene, group["epoch"])
    processes.wait_until(
        "the same children as before the fault", lambda: scene.children() == children, timeout_s=CLEAN_S
    )
    return took


def check_failure(failure: dict[str, Any], expected: Ends, epoch: int) -> None:
    assert failure["reason"] in {expected.reason, expected.or_reason}, failure
    got = (failure["epoch"], failure.get("rank"), failure.get("exitCode"), failure["counted"])
    assert got == (epoch, expected.rank, expected.exit_code, expected.counted), failure
    assert re.search(expected.words, failure["message"]), failure


def check_event(scene: Scene, resource: str, reason: str, words: str) -> None:
    def reported() -> bool:
        events = scene.events(resource)
        return any(event["reason"] == reason and words in event.get("note", "") for event in events)

    processes.wait_until(f"event {reason}: {words}", reported, timeout_s=10)


def check_nothing_orphaned(scene: Scene, epoch: int) -> None:
    """Checks that neither node has a pod or process of an old epoch, whatever Kubernetes knows of it."""
    labels = {pod["metadata"]["labels"][names.LABEL_EPOCH] for pod in scene.pair.pods()}
    assert labels == {str(epoch)}
    processes.wait_until(
        f"the end of all processes except those of epoch {epoch}",
        lambda: scene.process_epochs() == {epoch},
        timeout_s=CLEAN_S,
    )


def check_going_on(scene: Scene, fault: Fault, expected: GoesOn) -> Measured:
    """Checks that a fault changes no pod, and that the group answers during it."""
    before, uids = scene.group, scene.pod_uids()
    with fault.inject(scene) as at:
        if expected.slowest_rank:
            found = wait_slowest(scene, expected, at)
        scene.check_answer()
    after = scene.group
    assert scene.pod_uids() == uids
    assert (after["epoch"], after["restarts"]) == (before["epoch"], before["restarts"])
    assert after.get("failures") == before.get("failures")
    assert scene.resources.find(lambda change: _ready(change) == "False", since=at) is None
    check_operator_works(scene)
    return Measured(said_s=found - at) if expected.slowest_rank else Measured(well_s=time.time() - at)


def wait_slowest(scene: Scene, expected: GoesOn, at: float) -> float:
    """Returns the time at which the column SLOWESTRANK first named the slow rank."""

    def named(change: Change) -> bool:
        summary = change.stored.get("status", {}).get("summary", {})
        return change.name == PAIR and str(summary.get("slowestRank", "")).startswith(expected.slowest_rank)

    deadline = at + expected.within_s
    while (found := scene.resources.find(named, since=at)) is None:
        assert time.time() < deadline, scene.pair.status
        scene.check_answer()
        touch(scene)
    return found.at


def touch(scene: Scene) -> None:
    """Changes an annotation of the pair, so that the operator reconciles it."""
    scene.cluster.kubectl(
        "annotate", "hinf", "-n", NAMESPACE, PAIR, "--overwrite", f"heteroinfer.test/touched={time.time()}"
    )


def check_operator_works(scene: Scene) -> None:
    """Checks that the operator observes a change of the pair that needs no new pods."""
    body = json.dumps({"spec": {"restart": {"backoffMax": f"{60 + int(time.time()) % 60}s"}}})
    scene.cluster.kubectl("patch", "hinf", "-n", NAMESPACE, PAIR, "--type=merge", "-p", body)
    wanted = scene.pair.get(names.SINGULAR, PAIR)["metadata"]["generation"]
    processes.wait_until(
        "a reconcile of the operator",
        lambda: scene.pair.status.get("observedGeneration") == wanted,
        timeout_s=60,
    )


def check_waiting(scene: Scene, fault: Fault, expected: Waits) -> Measured:
    """Checks that a resource that cannot start reports the reason and has no pods. Deletes it."""

    def is_expected(change: Change) -> bool:
        condition = condition_of(change.stored, expected.condition)
        return (
            change.name == expected.resource
            and condition.get("status") != "True"
            and condition.get("reason") == expected.reason
            and re.search(expected.words, condition.get("message", "")) is not None
        )

    with fault.inject(scene) as at:
        reported = scene.resources.wait_for(f"{expected}", is_expected, expected.within_s, since=at)
        if expected.event:
            check_event(scene, expected.resource, expected.event, "")
    broken = Resource(cluster=scene.cluster, namespace=NAMESPACE, name=expected.resource)
    assert condition_of({"status": broken.status}, "Ready")["status"] != "True"
    assert all(not group.get("failures") for group in broken.status.get("groups", ()))
    scene.cluster.kubectl(
        "delete",
        "hinf",
        "-n",
        NAMESPACE,
        expected.resource,
        "--cascade=foreground",
        "--timeout=60s",
        timeout_s=70,
    )
    assert broken.pods() == []
    return Measured(said_s=reported.at - at)


def check_blocked(scene: Scene, fault: Fault, expected: Blocked) -> Measured:
    """Checks a group of which an object is refused: it serves, loses a pod, restarts and suspends."""

    def is_expected(change: Change) -> bool:
        reported = condition_of(change.stored, expected.condition)
        generation = change.stored["metadata"]["generation"]
        got = reported.get("status"), reported.get("reason"), reported.get("observedGeneration")
        wanted = expected.status, expected.reason, generation
        return (
            change.name == PAIR
            and got == wanted
            and re.search(expected.words, reported["message"]) is not None
        )

    epoch, count = scene.group["epoch"], len(scene.pair.pods())
    with fault.inject(scene) as at:
        reported = scene.resources.wait_for(f"{expected}", is_expected, expected.within_s, since=at)
        assert _says(reported, "Available") == "True", "the group keeps serving"
        scene.check_answer()
        with injections.delete_pod(1)(scene) as deleted:
            down = wait_available(scene, "False", expected.available_false_s + 10, since=deleted)
            up = wait_available(scene, "True", START_S, since=down.at)
        scene.check_answer()
        assert is_expected(up), "it is refused all the time"
        assert scene.resources.find(lambda change: _ready(change) == "True", since=reported.at) is None
        turn = find_turn(scene.pods.changes, epoch, count)
        check_suspend(scene)
    failure = scene.group["failures"][-1]
    assert (failure["reason"], failure["epoch"]) == ("PodDeleted", epoch), failure
    assert down.at - deleted <= expected.available_false_s, f"Available=False after {down.at - deleted:.1f} s"
    assert turn.first_created >= turn.old_gone, f"two epochs at the same time: {turn}"
    assert turn.wait_s <= NEXT_EPOCH_S, turn
    scene.pair.wait_ready(START_S)
    now = scene.group["epoch"]
    begun = find_epochs(scene.pods.changes, after=epoch)
    assert begun == [turn.epoch, now], "one change for the pod, one for the suspension"
    check_nothing_orphaned(scene, now)
    return Measured(
        said_s=reported.at - at,
        ready_false_s=down.at - deleted,
        old_gone_s=turn.old_gone - deleted,
        next_epoch_s=turn.wait_s,
        ready_s=up.at - deleted,
    )


def check_suspend(scene: Scene) -> None:
    """Checks that the group stops in order when the resource is suspended, and serves again after that."""
    at = scene.change_spec(suspend=True)
    wait_available(scene, "False", RANK_DIES_S, since=at)
    processes.wait_until("the end of all pods", lambda: not scene.pair.pods(), timeout_s=30)
    resumed = scene.change_spec(suspend=False)
    wait_available(scene, "True", START_S, since=resumed)
    scene.check_answer()


def wait_available(scene: Scene, status: str, timeout_s: float, *, since: float) -> Change:
    def so(change: Change) -> bool:
        return _says(change, "Available") == status

    return scene.resources.wait_for(f"Available={status}", so, timeout_s, since=since)


def _ready(change: Change) -> str:
    return _says(change, "Ready")


def _says(change: Change, condition: str) -> str:
    """Returns the message of a condition of the pair, or "" for any other resource."""
    return str(condition_of(change.stored, condition).get("status", "")) if change.name == PAIR else ""
