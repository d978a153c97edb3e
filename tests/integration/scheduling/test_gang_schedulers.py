"""Groups under real gang schedulers: Kueue, Volcano, coscheduling, and kube-scheduler's own.

The nodes are kwok's: a pod that is placed runs, one that is deleted ends, and goes once no finalizer is left.
`make gangs` runs these; it builds the schedulers first.
"""

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from heteroinfer_contract import names
from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.nodes.node_assignment import Gang
from tests.cluster import kwok, tools
from tests.cluster.control_plane import upgrade_control_plane
from tests.cluster.crds import apply_crds
from tests.cluster.gang_schedulers import (
    KUEUE_QUEUE,
    open_kueue_queue,
    set_kueue_quota,
    start_coscheduling,
    start_kueue,
    start_volcano,
    stop_kueue_queue,
)
from tests.cluster.processes import run
from tests.cluster.running_cluster import Cluster, start_control_plane_only
from tests.integration.operator.running_operator import (
    PROFILE,
    SPEC,
    OperatorProcess,
    end_rank,
    operator,
    served_gangs,
    until,
)
from tests.integration.scheduling.conftest import capacity, pods_of

pytestmark = [pytest.mark.gang_schedulers, pytest.mark.timeout(300)]

NODE = kwok.NodeShape(allocatable={"cpu": "16", "memory": "64Gi", "pods": "110"})
QUOTA_OF_ONE = {"cpu": "16", "memory": "64Gi"}
QUOTA_OF_TWO = {"cpu": "32", "memory": "128Gi"}
GANG_OBJECTS = {
    Gang.KUEUE: "workloads.kueue.x-k8s.io",
    Gang.VOLCANO: "podgroups.scheduling.volcano.sh",
    Gang.COSCHEDULING: "podgroups.scheduling.x-k8s.io",
    Gang.NATIVE: "workloads.scheduling.k8s.io",
    Gang.NATIVE_ALPHA2: "podgroups.scheduling.k8s.io",
    Gang.NATIVE_BETA: "podgroups.scheduling.k8s.io",
}
KUBERNETES = {Gang.NATIVE: "", Gang.NATIVE_ALPHA2: "1.36", Gang.NATIVE_BETA: "1.37"}
"""Kubernetes versions whose own scheduler supports gangs. Other cases use the version of all tests."""
NEXT = {Gang.NATIVE: Gang.NATIVE_ALPHA2, Gang.NATIVE_ALPHA2: Gang.NATIVE_BETA}
"""API version of gangs in the Kubernetes of the next minor version."""
OTHER_NODE = "kwok-0001"
GUIDE = Path(__file__).parents[3] / "docs/user/operate/capacity.md"
PLACED_S = 90.0
"""Time after which a scheduler tries again. kube-scheduler and similar schedulers wait up to a minute."""
GONE_S = 60.0

_EPOCHS: dict[str, set[int]] = defaultdict(set)
"""By resource, the epochs of which `pods` has seen pods."""


class Site:
    """A control plane with one gang scheduler, two nodes and an operator. Each node holds one pod."""

    def __init__(self, plane: Cluster, gang: Gang) -> None:
        self.plane, self.gang = plane, gang

    def start(self) -> None:
        match self.gang:
            case Gang.COSCHEDULING:
                start_coscheduling(self.plane)
            case Gang.VOLCANO:
                start_volcano(self.plane)
            case Gang.KUEUE:
                start_kueue(self.plane, QUOTA_OF_ONE)

    def open_quota(self, *, both: bool) -> None:
        """Opens or closes the second node for pods.

        For Kueue, which does not know nodes, this changes the quota.
        """
        if self.gang is Gang.KUEUE:
            set_kueue_quota(self.plane, QUOTA_OF_TWO if both else QUOTA_OF_ONE)
        else:
            self.plane.kubectl("uncordon" if both else "cordon", OTHER_NODE)


@pytest.fixture(scope="module", params=list(Gang), ids=lambda gang: gang.value)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    gang: Gang = request.param
    version = KUBERNETES.get(gang, "")
    with start_control_plane_only(gang_scheduling=gang in KUBERNETES, kubernetes=version) as plane:
        made = Site(plane, gang)
        apply_crds(plane, build_crd())
        kwok.start_kwok(plane, nodes=2, profile=json.dumps(PROFILE), shape=NODE, finalizers=True)
        made.start()
        yield made


@pytest.fixture(scope="module")
def plane(site: Site) -> Cluster:
    """Replaces the fixture of conftest.py, which has no gang scheduler of another project."""
    return site.plane


@pytest.fixture
def resource(site: Site, server: ApiServer, namespace: str, running: OperatorProcess) -> "Resource":
    if site.gang is Gang.KUEUE:
        open_kueue_queue(site.plane, namespace)
    site.open_quota(both=False)
    return Resource(site, server, namespace, running)


@pytest_asyncio.fixture
async def running(plane: Cluster, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        yield process


class Resource:
    """A resource with one group of two pods. By default, each pod needs more than half a node."""

    def __init__(
        self,
        site: Site,
        server: ApiServer,
        namespace: str,
        process: OperatorProcess,
        *,
        name: str = "pair",
        cpu: str = "10",
    ) -> None:
        self.site, self.server, self.namespace, self.process = site, server, namespace, process
        self.name, self.cpu = name, cpu

    async def create(self) -> None:
        """Creates the resource, with the gang scheduler of the site."""
        assert await served_gangs(self.server) == {self.site.gang}
        queue = {"queueName": KUEUE_QUEUE} if self.site.gang is Gang.KUEUE else {}
        resources = {"requests": {"cpu": self.cpu, "memory": "8Gi"}}
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

    async def status(self) -> dict[str, Any]:
        """Returns the resource's status, which is empty at first."""
        stored = await self.server.get(HETERO_INFERENCE.path(self.namespace, self.name))
        return dict(stored.get("status", {}))

    async def group(self) -> dict[str, Any]:
        """Returns the status of the only group."""
        (group,) = (await self.status())["groups"]
        return dict(group)

    async def pods(self) -> list[dict[str, Any]]:
        """Returns the stored pods of all epochs."""
        found = await pods_of(self.server, self.namespace, self.name)
        epochs = [int(pod["metadata"]["labels"][names.LABEL_EPOCH]) for pod in found]
        _EPOCHS[f"{self.namespace}/{self.name}"].update(epochs)
        return found

    async def uids(self) -> set[str]:
        """Returns the UIDs of the stored pods."""
        return {pod["metadata"]["uid"] for pod in await self.pods()}

    def nth_epoch(self, ordinal: int) -> int:
        """Returns the number of the nth epoch, counted from 1; 0 before `pods` has seen a pod of it."""
        seen = sorted(_EPOCHS[f"{self.namespace}/{self.name}"])
        return seen[ordinal - 1] if len(seen) >= ordinal else 0

    async def waiting(self, epoch: int = 1) -> list[str]:
        """Waits until both pods of the epoch exist and the status reports why they have no node.

        Returns the pods.
        """
        kueue = self.site.gang is Gang.KUEUE

        async def reported() -> list[str]:
            """Returns the epoch's pods if both exist and the condition shows why none is placed."""
            every = await self.pods()
            number = self.nth_epoch(epoch)
            pods = [pod for pod in every if pod["metadata"]["labels"][names.LABEL_EPOCH] == str(number)]
            words = f"Kueue's Workload {self.name}-0-{number} shows the reason" if kueue else ""
            placed = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName")]
            assert not placed, f"half a gang was placed: {placed}"
            status, reason, message = await capacity(self.server, self.namespace, self.name)
            # The condition has the operator's own count first, and then the messages about the pods.
            if len(pods) < 2 or (status, reason) != ("False", "Unschedulable") or words not in message:
                return []
            return [pod["metadata"]["name"] for pod in pods]

        found: list[str] = await until(
            "pods without a node, and why", reported, timeout_s=PLACED_S, details=self.everything
        )
        if kueue:
            assert f"workload.kueue.x-k8s.io/{self.name}-0-{self.nth_epoch(epoch)}" in self._gang_objects()
        return found

    async def ready(self, epoch: int) -> None:
        """Waits until the group of this epoch is Ready on two nodes, without a pod of another epoch."""

        async def is_ready() -> bool:
            status = await self.status()
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            pods = await self.pods()
            number = self.nth_epoch(epoch)
            if conditions.get("Ready") != "True" or status["groups"][0]["epoch"] != number:
                return False
            assert {pod["metadata"]["labels"][names.LABEL_EPOCH] for pod in pods} == {str(number)}
            assert len({pod["spec"]["nodeName"] for pod in pods}) == len(pods) == 2
            return True

        await until(f"epoch {epoch}, Ready", is_ready, timeout_s=PLACED_S, details=self.everything)

    async def delete(self) -> None:
        path = HETERO_INFERENCE.path(self.namespace, self.name)
        await self.server.delete(path, {"propagationPolicy": "Foreground"})

    async def remove(self) -> None:
        """Deletes the resource. Waits until the namespace has no resource, pod or object of a gang."""
        await self.delete()
        await until(
            "the end of the resource and its objects", self._gone, timeout_s=GONE_S, details=self.everything
        )

    async def _gone(self) -> bool:
        listed = await self.server.get(HETERO_INFERENCE.path(self.namespace))
        pods = (await self.server.get(POD.path(self.namespace)))["items"]
        return not listed["items"] and not pods and not self._gang_objects()

    def _gang_objects(self) -> list[str]:
        kind = GANG_OBJECTS[self.site.gang]
        return self.site.plane.kubectl("get", kind, "-n", self.namespace, "-o", "name").split()

    def everything(self) -> str:
        """Returns the resource's state as text, for a failed test."""
        here = ("-n", self.namespace)
        output = self.site.plane.kubectl(
            "get", f"pods,events,{GANG_OBJECTS[self.site.gang]}", *here, "-o", "wide"
        )
        stored = self.site.plane.kubectl("get", "hinf", *here, "-o", "jsonpath={.items[*].status.conditions}")
        return f"{output}\n{stored}\n{self.process.output}"


async def test_an_incomplete_gang_waits_and_a_complete_gang_serves(site: Site, resource: Resource) -> None:
    """This also holds for the epoch after a rank's death. At the end, no object remains."""
    await resource.create()
    await resource.waiting()
    site.open_quota(both=True)
    await resource.ready(epoch=1)
    (first, _) = sorted(pod["metadata"]["name"] for pod in await resource.pods())
    await end_rank(resource.server, resource.namespace, first, index=0)
    await resource.ready(epoch=2)
    await resource.remove()


async def test_a_deleted_pod_of_a_waiting_gang_is_replaced(site: Site, resource: Resource) -> None:
    await resource.create()
    (first, *_) = await resource.waiting()
    uid = (await resource.server.get(POD.path(resource.namespace, first)))["metadata"]["uid"]
    await resource.server.delete(POD.path(resource.namespace, first), {})

    async def replaced() -> bool:
        return uid not in await resource.uids()

    await until("the end of the deleted pod", replaced, timeout_s=GONE_S, details=resource.everything)
    site.open_quota(both=True)
    await resource.ready(epoch=2 if site.gang is Gang.KUEUE else 1)  # Kueue evicts the whole group
    await resource.remove()


async def test_a_waiting_gang_is_deleted_with_its_resource(resource: Resource) -> None:
    await resource.create()
    await resource.waiting()
    await resource.remove()


@pytest.mark.parametrize("site", [Gang.KUEUE], indirect=True, ids=lambda gang: gang.value)
async def test_a_group_that_kueue_evicts_waits_and_counts_no_restart(site: Site, resource: Resource) -> None:
    site.open_quota(both=True)
    await resource.create()
    await resource.ready(epoch=1)
    stop_kueue_queue(site.plane, stopped=True)
    await resource.waiting(epoch=2)
    stop_kueue_queue(site.plane, stopped=False)
    await resource.ready(epoch=2)
    group = await resource.group()
    assert group.get("restarts", 0) == 0
    assert [(f["reason"], f["counted"]) for f in group["failures"]] == [("PodDisrupted", False)]
    await resource.remove()


@pytest.mark.parametrize("site", [Gang.KUEUE], indirect=True, ids=lambda gang: gang.value)
async def test_pods_on_a_lost_node_are_deleted_with_the_node(site: Site, resource: Resource) -> None:
    """Kueue's finalizer remains after the operator's deletion by force.

    This is the last test, because it removes a node.
    """
    site.open_quota(both=True)
    await resource.create()
    await resource.ready(epoch=1)
    # kwok stops to play a node without its label. The control plane of the tests takes an hour to detect a
    # silent node. So the test marks the node as the node controller does, which then marks the node's pods.
    site.plane.kubectl("label", "node", OTHER_NODE, f"{kwok.LABEL}-")
    silent = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "no heartbeat"}
    silent["lastTransitionTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    patch = json.dumps({"status": {"conditions": [silent]}})
    site.plane.kubectl("patch", "node", OTHER_NODE, "--subresource=status", "--type=strategic", "-p", patch)

    async def ended_epoch() -> bool:
        return [f["reason"] for f in (await resource.group()).get("failures", ())] == ["NodeLost"]

    await until("the loss of the node", ended_epoch, timeout_s=PLACED_S, details=resource.everything)
    # Kueue does not know nodes, and would admit the next epoch because its quota is two
    site.open_quota(both=False)
    site.plane.kubectl("delete", "node", OTHER_NODE)
    await resource.waiting(epoch=2)

    async def first_is_gone() -> bool:
        epochs = {pod["metadata"]["labels"][names.LABEL_EPOCH] for pod in await resource.pods()}
        return epochs == {str(resource.nth_epoch(2))}

    await until("the end of the lost pods", first_is_gone, timeout_s=GONE_S, details=resource.everything)
    await resource.remove()


def delete_gang_objects(plane: Cluster, kind: str) -> None:
    """Runs the documented commands that delete the objects of gangs before an upgrade of Kubernetes."""
    (commands,) = re.findall(r"```\n( +for KIND in .*?)```", GUIDE.read_text(), re.DOTALL)
    path = f"{tools.program(tools.KUBERNETES, 'kubectl').parent}:{os.environ['PATH']}"
    run(["bash", "-euo", "pipefail", "-c", commands], environment={**plane.environment(), "PATH": path})
    assert not plane.kubectl("get", kind, "--all-namespaces", "-o", "name")


async def finds_gangs(process: OperatorProcess, gang: Gang) -> None:
    """Waits until an operator works and has found the API of a gang scheduler."""
    await process.working()
    found = f"gang scheduler {gang.value}: the cluster serves its API"
    await until("discovery", lambda: found in process.output, PLACED_S)


@pytest.mark.parametrize("site", list(NEXT), indirect=True, ids=lambda gang: gang.value)
async def test_a_cluster_upgrade_does_not_interrupt_a_group(
    site: Site, resource: Resource, tmp_path: Path
) -> None:
    """The test upgrades Kubernetes to each later version in turn, on the same etcd.

    After each upgrade, a rank of one group dies, and the next epoch is a gang of the new version. The pods of
    another group stay the same to the end. This is the last test, because it replaces the cluster.

    If etcd contains objects of an alpha version that an API server no longer has, it never becomes
    ready. So the test deletes these objects first, while no operator runs (docs/user/operate/capacity.md).
    """
    server, namespace = resource.server, resource.namespace
    untouched = Resource(site, server, namespace, resource.process, name="untouched", cpu="2")
    site.open_quota(both=True)
    for each in (untouched, resource):
        await each.create()
        await each.ready(epoch=1)
    lasting, epoch = await untouched.uids(), 1
    async with contextlib.AsyncExitStack() as operators:
        while site.gang in NEXT:
            before = await resource.uids()
            await resource.process.stop()
            delete_gang_objects(site.plane, GANG_OBJECTS[site.gang])
            site.gang = NEXT[site.gang]
            upgrade_control_plane(site.plane.state, KUBERNETES[site.gang])
            log = tmp_path / f"log under {site.gang.value}"
            started = operator(site.plane.kubeconfig, log, allow_host_paths="true")
            process = resource.process = untouched.process = await operators.enter_async_context(started)
            await finds_gangs(process, site.gang)
            await resource.ready(epoch)
            assert await resource.uids() == before
            (first, _) = sorted(pod["metadata"]["name"] for pod in await resource.pods())
            await end_rank(server, namespace, first, index=0)
            epoch += 1
            await resource.ready(epoch)
            gangs = {pod["metadata"]["labels"][names.LABEL_GANG] for pod in await resource.pods()}
            assert gangs == {site.gang.value}
            await untouched.ready(epoch=1)
            assert await untouched.uids() == lasting
        await untouched.delete()
        await resource.remove()
