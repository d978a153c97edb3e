"""Tests rejected pods, lost nodes and grace periods on a real API server.

No kubelet runs here: the tests play it.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, NODE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from heteroinfer_operator.kube.unlabelled_pods import LOOK_AGAIN_S
from tests.integration.operator.life import (
    COLLECTED_S,
    Install,
    bind,
    bring_up,
    condition,
    is_ready,
    nth_epoch,
    pod_of,
    serve_epoch,
    status_of,
    stored,
    workers,
)
from tests.integration.operator.running_operator import add_node, end_rank, operator, until


@pytest.fixture
async def far(server: ApiServer) -> AsyncIterator[str]:
    """Adds a second node, for the follower."""
    await add_node(server, "far", {"key": "tests.heteroinfer.dev/nobody", "effect": "NoSchedule"})
    yield "far"
    await server.delete(NODE.path(None, "far"), {})


async def pods(server: ApiServer, namespace: str) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in await stored(server, POD, namespace)}


async def change(server: ApiServer, namespace: str, **spec: Any) -> None:
    await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": spec})


async def silence(server: ApiServer, node: str, since: datetime) -> None:
    """Marks a node as silent, in place of the node controller."""
    ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "silent"}
    moment = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [{**ready, "lastTransitionTime": moment}]
    await server.merge(NODE.path(None, node, "status"), {"status": {"conditions": conditions}})


async def remove(server: ApiServer, namespace: str, *names: str) -> None:
    """Removes these pods, in place of the kubelet."""
    for name in names:
        await server.delete(POD.path(namespace, name), {"gracePeriodSeconds": 0})


async def test_a_pod_rejected_by_its_node_is_replaced_without_the_others(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await bring_up(server, namespace)
        leader, follower = pod_of(namespace, 1, 0), pod_of(namespace, 1, 1)
        # The next epoch, whose pods do not run.
        await remove(server, namespace, follower)
        leader, follower = await until("the next epoch", lambda: two_workers(server, namespace, 2))
        before = await pods(server, namespace)
        rejected = {"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough resource"}
        await server.merge(POD.path(namespace, follower, "status"), {"status": rejected})

        async def replaced() -> bool:
            now = (await pods(server, namespace)).get(follower)
            return now is not None and now["metadata"]["uid"] != before[follower]["metadata"]["uid"]

        await until("another pod of its name", replaced, timeout_s=30, details=lambda: process.output)
        now = await pods(server, namespace)
        assert now[leader]["metadata"]["uid"] == before[leader]["metadata"]["uid"]
        await serve_epoch(server, namespace, 2)
        group = (await status_of(server, namespace))["groups"][0]
        assert (group["epoch"], len(group["failures"])) == (nth_epoch(namespace, 2), 1)
        events = (await server.get(EVENT.path(namespace)))["items"]
        assert any(e["reason"] == "PodReplaced" and "OutOfcpu" in e["note"] for e in events)
        started = {e["note"].partition(":")[0] for e in events if e["reason"] == "EpochStarted"}
        assert started == {f"group 0 epoch {nth_epoch(namespace, nth)}" for nth in (1, 2)}
        assert "Traceback" not in process.output


async def two_workers(server: ApiServer, namespace: str, epoch: int) -> list[str]:
    found = await workers(server, namespace, epoch)
    return found if len(found) == 2 else []


async def are_deleting(server: ApiServer, namespace: str, *names: str) -> bool:
    found = await pods(server, namespace)
    return all("deletionTimestamp" in found[name]["metadata"] for name in names)


async def test_a_pod_of_a_lost_node_is_force_deleted_and_the_group_restarts(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str, far: str
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await bring_up(server, namespace)
        leader, follower = pod_of(namespace, 1, 0), pod_of(namespace, 1, 1)
        await change(server, namespace, restart={"nodeLostAfter": "3s"})
        await bind(server, namespace, leader, node)
        await bind(server, namespace, follower, far)
        lost_at = datetime.now(UTC)
        # The controller manager's clock is an hour behind: only the operator's own clock counts.
        await silence(server, far, lost_at - timedelta(hours=1))

        async def is_gone() -> bool:
            return follower not in await pods(server, namespace)

        await until("the pod of the lost node goes", is_gone, details=lambda: process.output)
        assert datetime.now(UTC) - lost_at > timedelta(seconds=2)
        assert await condition(server, namespace, "Ready") == ("False", "NodeLost")
        assert await are_deleting(server, namespace, leader)
        assert not await workers(server, namespace, 2), "the leader still exists"
        await remove(server, namespace, leader)
        await serve_epoch(server, namespace, 2)
        group = (await status_of(server, namespace))["groups"][0]
        (failure,) = group["failures"]
        assert (failure["reason"], failure["counted"], group.get("restarts", 0)) == ("NodeLost", False, 0)
        here = [line for line in process.output.splitlines() if f"namespaces/{namespace}/" in line]
        assert not [line for line in here if " 403 " in line]
        assert "Traceback" not in process.output


async def test_pods_stopped_on_purpose_have_time_to_drain(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await bring_up(server, namespace)
        leader, follower = pod_of(namespace, 1, 0), pod_of(namespace, 1, 1)
        for name in (leader, follower):
            await bind(server, namespace, name, node)
        waits = {"propagationPolicy": "Foreground"}
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), waits)
        await until("the pods go", lambda: are_deleting(server, namespace, leader, follower))
        found = await pods(server, namespace)
        assert {found[n]["metadata"]["deletionGracePeriodSeconds"] for n in (leader, follower)} == {90}

        async def reported() -> bool:
            return await condition(server, namespace, "Ready") == ("False", "Deleting")

        await until("the status reports it", reported)
        await remove(server, namespace, leader, follower)


async def test_a_pod_that_outlives_its_resource_on_a_lost_node_is_force_deleted(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    """Garbage collection deletes the pod, but no kubelet confirms its end."""
    await add_node(server, "lost", {"key": "tests.heteroinfer.dev/nobody", "effect": "NoSchedule"})
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await bring_up(server, namespace)
        leader, follower = pod_of(namespace, 1, 0), pod_of(namespace, 1, 1)
        await bind(server, namespace, leader, node)
        await bind(server, namespace, follower, "lost")
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        assert (await server.get(HETERO_INFERENCE.path(namespace)))["items"] == [], "no finalizer blocks it"
        await until(
            "the pods go", lambda: are_deleting(server, namespace, leader, follower), timeout_s=COLLECTED_S
        )
        for name in (leader, follower):
            await server.delete(POD.path(namespace, name), {"gracePeriodSeconds": 1})
        await server.delete(NODE.path(None, "lost"), {})

        async def has_gone() -> bool:
            return follower not in await pods(server, namespace)

        # Kubernetes itself takes 40 s (pkg/controller/podgc, quarantineTime).
        await until("the pod of the lost node goes", has_gone, timeout_s=25, details=lambda: process.output)
        assert leader in await pods(server, namespace), "its node is alive"
        await remove(server, namespace, leader)
        assert "Traceback" not in process.output


@pytest.mark.parametrize("value", [None, "somebody"])
async def test_a_pod_keeps_serving_after_it_loses_the_watched_label(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str, value: str | None
) -> None:
    """The watch reports the pod as deleted, but its epoch continues, ends later, and leaves no pod."""
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        _, follower = await bring_up(server, namespace)
        path = POD.path(namespace, follower)
        label = {"metadata": {"labels": {names.LABEL_RESOURCE: value}}}
        await server.merge(path, label)

        async def reported() -> bool:
            events = (await server.get(EVENT.path(namespace)))["items"]
            return any(event["reason"] == "PodLabelLost" and follower in event["note"] for event in events)

        await until("the event", reported)
        await asyncio.sleep(3 * LOOK_AGAIN_S)  # several reconciles
        (group,) = (await status_of(server, namespace))["groups"]
        assert (group["epoch"], group["phase"], group.get("failures", [])) == (
            nth_epoch(namespace, 1),
            "Ready",
            [],
        )
        await end_rank(server, namespace, follower, index=1)
        await until("the next epoch", lambda: two_workers(server, namespace, 2))
        (group,) = (await status_of(server, namespace))["groups"]
        assert (group["failures"][-1]["reason"], group["failures"][-1]["rank"]) == ("RankExited", 1)
        with pytest.raises(ApiError, match="not found"):
            await server.get(path)


async def test_reports_a_lost_label_until_it_is_restored(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    """Without the label, no Service selects the leader, or no NetworkPolicy a follower."""
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        leader, follower = await bring_up(server, namespace)
        before = await pods(server, namespace)

        async def strike(pod: str, label: str, value: str | None, available: tuple[str, str]) -> None:
            """Changes a label of a pod. The conditions must report this, and recover when it is restored."""
            path, made = POD.path(namespace, pod), before[pod]["metadata"]["labels"].get(label)
            await server.merge(path, {"metadata": {"labels": {label: value}}})

            async def is_reported() -> bool:
                return await condition(server, namespace, "Stalled") == ("True", "PodLabelLost")

            await until(
                f"the missing {label} of {pod} is reported", is_reported, details=lambda: process.output
            )
            assert await condition(server, namespace, "Ready") == ("False", "PodLabelLost")
            assert await condition(server, namespace, "Available") == available
            await server.merge(path, {"metadata": {"labels": {label: made}}})
            await until("Ready", lambda: is_ready(server, namespace))

        unreached, reached = ("False", "PodLabelLost"), ("True", "Serving")
        await strike(leader, names.LABEL_LEADER, None, unreached)
        await strike(leader, names.LABEL_RESOURCE, None, unreached)
        await strike(follower, names.LABEL_GROUP, "7", reached)
        await strike(follower, names.LABEL_COMPONENT, names.COMPONENT_INSPECT, reached)
        await strike(follower, names.LABEL_LEADER, "true", reached)
        after = await pods(server, namespace)
        assert [after[name]["metadata"]["uid"] for name in (leader, follower)] == [
            before[name]["metadata"]["uid"] for name in (leader, follower)
        ]
        (group,) = (await status_of(server, namespace))["groups"]
        assert (group["epoch"], group.get("failures", [])) == (nth_epoch(namespace, 1), [])
        events = (await server.get(EVENT.path(namespace)))["items"]
        notes = [event["note"] for event in events if event["reason"] == "PodLabelLost"]
        assert len(notes) == 5
        assert all("kubectl label pod" in note for note in notes)
