"""Tests odd foreign pods that the API server accepts: the operator survives, and its status stays true."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.errors import PlanReason
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, NODE, POD, SERVICE
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.manifests.identity import Owner
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.life import (
    Install,
    bring_up,
    condition,
    serve_epoch,
    status_of,
    stored,
    workers,
)
from tests.integration.operator.running_operator import (
    PROFILE,
    SPEC,
    OperatorProcess,
    add_node,
    create_resource,
    end_pod,
    end_rank,
    operator,
    pod,
    until,
)

QUANTITIES = [
    ".5",
    "5.",
    "1e100",
    "1e1000",
    "0" * 43 + "1",
    "9" * 44,
    "0" * 5000 + "1",
    "123456789012345678901234567890.5",
    "1e-100",
    "1E",
]
GRACE_S = 300_000_000_000
DEPTH = 5000
TRUE_WITHIN_S = 2.0


@pytest.fixture
def strangers(control_plane: Cluster, namespace: str) -> Iterator[str]:
    """Creates a namespace without any HeteroInference."""
    name = f"{namespace}-strangers"
    control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl("wait", "-n", name, "--for=create", "serviceaccount/default", "--timeout=20s")
    yield name
    control_plane.kubectl("delete", "pods", "-n", name, "--all", "--force", "--grace-period=0")
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


def stranger(name: str, namespace: str, node: str = "", **fields: Any) -> dict[str, Any]:
    container = {"name": "c", "image": "x:none"}
    bound = {"nodeName": node} if node else {}
    spec = {"containers": [{**container, **fields.pop("container", {})}], **bound, **fields.pop("spec", {})}
    metadata = {"name": name, "namespace": namespace, **fields.pop("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


FIELD_MANAGER = {
    "manager": "stranger",
    "operation": "Update",
    "time": "2026-01-01T00:00:00Z",
    "fieldsType": "FieldsV1",
}


async def create_worst_pods(control_plane: Cluster, server: ApiServer, namespace: str, node: str) -> None:
    """Creates foreign pods with extreme quantities, labels, owners and times."""
    for index, quantity in enumerate(QUANTITIES):
        resources = {"resources": {"requests": {"cpu": quantity, "example.com/x": "1e60"}}}
        resources["resources"]["limits"] = {"example.com/x": "1e60"}
        await server.create(
            POD.path(namespace), stranger(f"quantity-{index}", namespace, node, container=resources)
        )
    # This pod has our label, an owner that never existed, and a deletion time ten thousand years ahead.
    metadata = {
        "labels": {names.LABEL_RESOURCE: "x"},
        "ownerReferences": [
            {
                "apiVersion": HETERO_INFERENCE.api_version,
                "kind": names.KIND,
                "name": "x",
                "uid": "00000000-0000-0000-0000-000000000001",
                "controller": True,
            }
        ],
    }
    body = stranger(
        "grace", namespace, node, metadata=metadata, spec={"terminationGracePeriodSeconds": GRACE_S}
    )
    await server.create(POD.path(namespace), body)
    await server.delete(POD.path(namespace, "grace"), {"apiVersion": "v1", "kind": "DeleteOptions"})
    create_deep(control_plane, POD.path(namespace), stranger("deep", namespace, node))
    resource = {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": "deep", "namespace": namespace},
        "spec": {**SPEC, "suspend": True},
    }
    create_deep(control_plane, HETERO_INFERENCE.path(namespace), resource)


def create_deep(control_plane: Cluster, path: str, body: dict[str, Any]) -> None:
    """Creates an object whose JSON nests deeper than Python's parser supports."""
    entry = {**FIELD_MANAGER, "apiVersion": body["apiVersion"], "fieldsV1": 0}
    body["metadata"]["managedFields"] = [entry]
    file = control_plane.state.folder / "deep.json"
    deep = '{"f:a":' * DEPTH + "{}" + "}" * DEPTH
    file.write_text(json.dumps(body).replace('"fieldsV1": 0', f'"fieldsV1": {deep}'))
    control_plane.kubectl("create", "--raw", path, "-f", str(file))
    assert control_plane.kubectl("get", "--raw", f"{path}/deep").count("f:a") >= DEPTH, "it is stored"


@pytest.fixture
def worst_pods(
    control_plane: Cluster, server: ApiServer, strangers: str, node: str
) -> Callable[[], Awaitable[None]]:
    """Returns a function that creates the odd foreign pods."""
    return lambda: create_worst_pods(control_plane, server, strangers, node)


async def test_foreign_pods_do_not_crash_the_operator(
    worst_pods: Callable[[], Awaitable[None]],
    server: ApiServer,
    namespace: str,
    install: Install,
    tmp_path: Path,
) -> None:
    kubeconfig = install().kubeconfig
    async with operator(kubeconfig, tmp_path / "first") as process:
        await process.working()
        await bring_up(server, namespace)
        await worst_pods()
        await check_death_is_shown(server, namespace, process, epoch=1)
        await serve_epoch(server, namespace, 2)
        # New lists contain the same objects.
        assert process.process.poll() is None, process.output
        assert await process.stop() == 0
    async with operator(kubeconfig, tmp_path / "second") as process:
        await process.working()
        await check_death_is_shown(server, namespace, process, epoch=2)
        assert process.process.poll() is None
        assert "Traceback" not in process.output
        assert "cannot read" not in process.output, "all objects can be read"


async def check_death_is_shown(
    server: ApiServer, namespace: str, process: OperatorProcess, *, epoch: int
) -> None:
    """Checks that the status shows a rank's death within two seconds."""
    assert await condition(server, namespace, "Available") == ("True", "Serving")
    _, follower = await workers(server, namespace, epoch)
    await end_rank(server, namespace, follower, index=1)
    died = time.monotonic()

    async def is_unavailable() -> bool:
        return (await condition(server, namespace, "Available"))[0] == "False"

    await until("Available=False", is_unavailable, details=lambda: process.output)
    assert time.monotonic() - died < TRUE_WITHIN_S, process.output


async def test_capacity_is_reserved_only_for_group_pods_and_foreign_names_stay_hidden(
    server: ApiServer, namespace: str, strangers: str, install: Install, tmp_path: Path
) -> None:
    """The claim of the model is missing, so no pod of a group is scheduled."""

    async def are_gone() -> bool:
        query = {"labelSelector": names.LABEL_RESOURCE, "fieldSelector": "spec.nodeName="}
        listed = await server.get(POD.path(), query)
        return not listed["items"]

    await until("no pod of an earlier test waits for a node", are_gone, timeout_s=60)
    await add_node(server, "roomy")
    try:
        async with operator(install().kubeconfig, tmp_path / "log") as process:
            await process.working()
            owner = await ask_for_group(server, strangers, cpus=15)
            squat = pod(owner, "squat")
            squat["spec"]["schedulingGates"] = [{"name": "example.com/never"}]
            squat["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "30", "memory": "50Gi"}}
            await server.create(POD.path(strangers), squat)
            await end_inspection(server, strangers)
            await until("the first group", lambda: find_pod(server, strangers, "tiny-0-"), timeout_s=30)
            await ask_for_group(server, namespace, cpus=4)
            await end_inspection(server, namespace)

            # until the inspection's own pod has ended, the status names it, too
            async def reserved() -> bool:
                words = await shortage(server, namespace)
                return words.endswith(
                    "reserved for pods that are not scheduled yet: 2 pods of other namespaces"
                )

            await until("capacity reserved for two pods", reserved, details=lambda: process.output)
            assert strangers not in await shortage(server, namespace)
            await server.merge(HETERO_INFERENCE.path(strangers, "tiny"), {"spec": {"suspend": True}})
            await until("the second group", lambda: find_pod(server, namespace, "tiny-0-"), timeout_s=30)
    finally:
        await server.delete(NODE.path(None, "roomy"), {})


async def ask_for_group(server: ApiServer, namespace: str, *, cpus: int) -> Owner:
    role = {"device": "CPU", "resources": {"limits": {"cpu": str(cpus), "memory": "8Gi"}}}
    roles = [{"name": name, **role} for name in ("front", "back")]
    return await create_resource(server, namespace, scheduling={"gang": "Auto"}, roles=roles)


async def end_inspection(server: ApiServer, namespace: str) -> None:
    inspect = await until("the inspect pod", lambda: find_pod(server, namespace, "-inspect-"))
    await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))


async def find_pod(server: ApiServer, namespace: str, part: str) -> str:
    found = [each["metadata"]["name"] for each in await stored(server, POD, namespace)]
    return next((name for name in found if part in name), "")


async def shortage(server: ApiServer, namespace: str) -> str:
    conditions = (await status_of(server, namespace)).get("conditions", ())
    lacking = [each for each in conditions if each["reason"] == PlanReason.INSUFFICIENT_CAPACITY]
    return next((str(each["message"]) for each in lacking), "")


CHANGES: list[dict[str, Any]] = [
    {"spec": {"internalTrafficPolicy": "Local"}},
    {"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "nobody"}}},
    {"metadata": {"labels": {"service.kubernetes.io/headless": ""}}},
]


async def test_changes_that_block_clients_of_the_service_are_undone(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log") as process:
        await process.working()
        await bring_up(server, namespace)
        before = await server.get(SERVICE.path(namespace, "tiny"))
        for change in CHANGES:
            await server.merge(SERVICE.path(namespace, "tiny"), change)

            async def is_mended() -> bool:
                now = await server.get(SERVICE.path(namespace, "tiny"))
                return bool(now["spec"] == before["spec"]) and labels_of(now) == labels_of(before)

            await until(f"{change} is repaired", is_mended, details=lambda: process.output)
        assert await condition(server, namespace, "Available") == ("True", "Serving")


def labels_of(body: dict[str, Any]) -> dict[str, str]:
    return dict(body["metadata"]["labels"])
