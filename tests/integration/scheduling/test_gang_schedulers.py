"""Groups under real gang schedulers: Kueue, Volcano, coscheduling, and kube-scheduler's own.

The nodes are kwok's: a pod that is placed runs, one that is deleted ends, and goes once no finalizer is left.
`make gangs` runs these; it builds the schedulers first.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.cluster import Gang
from heteroinfer_operator.crd import build_crd
from heteroinfer_operator.kube.gangs import find_gangs
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster import kwok
from tests.cluster.cluster import Cluster, start_control_plane_only
from tests.cluster.gang_schedulers import (
    KUEUE_QUEUE,
    open_kueue_queue,
    set_kueue_quota,
    start_coscheduling,
    start_kueue,
    start_volcano,
    stop_kueue_queue,
)
from tests.integration.operator.support import PROFILE, SPEC, OperatorProcess, end_pod, operator, until
from tests.integration.scheduling.conftest import capacity, pods_of

pytestmark = [pytest.mark.gang_schedulers, pytest.mark.timeout(300)]

NODE = kwok.NodeShape(allocatable={"cpu": "16", "memory": "64Gi", "pods": "110"})
ROOM_OF_ONE = {"cpu": "16", "memory": "64Gi"}
ROOM_OF_TWO = {"cpu": "32", "memory": "128Gi"}
GANG_OBJECTS = {
    Gang.KUEUE: "workloads.kueue.x-k8s.io",
    Gang.VOLCANO: "podgroups.scheduling.volcano.sh",
    Gang.COSCHEDULING: "podgroups.scheduling.x-k8s.io",
    Gang.NATIVE: "workloads.scheduling.k8s.io",
}
OTHER_NODE = "kwok-0001"
PLACED_S = 90.0
"""A scheduler tries again what did not fit; kube-scheduler and its like do so after up to a minute."""
GONE_S = 60.0


class Site:
    """A control plane with one gang scheduler, two nodes and an operator; each node has room for one pod."""

    def __init__(self, plane: Cluster, gang: Gang) -> None:
        self.plane, self.gang = plane, gang

    def start(self) -> None:
        match self.gang:
            case Gang.COSCHEDULING:
                start_coscheduling(self.plane)
            case Gang.VOLCANO:
                start_volcano(self.plane)
            case Gang.KUEUE:
                start_kueue(self.plane, ROOM_OF_ONE)

    def open_room(self, *, both: bool) -> None:
        """Lets pods onto the second node, or no longer; to Kueue, which knows no nodes, by its quota."""
        if self.gang is Gang.KUEUE:
            set_kueue_quota(self.plane, ROOM_OF_TWO if both else ROOM_OF_ONE)
        else:
            self.plane.kubectl("uncordon" if both else "cordon", OTHER_NODE)


@pytest.fixture(scope="module", params=list(Gang), ids=lambda gang: gang.value)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    gang: Gang = request.param
    with start_control_plane_only(gang_scheduling=gang is Gang.NATIVE) as plane:
        made = Site(plane, gang)
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(build_crd()))
        kwok.start_kwok(plane, nodes=2, profile=json.dumps(PROFILE), shape=NODE, finalizers=True)
        made.start()
        yield made


@pytest_asyncio.fixture
async def server(site: Site) -> AsyncIterator[ApiServer]:
    api_server = ApiServer(await load_configuration(str(site.plane.kubeconfig)))
    yield api_server
    await api_server.close()


@pytest_asyncio.fixture
async def running(site: Site, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    async with operator(site.plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        yield process


@pytest.fixture
def namespace(site: Site, request: pytest.FixtureRequest) -> str:
    name = request.node.originalname.replace("_", "-")[5:60]
    site.plane.kubectl("create", "namespace", name)
    site.plane.kubectl("wait", "-n", name, "--for=create", "serviceaccount/default", "--timeout=20s")
    if site.gang is Gang.KUEUE:
        open_kueue_queue(site.plane, name)
    site.open_room(both=False)
    return name


class Resource:
    """A resource of one group of two pods, each of which takes more than half a node."""

    name = "pair"

    def __init__(self, site: Site, server: ApiServer, namespace: str, process: OperatorProcess) -> None:
        self.site, self.server, self.namespace, self.process = site, server, namespace, process

    async def create(self) -> None:
        assert await find_gangs(self.server) == {self.site.gang}
        queue = {"queueName": KUEUE_QUEUE} if self.site.gang is Gang.KUEUE else {}
        resources = {"requests": {"cpu": "10", "memory": "8Gi"}}
        roles = [{"name": name, "device": "CPU", "resources": resources} for name in ("first", "second")]
        body = {
            "apiVersion": HETERO_INFERENCE.api_version,
            "kind": names.KIND,
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                **SPEC,
                "model": {"uri": "file:///models/tiny"},
                "scheduling": {"gang": "Always", **queue},
                "roles": roles,
                "drainTimeout": "2s",
                "restart": {"nodeLostAfter": "5s"},
            },
        }
        await self.server.create(HETERO_INFERENCE.path(self.namespace), body)

    async def waiting(self, epoch: int = 1) -> list[str]:
        """Returns the pods of an epoch once both are there and the status says why they have no node."""

        async def told() -> list[str]:
            listed = await pods_of(self.server, self.namespace, self.name)
            pods = [pod for pod in listed if pod["metadata"]["labels"][names.LABEL_EPOCH] == str(epoch)]
            placed = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName")]
            assert not placed, f"half a gang was placed: {placed}"
            status, reason, message = await capacity(self.server, self.namespace, self.name)
            blocked = len(pods) == 2 and (status, reason) == ("False", "Unschedulable")
            if blocked and self.site.gang is Gang.KUEUE:
                assert f"Kueue's Workload pair-0-{epoch} says why" in message
                assert f"workload.kueue.x-k8s.io/pair-0-{epoch}" in self._gang_objects()
            return [pod["metadata"]["name"] for pod in pods] if blocked else []

        found: list[str] = await until(
            "pods without a node, and why", told, timeout_s=PLACED_S, said=self.everything
        )
        return found

    async def ready(self, epoch: int) -> None:
        """Returns once the group of that epoch is Ready, on two nodes, with no pod of another epoch."""

        async def is_ready() -> bool:
            stored = await self.server.get(HETERO_INFERENCE.path(self.namespace, self.name))
            status = stored.get("status", {})
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            if conditions.get("Ready") != "True" or status["groups"][0]["epoch"] != epoch:
                return False
            pods = await pods_of(self.server, self.namespace, self.name)
            assert {pod["metadata"]["labels"][names.LABEL_EPOCH] for pod in pods} == {str(epoch)}
            assert len({pod["spec"]["nodeName"] for pod in pods}) == len(pods) == 2
            return True

        await until(f"epoch {epoch}, Ready", is_ready, timeout_s=PLACED_S, said=self.everything)

    async def remove(self) -> None:
        """Deletes it; returns once nothing of it or of its scheduler's objects is left."""
        await self.server.delete(HETERO_INFERENCE.path(self.namespace, self.name), {})
        await until("the end of it all", self._gone, timeout_s=GONE_S, said=self.everything)

    async def _gone(self) -> bool:
        listed = await self.server.get(HETERO_INFERENCE.path(self.namespace))
        pods = (await self.server.get(POD.path(self.namespace)))["items"]
        return not listed["items"] and not pods and not self._gang_objects()

    def _gang_objects(self) -> list[str]:
        kind = GANG_OBJECTS[self.site.gang]
        return self.site.plane.kubectl("get", kind, "-n", self.namespace, "-o", "name").split()

    def everything(self) -> str:
        """Returns the state of it in words, for a test that failed."""
        here = ("-n", self.namespace)
        said = self.site.plane.kubectl(
            "get", f"pods,events,{GANG_OBJECTS[self.site.gang]}", *here, "-o", "wide"
        )
        stored = self.site.plane.kubectl("get", "hinf", *here, "-o", "jsonpath={.items[*].status.conditions}")
        return f"{said}\n{stored}\n{self.process.said}"


@pytest.fixture
def resource(site: Site, server: ApiServer, namespace: str, running: OperatorProcess) -> Resource:
    return Resource(site, server, namespace, running)


async def test_half_a_gang_waits_and_a_whole_one_serves(site: Site, resource: Resource) -> None:
    """Also the epoch after a rank's death, and the end, with nothing left."""
    await resource.create()
    await resource.waiting()
    site.open_room(both=True)
    await resource.ready(epoch=1)
    (first, _) = sorted(p["metadata"]["name"] for p in await _pods(resource))
    failure = Failure(
        reason=FailureReason.RANK_EXITED,
        message="rank 0 was killed by SIGKILL",
        pod=0,
        rank=0,
        exit_code=-9,
    )
    await end_pod(
        resource.server,
        resource.namespace,
        first,
        exit_code=names.EXIT_RANK_FAILED,
        message=failure.to_json(),
    )
    await resource.ready(epoch=2)
    await resource.remove()


async def test_a_deleted_pod_of_a_waiting_gang_is_replaced(site: Site, resource: Resource) -> None:
    await resource.create()
    (first, *_) = await resource.waiting()
    uid = (await resource.server.get(POD.path(resource.namespace, first)))["metadata"]["uid"]
    await resource.server.delete(POD.path(resource.namespace, first), {})

    async def replaced() -> bool:
        return uid not in {pod["metadata"]["uid"] for pod in await _pods(resource)}

    await until("the end of the deleted pod", replaced, timeout_s=GONE_S, said=resource.everything)
    site.open_room(both=True)

    async def serves() -> bool:
        stored = await resource.server.get(HETERO_INFERENCE.path(resource.namespace, resource.name))
        return any(
            c["type"] == "Ready" and c["status"] == "True" for c in stored["status"].get("conditions", ())
        )

    await until("a group that serves", serves, timeout_s=PLACED_S, said=resource.everything)
    await resource.remove()


async def test_a_waiting_gang_goes_with_its_resource(resource: Resource) -> None:
    await resource.create()
    await resource.waiting()
    await resource.remove()


@pytest.mark.parametrize("site", [Gang.KUEUE], indirect=True, ids=lambda gang: gang.value)
async def test_a_group_that_kueue_evicts_waits_and_counts_no_restart(site: Site, resource: Resource) -> None:
    site.open_room(both=True)
    await resource.create()
    await resource.ready(epoch=1)
    stop_kueue_queue(site.plane, stopped=True)
    await resource.waiting(epoch=2)
    stop_kueue_queue(site.plane, stopped=False)
    await resource.ready(epoch=2)
    stored = await resource.server.get(HETERO_INFERENCE.path(resource.namespace, resource.name))
    (group,) = stored["status"]["groups"]
    assert group.get("restarts", 0) == 0
    assert [(f["reason"], f["counted"]) for f in group["failures"]] == [("PodDisrupted", False)]
    await resource.remove()


@pytest.mark.parametrize("site", [Gang.KUEUE], indirect=True, ids=lambda gang: gang.value)
async def test_pods_on_a_lost_node_go_once_the_node_is_deleted(site: Site, resource: Resource) -> None:
    """Kueue's finalizer outlives the operator's deletion by force. The last test: a node is gone."""
    site.open_room(both=True)
    await resource.create()
    await resource.ready(epoch=1)
    # kwok no longer plays a node without its label: nothing is heard of it or of its pods.
    site.plane.kubectl("label", "node", OTHER_NODE, f"{kwok.LABEL}-")

    async def fell() -> bool:
        stored = await resource.server.get(HETERO_INFERENCE.path(resource.namespace, resource.name))
        (group,) = stored["status"]["groups"]
        return [f["reason"] for f in group.get("failures", ())] == ["NodeLost"]

    await until("the loss of the node", fell, timeout_s=120, said=resource.everything)
    site.plane.kubectl("delete", "node", OTHER_NODE)
    await resource.waiting(epoch=2)
    await resource.remove()


async def _pods(resource: Resource) -> list[dict[str, Any]]:
    return await pods_of(resource.server, resource.namespace, resource.name)
