"""Tests gangs of kube-scheduler: half a gang is never placed.

Checks other projects' objects with their CRDs.
"""

from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.gangs import find_unsupported_versions
from heteroinfer_operator.kube.paths import COSCHEDULING_POD_GROUP, WORKLOAD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from heteroinfer_operator.manifests.gang import build_gang_object
from heteroinfer_operator.manifests.identity import EpochRef, Owner
from heteroinfer_operator.nodes.node_assignment import Gang
from tests.cluster.crds import apply_crds
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import SPEC, operator, served_gangs, until
from tests.integration.scheduling.conftest import (
    add_node,
    apply,
    build_unknown_gang_crd,
    capacity,
    delete,
    install_crd,
    pods_of,
)

GANG_SCHEDULING = True


async def test_half_a_gang_is_never_placed(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    assert await served_gangs(server) == {Gang.NATIVE}
    pool = {"template": {"nodeSelector": {"pool": "gang"}}, "resources": {"requests": {"cpu": "10"}}}
    roles = [{"name": name, "device": "CPU", **pool} for name in ("first", "second")]
    await add_node(server, "half", labels={"pool": "gang"})
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "whole", roles=roles)

        async def blocked() -> bool:
            pods = await pods_of(server, namespace, "whole")
            assert not [p["metadata"]["name"] for p in pods if p["spec"].get("nodeName")], "half a gang"
            status, reason, message = await capacity(server, namespace, "whole")
            return (
                len(pods) == 2
                and (status, reason) == ("False", "Unschedulable")
                and any(pod["metadata"]["name"] in message for pod in pods)
            )

        # One pod has found a node, and waits for the other. The scheduler has reported that the other found
        # none.
        await until("the scheduler has tried both", blocked, timeout_s=60)
        (workload,) = (await server.get(WORKLOAD.path(namespace)))["items"]
        pods = await pods_of(server, namespace, "whole")
        assert {workload["metadata"]["name"]} == {p["metadata"]["name"].rpartition("-")[0] for p in pods}
        assert workload["spec"]["podGroups"] == [{"name": "ranks", "policy": {"gang": {"minCount": 2}}}]
        assert await blocked()

        await add_node(server, "other-half", labels={"pool": "gang"})

        async def placed() -> bool:
            nodes = [p["spec"].get("nodeName") for p in await pods_of(server, namespace, "whole")]
            return sorted(filter(None, nodes)) == ["half", "other-half"]

        await until("all of it is placed", placed, timeout_s=60)
        await delete(server, namespace, "whole")

        async def gone() -> bool:
            return not (await server.get(WORKLOAD.path(namespace)))["items"]

        await until("the Workload goes with its resource", gone, timeout_s=60)


async def test_pods_get_the_objects_and_labels_of_their_gang_scheduler(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    installed = [install_crd(plane, project) for project in ("coscheduling", "kueue")]

    async def are_found() -> bool:
        return await served_gangs(server) == {Gang.NATIVE, Gang.COSCHEDULING, Gang.KUEUE}

    try:
        await until("the API server serves all of them", are_found, timeout_s=30)
        async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
            await process.working()
            roles = [{"name": name, "device": "CPU"} for name in ("first", "second")]
            await apply(server, namespace, "grouped", roles=roles)
            pods = await until("its pods", lambda: pods_of(server, namespace, "grouped"), timeout_s=30)
            assert pods[0]["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
            named = pods[0]["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"]
            assert named == pods[0]["metadata"]["name"].rpartition("-")[0]
            (group,) = (await server.get(COSCHEDULING_POD_GROUP.path(namespace)))["items"]
            assert group["spec"] == {"minMember": 2}
            assert group["metadata"]["ownerReferences"][0]["kind"] == names.KIND

            async def explained() -> str:
                status, reason, message = await capacity(server, namespace, "grouped")
                assert (status, reason) != ("True", "Placed"), "no pod has a node"
                return message if (status, reason) == ("False", "Unschedulable") else ""

            words = await until("the missing scheduler in the condition", explained, timeout_s=60)
            assert "no scheduler has looked at the pod (schedulerName scheduler-plugins-scheduler)" in words
            assert "set spec.scheduling.gang: Never" in words

            await apply(server, namespace, "queued", roles=roles, scheduling={"queueName": "team"})
            pods = await until("its pods", lambda: pods_of(server, namespace, "queued"), timeout_s=30)
            labels, notes = pods[0]["metadata"]["labels"], pods[0]["metadata"]["annotations"]
            assert labels["kueue.x-k8s.io/queue-name"] == "team"
            assert labels["kueue.x-k8s.io/pod-group-name"] == pods[0]["metadata"]["name"].rpartition("-")[0]
            assert notes["kueue.x-k8s.io/pod-group-total-count"] == "2"
    finally:
        for name in installed:
            plane.kubectl("delete", "crd", name, "--wait=false")


@pytest.mark.parametrize("gang", [Gang.COSCHEDULING, Gang.NATIVE])
async def test_objects_have_only_fields_of_their_schema(
    plane: Cluster, server: ApiServer, namespace: str, gang: Gang
) -> None:
    if gang is Gang.COSCHEDULING:
        install_crd(plane, "coscheduling")
    owner = Owner(
        key=ResourceKey(namespace=namespace, name="strict"), uid="00000000-0000-0000-0000-000000000000"
    )
    built = build_gang_object(parse_spec(SPEC), EpochRef(owner=owner, index=0, epoch=1), gang, 2)
    assert built is not None
    kind = COSCHEDULING_POD_GROUP if gang is Gang.COSCHEDULING else WORKLOAD
    strict: dict[str, Any] = {"dryRun": "All", "fieldValidation": "Strict"}
    assert (await server.create(kind.path(namespace), built, strict))["metadata"]["name"] == "strict-0-1"
    with pytest.raises(ApiError, match="unknown field"):
        await server.create(kind.path(namespace), {**built, "spec": {**built["spec"], "more": 1}}, strict)


async def test_an_unknown_api_version_is_reported_and_not_used(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """The cluster has a future version of Volcano's API."""
    definition = build_unknown_gang_crd()
    group = definition["spec"]["group"]
    apply_crds(plane, definition)

    async def is_named() -> bool:
        return await find_unsupported_versions(server) == (f"{group}/v9",)

    try:
        await until("its discovery", is_named, timeout_s=30)
        assert Gang.VOLCANO not in await served_gangs(server)
        async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
            await process.working()
            roles = [{"name": name, "device": "CPU"} for name in ("first", "second")]
            await apply(server, namespace, "native", roles=roles)
            pods = await until("its pods", lambda: pods_of(server, namespace, "native"), timeout_s=30)
            used = {pod["metadata"]["labels"][names.LABEL_GANG] for pod in pods}
            assert used < {Gang.NATIVE.value, Gang.COSCHEDULING.value}, (
                "an earlier test may have installed the CRD"
            )
    finally:
        plane.kubectl("delete", "crd", definition["metadata"]["name"], "--wait=false")
