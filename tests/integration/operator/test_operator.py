"""Tests `heteroinfer operator` as a process with the chart's permissions, from apply to delete.

There is no node, so the tests play the kubelet. All other parts are real.
"""

import contextlib
import signal
from pathlib import Path

import yaml

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.kube.paths import CONFIG_MAP, EVENT, HETERO_INFERENCE, NETWORK_POLICY, POD, SERVICE
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.life import (
    COLLECTED_S,
    Install,
    bring_up,
    condition,
    nothing_left,
    nth_epoch,
    serve_epoch,
    status_of,
    stored,
    versions,
    workers,
)
from tests.integration.operator.running_operator import OperatorProcess, end_pod, operator, until


async def forget_earlier_tests(server: ApiServer) -> None:
    """Deletes the objects of earlier tests."""

    async def none_left() -> bool:
        left = (await server.get(HETERO_INFERENCE.path()))["items"]
        for resource in left:
            metadata = resource["metadata"]
            path = HETERO_INFERENCE.path(metadata["namespace"], metadata["name"])
            with contextlib.suppress(ApiError):  # it was deleted in the meantime
                await server.delete(path, {})
        return not left

    await until("no resource of earlier tests is left", none_left)


async def test_a_resource_becomes_ready_recovers_from_a_failure_and_is_deleted(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    await forget_earlier_tests(server)
    installed = install()
    async with operator(installed.kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await bring_up(server, namespace)
        uid = (await server.get(HETERO_INFERENCE.path(namespace, "tiny")))["metadata"]["uid"]
        for kind, least in ((POD, 2), (SERVICE, 2), (NETWORK_POLICY, 1), (CONFIG_MAP, 1)):
            found = await stored(server, kind, namespace)
            assert len(found) >= least, kind.name
            assert {o["metadata"]["ownerReferences"][0]["uid"] for o in found} == {uid}, kind.name
        assert await condition(server, namespace, "Planned") == ("True", "PlanReady")
        assert await process.metric(metric_names.OPERATOR_GROUPS) == 1

        await idle_writes_nothing(server, namespace, process)

        failure = Failure(
            reason=FailureReason.RANK_EXITED, message="rank 1 was killed", pod=1, rank=1, exit_code=-9
        )
        (follower,) = [name for name in await workers(server, namespace, 1) if name.endswith("-1")]
        await end_pod(server, namespace, follower, exit_code=70, message=failure.to_json())

        async def failed() -> bool:
            return (await condition(server, namespace, "Ready"))[0] == "False"

        await until("Ready is False", failed, timeout_s=2)
        second = await serve_epoch(server, namespace, 2)
        assert await workers(server, namespace, 1) == []
        assert len(second) == 2
        group = (await status_of(server, namespace))["groups"][0]
        assert (group["epoch"], group["restarts"], group["failures"][0]["rank"]) == (
            nth_epoch(namespace, 2),
            1,
            1,
        )
        events = (await server.get(EVENT.path(namespace)))["items"]
        notes = [e["note"] for e in events if e["regarding"]["kind"] == names.KIND]
        assert any("rank 1" in note for note in notes), notes

        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)
        assert await process.stop() == 0
        assert " 403 " not in process.output
        assert "Traceback" not in process.output, process.output


async def idle_writes_nothing(server: ApiServer, namespace: str, process: OperatorProcess) -> None:
    """Checks that after the start, six reconciles in a row write nothing."""

    async def quiet() -> bool:
        before, written = await versions(server, namespace), await process.writes()
        reconciles = await process.metric(f"{metric_names.OPERATOR_RECONCILE_SECONDS}_count") + 6
        await until("more reconciles", lambda: passed(process, reconciles))
        return await process.writes() == written and await versions(server, namespace) == before

    await until("reconciles that write nothing", quiet, timeout_s=40)


async def passed(process: OperatorProcess, count: float) -> bool:
    return await process.metric(f"{metric_names.OPERATOR_RECONCILE_SECONDS}_count") >= count


async def test_a_restarted_operator_writes_nothing_to_a_settled_resource(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    await forget_earlier_tests(server)
    installed = install()
    async with operator(installed.kubeconfig, tmp_path / "first", resync_seconds="1") as first:
        await first.working()
        await bring_up(server, namespace)
        await idle_writes_nothing(server, namespace, first)
        before = await versions(server, namespace)
        first.process.send_signal(signal.SIGKILL)
        assert await first.ended() == -signal.SIGKILL
    async with operator(installed.kubeconfig, tmp_path / "second", resync_seconds="1") as second:
        await second.working()
        await until("reconciles", lambda: passed(second, 5))
        assert await second.metric(metric_names.OPERATOR_RECONCILE_ERRORS_TOTAL) == 0, second.output
        assert await second.writes() == {}
        assert await versions(server, namespace) == before
        resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        assert "finalizers" not in resource["metadata"]
        assert not any("kopf" in note for note in resource["metadata"].get("annotations", {}))


async def test_waits_for_the_api_server_and_reports_it(control_plane: Cluster, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.kubeconfig"
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    nowhere.write_text(yaml.safe_dump(config))
    async with operator(nowhere, tmp_path / "log") as process:
        await until(
            "it reports that it waits for the API server",
            lambda: "no answer from the API server" in process.output,
        )
        assert await process.http("/healthz") == (200, "ok")
        status, text = await process.http("/readyz")
        assert (status, text) == (503, f"waiting for the resource {names.PLURAL}.{names.API_GROUP}")
        assert await process.stop() == 0
