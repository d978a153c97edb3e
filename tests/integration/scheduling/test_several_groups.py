"""Tests several groups on several nodes: drains, lost nodes and priority never leave clients without a group.

API server, scheduler, disruption controller and endpoint controller are real. `Kubelets` play the kubelets.
"""

import asyncio
import contextlib
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_operator.kube.paths import DISRUPTION_BUDGET, HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.errors import ClusterError
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import operator, until
from tests.integration.scheduling.conftest import add_node, apply, pods_of
from tests.integration.scheduling.kubelets import Kubelets, kubelets

GANG_SCHEDULING = False
NODES = ("spread-a", "spread-b", "spread-c")
POOL = {"template": {"nodeSelector": {"pool": "spread"}}, "resources": {"requests": {"cpu": "3"}}}
ROLES = [{"name": name, "device": "CPU", **POOL} for name in ("first", "second")]
SETTINGS: dict[str, Any] = {
    "roles": ROLES,
    "replicas": 2,
    "drainTimeout": "2s",
    "restart": {"nodeLostAfter": "1s", "backoffMax": "10s"},
}
ENDPOINT_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
STEP_S = 60.0


class Clients:
    """Clients of a resource's Service.

    Each asks a ready endpoint, and then another one if the first has gone.

    Attributes:
        asked: number of requests so far.
        failed: for each request that no endpoint could answer: the endpoints and the running pods.
    """

    def __init__(self, server: ApiServer, namespace: str, nodes: Kubelets) -> None:
        self.asked = 0
        self.failed: list[str] = []
        self.slices: dict[str, list[str]] = {}
        self._server, self._path, self._nodes = server, ENDPOINT_SLICES.format(namespace), nodes

    async def watch(self, service: str) -> None:
        """Watches the Service's endpoints, as kube-proxy does."""
        query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        async for event in self._server.watch(self._path, query):
            found = event["object"]
            ready = [
                endpoint["targetRef"]["name"]
                for endpoint in (found.get("endpoints") or ())
                if endpoint["conditions"].get("ready")
            ]
            self.slices[found["metadata"]["name"]] = [] if event["type"] == "DELETED" else ready

    async def ask(self) -> None:
        """Sends requests until cancelled."""
        number = 0
        while True:
            ready = [name for names_ in self.slices.values() for name in names_]
            number += 1  # requests alternate between the endpoints
            answered = bool(ready) and ready[number % len(ready)] in self._nodes.running
            self.asked += 1
            others_run = set(ready) & self._nodes.running.keys()
            if not answered and not others_run:
                self.failed.append(f"endpoints {ready}, running {sorted(self._nodes.running)}")
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def clients(server: ApiServer, namespace: str, nodes: Kubelets) -> AsyncIterator[Clients]:
    """Runs clients after a group serves, until the context ends."""
    found, problems = Clients(server, namespace, nodes), list[BaseException]()
    watch = start_task(found.watch("pair"), name="endpoints", failed=problems.append)
    tasks = {watch}
    try:
        await until("a ready endpoint", lambda: any(found.slices.values()), timeout_s=STEP_S)
        tasks.add(start_task(found.ask(), name="clients", failed=problems.append))
        yield found
        assert not watch.done(), problems
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert not problems, problems


class Pair:
    """The resource `pair`: two groups of two pods."""

    def __init__(self, plane: Cluster, server: ApiServer, namespace: str, nodes: Kubelets) -> None:
        self.plane, self.server, self.namespace, self.nodes = plane, server, namespace, nodes

    async def places(self) -> dict[str, set[str]]:
        """Returns the nodes of each group if both serve and share no node, or nothing."""
        found: dict[str, set[str]] = defaultdict(set)
        pods = await pods_of(self.server, self.namespace, "pair")
        for pod in pods:
            if pod["metadata"]["name"] not in self.nodes.running or "deletionTimestamp" in pod["metadata"]:
                return {}
            found[pod["metadata"]["labels"][names.LABEL_GROUP]].add(pod["spec"]["nodeName"])
        stored = await self.server.get(HETERO_INFERENCE.path(self.namespace, "pair"))
        conditions = {c["type"]: c["status"] for c in stored["status"]["conditions"]}
        whole = len(pods) == 4 and conditions.get("Ready") == "True"
        return dict(found) if whole and await self.budget() == (3, 1) else {}

    async def apart(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = await until("both groups", self.places, STEP_S, self.details)
        assert not set.intersection(*found.values()), f"two groups on one node: {found}"
        return found

    async def budget(self) -> tuple[int, int]:
        """Returns the requirement of the only budget, and the evictions that it allows now."""
        listed = await self.server.get(DISRUPTION_BUDGET.path(self.namespace))
        (budget,) = listed["items"]
        return budget["spec"]["minAvailable"], budget.get("status", {}).get("disruptionsAllowed", 0)

    async def drain(self, node: str) -> None:
        command = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
        await asyncio.to_thread(self.plane.kubectl, *command, timeout_s=70)

    def details(self) -> str:
        return self.plane.kubectl("get", "hinf,pods,pdb,nodes", "-n", self.namespace, "-o", "wide")


@pytest.mark.timeout(240)
async def test_drains_and_lost_nodes_leave_at_least_one_serving_group(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    for node in NODES:
        await add_node(server, node, labels={"pool": "spread"})
    async with (
        operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process,
        kubelets(server, namespace) as nodes,
    ):
        await process.working()
        await apply(server, namespace, "pair", **SETTINGS)
        pair = Pair(plane, server, namespace, nodes)
        await pair.apart()
        async with clients(server, namespace, nodes) as load:
            await _drain_each(pair, load, NODES)

            await _scale_down_while_group_0_starts(pair, load)

            # Two concurrent drains, of the nodes of both groups. The second drain waits until the first
            # drain's group serves again.
            first, second = [place.pop() for place in (await pair.apart()).values()]
            await asyncio.gather(pair.drain(first), pair.drain(second))
            assert not load.failed, "two drains at the same time"
            for node in (first, second):
                plane.kubectl("uncordon", node)
            await until("both groups", pair.places, STEP_S, pair.details)

            # A rollout has replaced one group. The other group is not evicted before that group serves again.
            nodes.held = True
            change = {"spec": {"engine": {"maxModelLen": 256}}}
            await server.merge(HETERO_INFERENCE.path(namespace, "pair"), change)
            serving = await until("one group is replaced", lambda: _lone_group(nodes), STEP_S, pair.details)
            await until("the budget keeps the other", lambda: _is_kept(pair), STEP_S, pair.details)
            with pytest.raises(ClusterError, match="disruption budget"):
                plane.kubectl(
                    "drain", serving, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=1s"
                )
            nodes.held = False
            plane.kubectl("uncordon", serving)
            await pair.apart()
            await until("all of the new revision", lambda: _is_rolled_out(pair), STEP_S, pair.details)

            await _lose_each(pair, load, NODES)
            assert load.asked > 500


def _gpu_node(gpus: int, memory_mib: int) -> dict[str, Any]:
    return {"gpus": gpus, "labels": {"nvidia.com/gpu.memory": str(memory_mib)}}


@pytest.mark.parametrize(
    ("gpu_role", "unequal"),
    [
        pytest.param(
            {"device": "GPU"}, (_gpu_node(8, 81559), _gpu_node(2, 81558), _gpu_node(4, 40960)), id="GPU sizes"
        ),
        pytest.param(
            {"device": "GPU", "deviceMemory": "80Gi"},
            (_gpu_node(8, 81559), _gpu_node(2, 81558), _gpu_node(4, 40960)),
            id="GPU sizes, size given",
        ),
        pytest.param({"device": "CPU"}, ({}, _gpu_node(1, 81559), _gpu_node(2, 81559)), id="numbers of GPUs"),
    ],
)
@pytest.mark.timeout(180)
async def test_groups_share_no_node_on_unequal_nodes(
    gpu_role: dict[str, Any],
    unequal: tuple[dict[str, Any], ...],
    plane: Cluster,
    server: ApiServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    pool = {"template": {"nodeSelector": {"pool": namespace}}, "resources": {"requests": {"cpu": "3"}}}
    roles = [{"name": "first", "device": "CPU", **pool}, {"name": "second", **gpu_role, **pool}]
    names_of_nodes = [f"{namespace}-{index}" for index in range(len(unequal))]
    for name, fields in zip(names_of_nodes, unequal, strict=True):
        labels = {**fields.get("labels", {}), "pool": namespace}
        await add_node(server, name, gpus=fields.get("gpus", 0), labels=labels)
    async with (
        operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process,
        kubelets(server, namespace) as nodes,
    ):
        await process.working()
        await apply(server, namespace, "pair", **{**SETTINGS, "roles": roles})
        pair = Pair(plane, server, namespace, nodes)
        await pair.apart()
        async with clients(server, namespace, nodes) as load:
            await _drain_each(pair, load, names_of_nodes)
            await _lose_each(pair, load, names_of_nodes)


async def _drain_each(pair: Pair, load: Clients, node_names: Sequence[str]) -> None:
    """Drains one node after another. Both groups must serve again on separate nodes before the next drain."""
    for node in node_names:
        await pair.drain(node)
        assert not load.failed, node
        await pair.apart()
        pair.plane.kubectl("uncordon", node)


async def _scale_down_while_group_0_starts(pair: Pair, load: Clients) -> None:
    """Scales down to one group. Group 1 must serve until group 0 serves."""
    path = HETERO_INFERENCE.path(pair.namespace, "pair")
    node = next(iter((await pair.apart())["0"]))
    pair.nodes.held = True
    await pair.drain(node)
    pair.plane.kubectl("uncordon", node)
    await pair.server.merge(path, {"spec": {"replicas": 1}})
    await until("group 1 still serves", lambda: _has_kept_group(pair), STEP_S, pair.details)
    pair.nodes.held = False
    await until("group 1 is gone", lambda: _has_one_group(pair), STEP_S, pair.details)
    assert not load.failed, load.failed[0]
    await pair.server.merge(path, {"spec": {"replicas": 2}})
    await pair.apart()


async def _has_kept_group(pair: Pair) -> bool:
    stored = await pair.server.get(HETERO_INFERENCE.path(pair.namespace, "pair"))
    return any(
        "this group stops once group 0 serves" in (g.get("message") or "") for g in stored["status"]["groups"]
    )


async def _has_one_group(pair: Pair) -> bool:
    groups = {
        pod["metadata"]["labels"][names.LABEL_GROUP]
        for pod in await pods_of(pair.server, pair.namespace, "pair")
    }
    return groups == {"0"}


async def _lose_each(pair: Pair, load: Clients, node_names: Sequence[str]) -> None:
    """Loses one node after another. Both groups must serve again on separate nodes before the next loss."""
    for node in node_names:
        await pair.apart()
        lost = [name for name, pod in pair.nodes.running.items() if pod["spec"]["nodeName"] == node]
        await pair.nodes.lose(node)
        await until(
            "the operator has deleted its pods by force",
            functools.partial(_are_gone, pair, lost),
            STEP_S,
            pair.details,
        )
        await pair.apart()
        await pair.nodes.find(node)
    assert not load.failed, "lost nodes"


async def _lone_group(nodes: Kubelets) -> str:
    """Returns the node of the only running group, or ""."""
    groups = {pod["metadata"]["labels"][names.LABEL_GROUP] for pod in nodes.running.values()}
    places = {str(pod["spec"]["nodeName"]) for pod in nodes.running.values()}
    return places.pop() if len(groups) == 1 and len(nodes.running) == 2 and len(places) == 1 else ""


async def _is_kept(pair: Pair) -> bool:
    return (await pair.budget())[1] == 0


async def _is_rolled_out(pair: Pair) -> bool:
    pods = await pods_of(pair.server, pair.namespace, "pair")
    return len({pod["metadata"]["labels"][names.LABEL_REVISION] for pod in pods}) == 1 and len(pods) == 4


async def _are_gone(pair: Pair, lost: list[str]) -> bool:
    present = {pod["metadata"]["name"] for pod in await pods_of(pair.server, pair.namespace, "pair")}
    return not present & set(lost)


@pytest.mark.parametrize("steps", [(4,), (1, 2, 3, 4)], ids=["at once", "one by one"])
@pytest.mark.timeout(240)
async def test_the_loss_of_one_of_two_nodes_ends_two_of_four_groups(
    steps: Sequence[int], plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Each node has room for all groups."""
    for index in range(2):
        await add_node(server, f"{namespace}-{index}", labels={"pool": namespace})
    pool = {"template": {"nodeSelector": {"pool": namespace}}, "resources": {"requests": {"cpu": "1"}}}
    roles = [{"name": name, "device": "CPU", **pool} for name in ("first", "second")]

    async def running(replicas: int) -> dict[str, dict[str, str]]:
        """Returns the node of each pod, by group and uid, if all pods run, or nothing."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        pods = await pods_of(server, namespace, "four")
        for pod in pods:
            if pod["metadata"]["name"] not in nodes.running or "deletionTimestamp" in pod["metadata"]:
                return {}
            group = pod["metadata"]["labels"][names.LABEL_GROUP]
            found[group][pod["metadata"]["uid"]] = pod["spec"]["nodeName"]
        return dict(found) if len(pods) == 2 * replicas else {}

    def show() -> str:
        return plane.kubectl("get", "hinf,pods,nodes", "-n", namespace, "-o", "wide")

    async with (
        operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process,
        kubelets(server, namespace) as nodes,
    ):
        await process.working()
        await apply(server, namespace, "four", **{**SETTINGS, "roles": roles, "replicas": steps[0]})
        for replicas in steps:
            await server.merge(HETERO_INFERENCE.path(namespace, "four"), {"spec": {"replicas": replicas}})
            before = await until(f"{replicas} groups", functools.partial(running, replicas), STEP_S, show)
        node_sets = [set(pods.values()) for pods in before.values()]
        assert sorted(map(sorted, node_sets)) == [[f"{namespace}-{index}"] for index in (0, 0, 1, 1)], before

        lost = f"{namespace}-0"
        lost_pods = {name for name, pod in nodes.running.items() if pod["spec"]["nodeName"] == lost}
        await nodes.lose(lost)

        async def gone() -> bool:
            return (
                not {pod["metadata"]["name"] for pod in await pods_of(server, namespace, "four")} & lost_pods
            )

        await until("the operator has deleted its pods by force", gone, STEP_S, show)
        after = await until("4 groups", functools.partial(running, 4), STEP_S, show)
        assert {node for pods in after.values() for node in pods.values()} == {f"{namespace}-1"}
        kept = [group for group in before if before[group] == after[group]]
        assert len(kept) == 2, f"{before} -> {after}"


async def test_each_group_has_its_own_zone(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Each pod fills a node. In the order of the names, both groups would span both zones."""
    zones = {"zoned-0": "a", "zoned-1": "b", "zoned-2": "b", "zoned-3": "a"}
    for node, zone in zones.items():
        await add_node(server, node, labels={"pool": "zoned", "topology.kubernetes.io/zone": zone})
    pool = {"template": {"nodeSelector": {"pool": "zoned"}}, "resources": {"requests": {"cpu": "10"}}}
    roles = [{"name": name, "device": "CPU", **pool} for name in ("first", "second")]

    async def places() -> dict[str, set[str]]:
        """Returns the zones of each group if all four pods are placed, or nothing."""
        found: dict[str, set[str]] = defaultdict(set)
        pods = await pods_of(server, namespace, "zoned")
        for pod in pods:
            zone = zones.get(pod["spec"].get("nodeName", ""), "")
            found[pod["metadata"]["labels"][names.LABEL_GROUP]].add(zone)
        return dict(found) if len(pods) == 4 and "" not in set.union(*found.values()) else {}

    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "zoned", roles=roles, replicas=2)
        found = await until("both groups are placed", places, STEP_S, lambda: process.output)
    assert sorted(map(sorted, found.values())) == [["a"], ["b"]]


async def test_placeholder_pods_of_lower_priority_make_room(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    # Each pod has its own node. If two pods preempt others on one node, kube-scheduler 1.35 can forget one of
    # the two.
    for number in range(2):
        await add_node(server, f"placed-{number}", labels={"pool": "placed"})
    low = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "placeholder"}}
    await server.create("/apis/scheduling.k8s.io/v1/priorityclasses", {**low, "value": -10})
    selector = {"nodeSelector": {"pool": "placed"}, "terminationGracePeriodSeconds": 0}
    requests = {"resources": {"requests": {"cpu": "9"}}}
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"placeholder-{number}", "namespace": namespace},
            "spec": {
                **selector,
                "priorityClassName": "placeholder",
                "containers": [{"name": "pause", "image": "pause:none", **requests}],
            },
        }
        for number in range(2)
    ]
    for pod in pods:
        await server.create(POD.path(namespace), pod)

    async def placed(prefix: str) -> bool:
        listed = await server.get(POD.path(namespace))
        found = [pod for pod in listed["items"] if pod["metadata"]["name"].startswith(prefix)]
        return len(found) == 2 and all(pod["spec"].get("nodeName") for pod in found)

    await until("placeholders on the nodes", lambda: placed("placeholder"), timeout_s=30)
    pool = {"template": {"nodeSelector": {"pool": "placed"}}, "resources": {"requests": {"cpu": "9"}}}
    roles = [{"name": name, "device": "CPU", **pool} for name in ("first", "second")]
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "urgent", roles=roles)

        def details() -> str:
            return plane.kubectl("get", "hinf,pods", "-n", namespace, "-o", "yaml") + process.output

        await until("the group in their place", lambda: placed("urgent-0"), timeout_s=60, details=details)
    listed = await server.get(POD.path(namespace))
    assert not [pod for pod in listed["items"] if pod["metadata"]["name"].startswith("placeholder")]
