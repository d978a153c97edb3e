"""Tests writers that undo each other's writes: the operator writes rarely, and a condition reports why."""

import asyncio
import functools
import json
import time
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.api_proxy import api_proxy
from tests.integration.operator.running_operator import (
    PROFILE,
    SPEC,
    OperatorProcess,
    create_resource,
    end_pod,
    until,
)

WANTED = 2
"""Number of pods of a resource in these tests."""
CREATES = r"/pods\?(?!.*dryRun)"


async def condition(server: ApiServer, namespace: str, name: str, kind: str) -> dict[str, Any]:
    """Returns a condition of a resource, or an empty one."""
    resource = await server.get(HETERO_INFERENCE.path(namespace, name))
    found = (resource.get("status") or {}).get("conditions") or ()
    return next((dict(each) for each in found if each["type"] == kind), {"reason": "", "message": ""})


async def read_model(server: ApiServer, namespace: str, name: str) -> None:
    """Stores the result of a resource's inspect pod."""

    async def inspect_pod() -> str:
        pods = [pod["metadata"]["name"] for pod in (await server.get(POD.path(namespace)))["items"]]
        return next((pod for pod in pods if pod.startswith(f"{name}-inspect-")), "")

    pod = await until("the inspect pod", inspect_pod)
    await end_pod(server, namespace, pod, exit_code=0, message=json.dumps(PROFILE))


async def test_pods_changed_by_a_webhook_are_created_rarely_and_a_condition_reports_why(
    control_plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Earlier, the operator created 20 pods a second without end."""
    created: dict[str, int] = {"label": 0, "owner": 0}

    def change(pod: dict[str, Any]) -> dict[str, Any]:
        name = pod["metadata"]["name"]
        if "-inspect-" not in name:
            resource = name.partition("-")[0]
            created[resource] += 1
            if resource == "label":
                del pod["metadata"]["labels"][names.LABEL_RESOURCE]
            else:
                del pod["metadata"]["ownerReferences"]
        return pod

    async with api_proxy(control_plane.kubeconfig, tmp_path / "through") as proxy:
        proxy.inject(CREATES, method="POST", change=change)
        operator = OperatorProcess(proxy.kubeconfig, tmp_path / "log", watch_namespaces=namespace)
        try:
            await operator.working()
            for name in created:
                await create_resource(server, namespace, name)
            for name in created:
                await read_model(server, namespace, name)
            await until("pods of both", lambda: all(created.values()))
            end = time.monotonic() + 60
            for name in created:
                why = functools.partial(condition_reports_changed_pods, server, namespace, name)
                await until(f"the condition of {name}", why, details=lambda: operator.output)
            await until("a minute", lambda: time.monotonic() >= end, timeout_s=70)
        finally:
            operator.kill()
    assert max(created.values()) <= 2 * WANTED + 10, created
    writes = [request.at for request in proxy.requests if request.method == "PUT"]
    assert len(writes) < 60, "two resources"


async def condition_reports_changed_pods(server: ApiServer, namespace: str, name: str) -> bool:
    """Returns whether a condition reports changed or unseen pods."""
    found = await condition(server, namespace, name, "Ready")
    return found["reason"] in {"ChangedByOthers", "PodsNeverSeen"}


async def test_two_operators_in_one_namespace_write_the_status_rarely_and_report_each_other(
    control_plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Earlier, both operators wrote the status 44 times a second without end."""
    through_a, through_b = tmp_path / "a", tmp_path / "b"
    settings = {"watch_namespaces": namespace}
    async with (
        api_proxy(control_plane.kubeconfig, through_a) as a,
        api_proxy(control_plane.kubeconfig, through_b) as b,
    ):
        operators = [
            OperatorProcess(
                a.kubeconfig, tmp_path / "log-a", allowed_arguments="--profiler-config", **settings
            ),
            OperatorProcess(b.kubeconfig, tmp_path / "log-b", **settings),
        ]
        try:
            await asyncio.gather(*(operator.working() for operator in operators))
            engine = {**SPEC["engine"], "args": ["--profiler-config", "{}"]}
            await create_resource(server, namespace, engine=engine)

            seen: set[str] = set()

            async def names_the_other() -> bool:
                found = await condition(server, namespace, "tiny", "Progressing")
                planned = await condition(server, namespace, "tiny", "Planned")
                seen.add(f"{found['reason']} {planned['reason']}")
                return found["reason"] == "StatusWrittenByOthers" and "another operator" in found["message"]

            await until(
                "the condition", names_the_other, details=lambda: f"{seen}, {a.count('status', 'PUT')}"
            )
            end = time.monotonic() + 10
            await until("ten seconds", lambda: time.monotonic() >= end, timeout_s=20)
        finally:
            for operator in operators:
                operator.kill()
    for proxy in (a, b):
        moments = [each.at for each in proxy.requests if each.method == "PUT" and "/status" in each.path]
        assert len(moments) >= 5
        most = max(sum(first <= each < first + 1 for each in moments) for first in moments)
        assert most <= 2 + 1, "two writes a second, and some that the proxy delays"
