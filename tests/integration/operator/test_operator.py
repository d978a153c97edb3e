"""`heteroinfer operator` as a process with the chart's own rights, from apply to delete.

No node is there, so the tests say for the kubelet how pods fare; everything else is real.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import metrics, names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.kube.paths import (
    CONFIG_MAP,
    EVENT,
    HETERO_INFERENCE,
    LEASE,
    NETWORK_POLICY,
    NODE,
    POD,
    SERVICE,
    Kind,
)
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster.cluster import Cluster
from tests.integration.operator.conftest import Installation
from tests.integration.operator.support import (
    PROFILE,
    OperatorProcess,
    create_resource,
    end_pod,
    operator,
    run_pod,
    until,
)

Install = Callable[..., Installation]
CHILDREN = (POD, SERVICE, NETWORK_POLICY, CONFIG_MAP)


async def stored(server: ApiServer, kind: Kind, namespace: str) -> list[dict[str, Any]]:
    listed = await server.get(kind.path(namespace), {"labelSelector": names.LABEL_RESOURCE})
    return list(listed["items"])


async def status_of(server: ApiServer, namespace: str) -> dict[str, Any]:
    resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
    return dict(resource.get("status") or {})


async def condition(server: ApiServer, namespace: str, kind: str) -> tuple[str, str]:
    for found in (await status_of(server, namespace)).get("conditions", ()):
        if found["type"] == kind:
            return found["status"], found["reason"]
    return "", ""


async def versions(server: ApiServer, namespace: str) -> dict[str, str]:
    """Returns the resourceVersion of the resource and of all its children."""
    listed = [await stored(server, kind, namespace) for kind in CHILDREN]
    listed.append((await server.get(HETERO_INFERENCE.path(namespace)))["items"])
    return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for objects in listed for o in objects}


async def workers(server: ApiServer, namespace: str, epoch: int) -> list[str]:
    """Returns the names of the living worker pods of an epoch."""
    return sorted(
        pod["metadata"]["name"]
        for pod in await stored(server, POD, namespace)
        if pod["metadata"]["labels"].get(names.LABEL_EPOCH) == str(epoch)
        and "deletionTimestamp" not in pod["metadata"]
    )


async def serve_epoch(server: ApiServer, namespace: str, epoch: int) -> list[str]:
    """Has the pods of an epoch run, and returns their names once the resource is Ready."""

    async def both() -> list[str]:
        found = await workers(server, namespace, epoch)
        return found if len(found) == 2 else []

    pods: list[str] = await until(f"two pods of epoch {epoch}", both, timeout_s=30)
    for pod in pods:
        await run_pod(server, namespace, pod)
    await until("Ready", lambda: is_ready(server, namespace))
    return pods


async def is_ready(server: ApiServer, namespace: str) -> bool:
    return (await condition(server, namespace, "Ready"))[0] == "True"


async def bring_up(server: ApiServer, namespace: str) -> list[str]:
    """Returns the pods of a resource that serves, from its creation on."""
    await create_resource(server, namespace)

    async def inspect_pod() -> str:
        pods = [p["metadata"]["name"] for p in await stored(server, POD, namespace)]
        return next((name for name in pods if "-inspect-" in name), "")

    inspect = await until("the inspect pod", inspect_pod)
    await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))
    return await serve_epoch(server, namespace, 1)


async def test_from_apply_to_ready_through_a_fall_to_delete(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
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
        assert await process.metric(metrics.OPERATOR_GROUPS) == 1

        await idle_writes_nothing(server, namespace, process)

        failure = Failure(
            reason=FailureReason.RANK_EXITED, message="rank 1 was killed", pod=1, rank=1, exit_code=-9
        )
        (follower,) = [name for name in await workers(server, namespace, 1) if name.endswith("-1")]
        await end_pod(server, namespace, follower, exit_code=70, message=failure.to_json())

        async def fallen() -> bool:
            return (await condition(server, namespace, "Ready"))[0] == "False"

        await until("Ready is False", fallen, timeout_s=2)
        second = await serve_epoch(server, namespace, 2)
        assert await workers(server, namespace, 1) == []
        assert len(second) == 2
        group = (await status_of(server, namespace))["groups"][0]
        assert (group["epoch"], group["restarts"], group["failures"][0]["rank"]) == (2, 1, 1)
        events = (await server.get(EVENT.path(namespace)))["items"]
        notes = [e["note"] for e in events if e["regarding"]["kind"] == names.KIND]
        assert any("rank 1" in note for note in notes), notes

        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=60)
        assert await process.stop() == 0
        assert " 403 " not in process.said
        assert "Traceback" not in process.said, process.said


async def nothing_left(server: ApiServer, namespace: str) -> bool:
    listed = [await stored(server, kind, namespace) for kind in CHILDREN]
    resources = (await server.get(HETERO_INFERENCE.path(namespace)))["items"]
    return not resources and not any(listed)


async def idle_writes_nothing(server: ApiServer, namespace: str, process: OperatorProcess) -> None:
    """Asserts that, once the way up has settled, six passes in a row write nothing at all."""

    async def quiet() -> bool:
        before, written = await versions(server, namespace), await process.writes()
        passes = await process.metric(f"{metrics.OPERATOR_RECONCILE_SECONDS}_count") + 6
        await until("more passes", lambda: passed(process, passes))
        return await process.writes() == written and await versions(server, namespace) == before

    await until("passes that write nothing", quiet, timeout_s=40)


async def passed(process: OperatorProcess, count: float) -> bool:
    return await process.metric(f"{metrics.OPERATOR_RECONCILE_SECONDS}_count") >= count


async def test_a_restarted_operator_writes_nothing_where_all_is_right(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
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
        await until("passes", lambda: passed(second, 5))
        assert await second.metric(metrics.OPERATOR_RECONCILE_ERRORS_TOTAL) == 0, second.said
        assert await second.writes() == {}
        assert await versions(server, namespace) == before
        resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        assert resource["metadata"]["finalizers"] == [names.FINALIZER]
        assert not any("kopf" in note for note in resource["metadata"].get("annotations", {}))


async def test_namespaced_scope_serves_its_namespaces_with_a_role_only(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster
) -> None:
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    elsewhere = installed.release
    await create_resource(server, elsewhere)
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        pods = await bring_up(server, namespace)
        assert len(pods) == 2
        untouched = await server.get(HETERO_INFERENCE.path(elsewhere, "tiny"))
        assert "finalizers" not in untouched["metadata"]
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=60)
        assert await process.stop() == 0
        assert " 403 " not in process.said
    for verb, resource in (
        ("list", "pods"),
        ("create", "pods"),
        ("list", "heteroinferences.heteroinfer.dev"),
    ):
        assert not may(control_plane, installed, verb, resource, elsewhere)
    assert not may(control_plane, installed, "list", "nodes", "")


def may(cluster: Cluster, installed: Installation, verb: str, resource: str, namespace: str) -> bool:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": installed.account,
            "resourceAttributes": {
                "verb": verb,
                "namespace": namespace,
                "resource": resource.partition(".")[0].partition("/")[0],
                "subresource": resource.partition("/")[2],
                "group": resource.partition(".")[2],
            },
        },
    }
    answer = cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
    return bool(json.loads(answer)["status"]["allowed"])


FORBIDDEN = (
    ("get", "secrets"),
    ("list", "secrets"),
    ("patch", "pods"),
    ("update", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("deletecollection", "pods"),
    ("create", "heteroinferences.heteroinfer.dev"),
    ("delete", "heteroinferences.heteroinfer.dev"),
    ("patch", "nodes"),
    ("get", "serviceaccounts"),
    ("create", "deployments.apps"),
    ("create", "roles.rbac.authorization.k8s.io"),
    ("get", "leases.coordination.k8s.io"),
)


def test_what_the_operator_does_not_need_is_denied(
    control_plane: Cluster, install: Install, namespace: str
) -> None:
    installed = install()
    assert may(control_plane, installed, "create", "pods", namespace)
    allowed = [f"{v} {r}" for v, r in FORBIDDEN if may(control_plane, installed, v, r, namespace)]
    assert allowed == []


async def lease_holder(server: ApiServer, installed: Installation) -> str:
    try:
        lease = await server.get(LEASE.path(installed.release, f"{installed.release}-heteroinfer"))
    except ApiError:
        return ""
    return str(lease["spec"].get("holderIdentity", ""))


async def held_by(server: ApiServer, installed: Installation, who: str) -> bool:
    return (await lease_holder(server, installed)).partition("_")[0] == who


@pytest.mark.parametrize("end", ["kill", "terminate", "freeze"])
async def test_another_replica_takes_over(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, end: str
) -> None:
    installed = install()
    settings = {
        "leader_election": "true",
        "lease_name": f"{installed.release}-heteroinfer",
        "lease_seconds": "3",
        "namespace": installed.release,
    }
    async with operator(installed.kubeconfig, tmp_path / "one", identity="one", **settings) as one:
        await one.working()
        assert await held_by(server, installed, "one")
        async with operator(installed.kubeconfig, tmp_path / "two", identity="two", **settings) as two:
            await until("the other stands by", lambda: stands_by(two))
            if end == "kill":
                one.process.kill()
            elif end == "terminate":
                assert await one.stop() == 0
                assert await lease_holder(server, installed) in {""} or await held_by(
                    server, installed, "two"
                )
            else:
                one.process.send_signal(signal.SIGSTOP)
            await until("the other leads", lambda: held_by(server, installed, "two"), timeout_s=10)
            await two.working()
            if end == "freeze":
                one.process.send_signal(signal.SIGCONT)
                assert await one.ended() == 1
                assert "this process stops work" in one.said
                assert await held_by(server, installed, "two")
            await create_resource(server, namespace)

            async def adopted() -> bool:
                resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
                return names.FINALIZER in resource["metadata"].get("finalizers", ())

            await until("the new leader works", adopted)
            await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
            await until("it is gone", lambda: nothing_left(server, namespace), timeout_s=40)


async def stands_by(process: OperatorProcess) -> bool:
    status, text = await process.http("/readyz")
    return status == 200 and text.startswith("waiting for lease")


async def test_without_an_api_server_it_waits_and_says_so(control_plane: Cluster, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.kubeconfig"
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    nowhere.write_text(yaml.safe_dump(config))
    async with operator(nowhere, tmp_path / "log") as process:
        await until("it says what it waits for", lambda: "no answer from the API server" in process.said)
        assert await process.http("/healthz") == (200, "ok")
        status, text = await process.http("/readyz")
        assert (status, text) == (503, f"waiting for the resource {names.PLURAL}.{names.API_GROUP}")
        assert await process.stop() == 0


@pytest.fixture
async def node(server: ApiServer) -> Any:
    """A node that plans count on, and that the scheduler keeps pods off."""
    taint = {"key": "tests.heteroinfer.dev/nobody", "effect": "NoSchedule"}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "room"}, "spec": {"taints": [taint]}}
    await server.create(NODE.path(), body)
    status = {
        "allocatable": {"cpu": "32", "memory": "64Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}],
    }
    await server.merge(NODE.path(None, "room", "status"), {"status": status})
    yield "room"
    await server.delete(NODE.path(None, "room"), {})
