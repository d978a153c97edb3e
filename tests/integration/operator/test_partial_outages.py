"""Tests partial outages of the API server: the operator continues with all other kinds and namespaces."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from heteroinfer_contract import metric_names, names
from heteroinfer_operator.kube.gangs import Caches, GangSchedulers
from heteroinfer_operator.kube.paths import POD, VOLCANO_POD_GROUP, Kind
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.nodes.node_assignment import Gang
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.api_proxy import ApiProxy, api_proxy
from tests.integration.operator.life import (
    Install,
    bring_up,
    condition,
    serve_epoch,
    stored,
    workers,
)
from tests.integration.operator.running_operator import (
    PROFILE,
    OperatorProcess,
    create_resource,
    end_pod,
    end_rank,
    operator,
    until,
)
from tests.integration.operator.test_refused_children import CRDS, POD_GROUPS, has_volcano

TRUE_S = 5.0
"""Seconds from a rank's death until Available is false. Without other load, this takes less than 2 s."""


@pytest_asyncio.fixture
async def proxy(control_plane: Cluster, crd: str, tmp_path: Path) -> AsyncIterator[ApiProxy]:
    async with api_proxy(control_plane.kubeconfig, tmp_path / "through.kubeconfig") as running:
        yield running


@pytest_asyncio.fixture
async def volcano(server: ApiServer) -> AsyncIterator[None]:
    """Runs a cluster that serves Volcano's PodGroups."""
    await server.create(CRDS, POD_GROUPS)
    await until("PodGroups", lambda: has_volcano(server), timeout_s=30)
    yield
    await remove_volcano(server)


async def remove_volcano(server: ApiServer) -> None:
    if await has_volcano(server):
        await server.delete(f"{CRDS}/{POD_GROUPS['metadata']['name']}", {})
    await until("no PodGroups", lambda: has_no_volcano(server), timeout_s=30)


async def has_no_volcano(server: ApiServer) -> bool:
    return not await has_volcano(server)


async def is_unavailable(server: ApiServer, namespace: str) -> bool:
    return (await condition(server, namespace, "Available"))[0] == "False"


async def becomes_unavailable(server: ApiServer, namespace: str, process: OperatorProcess) -> None:
    await until(
        "Available is False",
        lambda: is_unavailable(server, namespace),
        TRUE_S,
        details=lambda: process.output,
    )


async def inspect_pod(server: ApiServer, namespace: str) -> str:
    async def find() -> str:
        pods = [pod["metadata"]["name"] for pod in await stored(server, POD, namespace)]
        return next((name for name in pods if "-inspect-" in name), "")

    return str(await until("the inspect pod", find, timeout_s=30))


async def test_a_failed_list_of_budgets_does_not_delay_a_start(
    server: ApiServer, namespace: str, proxy: ApiProxy, tmp_path: Path
) -> None:
    async with operator(proxy.kubeconfig, tmp_path / "one", watch_namespaces=namespace) as process:
        await process.working()
        pods = await bring_up(server, namespace)
        assert await process.stop() == 0
    fault = proxy.inject("/poddisruptionbudgets", method="GET", status=500)
    async with operator(proxy.kubeconfig, tmp_path / "two", watch_namespaces=namespace) as process:
        label = f"poddisruptionbudgets of {namespace}"

        async def says_so() -> bool:
            return await process.http("/readyz") == (200, f"ok, but the operator has not listed {label} yet")

        await until("it works without that list", says_so, timeout_s=60, details=lambda: process.output)
        assert await process.metric(f'{metric_names.OPERATOR_CACHES}{{state="unlisted"}}') == 1
        await end_rank(server, namespace, pods[1], index=1)
        await becomes_unavailable(server, namespace, process)
        await serve_epoch(server, namespace, 2)
        proxy.heal(fault)
        await process.working()
        assert "defect" not in process.output


async def test_readyz_and_a_metric_show_a_failed_watch_of_pods(
    server: ApiServer, namespace: str, proxy: ApiProxy, tmp_path: Path
) -> None:
    async with operator(proxy.kubeconfig, tmp_path / "log", watch_namespaces=namespace) as process:
        await process.working()
        await bring_up(server, namespace)
        failing = f'{metric_names.OPERATOR_CACHES}{{state="failing"}}'
        assert await process.metric(failing) == 0
        looks = f"{metric_names.OPERATOR_RECONCILE_SECONDS}_count"
        before = await process.metric(looks)
        fault = proxy.inject(f"/namespaces/{namespace}/pods", method="GET", status=500)
        proxy.cut_watches(f"/namespaces/{namespace}/pods")

        async def shows(count: int) -> bool:
            return await process.metric(failing) == count

        await until("the failed watch is shown", lambda: shows(1), details=lambda: process.output)

        async def looks_again() -> bool:
            return await process.metric(looks) > before

        await until("the resource is reconciled with the leader's report", looks_again)
        proxy.heal(fault)
        await until("the outage is over", lambda: shows(0), timeout_s=40, details=lambda: process.output)


async def test_a_deleted_namespace_is_skipped_and_served_again_once_recreated(
    control_plane: Cluster, server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    other = f"{namespace}-gone"
    control_plane.kubectl("create", "namespace", other)
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace},{other}}}")
    roles = control_plane.kubectl("get", "roles,rolebindings", "-n", other, "-o", "json")
    settings = {"watch_namespaces": f"{namespace},{other}", "resync_seconds": "1"}

    async def leaves_out(process: OperatorProcess) -> bool:
        text = f"ok, but the operator cannot read the namespaces {other}"
        return await process.http("/readyz") == (200, text)

    async with operator(installed.kubeconfig, tmp_path / "one", **settings) as process:
        await process.working()
        pods = await bring_up(server, namespace)
        control_plane.kubectl("delete", "namespace", other)
        await until(
            "the namespace is skipped", lambda: leaves_out(process), 60, details=lambda: process.output
        )
        before = await process.metric(metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS)

        async def resynced() -> bool:
            now = await process.metric(metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS)
            return now > before

        await until("a resync of the other namespace", resynced, details=lambda: process.output)
        words = f"namespace {other} is not served"
        await until("the log line about the namespace", lambda: words in process.output)
        assert await process.stop() == 0
        assert process.output.count(words) == 1
    async with operator(installed.kubeconfig, tmp_path / "two", **settings) as process:
        await until(
            "the operator works without the namespace",
            lambda: leaves_out(process),
            60,
            details=lambda: process.output,
        )
        await end_rank(server, namespace, pods[1], index=1)
        await becomes_unavailable(server, namespace, process)
        control_plane.kubectl("create", "namespace", other)
        control_plane.kubectl("create", "-f", "-", stdin=json.dumps(_created_anew(json.loads(roles))))
        await process.working()
        await create_resource(server, other)
        await inspect_pod(server, other)
        assert await process.stop() == 0
    control_plane.kubectl("delete", "namespace", other, "--wait=false")


def _created_anew(listed: dict[str, Any]) -> dict[str, Any]:
    for each in listed["items"]:
        for field in ("uid", "resourceVersion", "creationTimestamp"):
            del each["metadata"][field]
    return listed


async def test_a_group_survives_the_removal_of_its_gang_scheduler(
    server: ApiServer, namespace: str, proxy: ApiProxy, tmp_path: Path, volcano: None
) -> None:
    async with operator(proxy.kubeconfig, tmp_path / "one", watch_namespaces=namespace) as process:
        await process.working()
        await create_resource(server, namespace, scheduling={"gang": "Auto"})
        inspect = await inspect_pod(server, namespace)
        await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))
        pods = await serve_epoch(server, namespace, 1)
        group = await server.get(POD.path(namespace, pods[0]))
        assert group["metadata"]["labels"][names.LABEL_GANG] == Gang.VOLCANO.value
        assert await process.stop() == 0
    await remove_volcano(server)
    async with operator(proxy.kubeconfig, tmp_path / "two", watch_namespaces=namespace) as process:
        await process.working()
        path = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/tiny"
        await server.merge(path, {"spec": {"replicas": 2}})

        async def second_group() -> list[str]:
            found = [pod["metadata"]["name"] for pod in await stored(server, POD, namespace)]
            return [name for name in found if name.startswith("tiny-1-")]

        await until("pods of the second group", second_group, details=lambda: process.output)
        assert await workers(server, namespace, 1) == pods
        await end_rank(server, namespace, pods[1], index=1)
        await becomes_unavailable_of_group(server, namespace, process)
        assert "defect" not in process.output


async def becomes_unavailable_of_group(server: ApiServer, namespace: str, process: OperatorProcess) -> None:
    await until(
        "the next epoch", lambda: workers(server, namespace, 2), timeout_s=30, details=lambda: process.output
    )


async def test_a_group_starts_despite_a_slow_create_of_its_pod_group(
    server: ApiServer, namespace: str, proxy: ApiProxy, tmp_path: Path, volcano: None
) -> None:
    """Earlier, each answer came too late: the operator created a PodGroup a second, and no pod."""
    proxy.inject("/podgroups/", method="(PATCH|POST|PUT)", delay_s=1.0)
    async with operator(proxy.kubeconfig, tmp_path / "log", watch_namespaces=namespace) as process:
        await process.working()
        await create_resource(server, namespace, scheduling={"gang": "Auto"})
        inspect = await inspect_pod(server, namespace)
        await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))
        await serve_epoch(server, namespace, 1)
        writes = [each.path for each in proxy.requests if each.method != "GET" and "/podgroups/" in each.path]
        assert len({path.split("/podgroups/")[1].split("?")[0] for path in writes}) == 1, writes


@pytest.mark.parametrize("gang", ["Always", "Auto"])
async def test_an_error_for_one_gang_scheduler_does_not_hide_others(
    server: ApiServer, namespace: str, proxy: ApiProxy, tmp_path: Path, volcano: None, gang: str
) -> None:
    proxy.inject(r"/apis/kueue.x-k8s.io/v1beta1$", method="GET", status=503, times=2)
    async with operator(proxy.kubeconfig, tmp_path / "log", watch_namespaces=namespace) as process:
        await create_resource(server, namespace, scheduling={"gang": gang})
        inspect = await inspect_pod(server, namespace)
        await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))

        async def both() -> list[str]:
            found = await workers(server, namespace, 1)
            return found if len(found) == 2 else []

        pods = await until("two pods", both, timeout_s=30, details=lambda: process.output)
        for name in pods:
            stored_pod = await server.get(POD.path(namespace, name))
            assert stored_pod["metadata"]["labels"][names.LABEL_GANG] == Gang.VOLCANO.value
        assert (await condition(server, namespace, "Stalled"))[0] != "True"


async def test_resources_are_reconciled_when_a_gang_scheduler_appears_late(
    server: ApiServer, namespace: str, proxy: ApiProxy, tmp_path: Path, volcano: None
) -> None:
    fault = proxy.inject(r"/apis/scheduling.volcano.sh/v1beta1$", method="GET", status=503)
    async with operator(proxy.kubeconfig, tmp_path / "log", watch_namespaces=namespace) as process:
        await create_resource(server, namespace, scheduling={"gang": "Always"})
        inspect = await inspect_pod(server, namespace)
        await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))

        async def stalled() -> bool:
            return await condition(server, namespace, "Stalled") == ("True", "NoGangScheduler")

        await until(
            "the operator finds no gang scheduler", stalled, timeout_s=30, details=lambda: process.output
        )
        proxy.heal(fault)

        async def two_pods() -> bool:
            return len(await workers(server, namespace, 1)) == 2

        await until(
            "pods, once the gang scheduler is found", two_pods, timeout_s=40, details=lambda: process.output
        )


async def test_a_failed_gang_scheduler_task_is_reported_and_restarted(
    server: ApiServer, volcano: None, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[Kind] = []

    def build(kind: Kind) -> Caches:
        built.append(kind)
        if built.count(VOLCANO_POD_GROUP) == 1:
            raise ValueError("a defect")
        return {}

    changes: list[frozenset[Gang]] = []
    gangs = GangSchedulers(server, build, changed=lambda: changes.append(gangs.found))
    running = asyncio.ensure_future(gangs.run())
    try:
        await until("it is found", lambda: Gang.VOLCANO in gangs.found)
        assert built.count(VOLCANO_POD_GROUP) == 2
        assert Gang.VOLCANO in changes[-1]
        assert "a defect" in caplog.text
        await until("all gang schedulers are known", gangs.known.is_set)
    finally:
        running.cancel()
