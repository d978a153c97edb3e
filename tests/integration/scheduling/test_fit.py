"""Tests how the real kube-scheduler places groups on nodes: all pods of a group, or none."""

import asyncio
import re
import time
from functools import partial
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.kube.gangs import find_unsupported_versions
from heteroinfer_operator.kube.paths import DISRUPTION_BUDGET, HETERO_INFERENCE, POD
from heteroinfer_operator.kube.pending_pods import NOT_LOOKED_S
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster.crds import apply_crds
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import SPEC, operator, run_pod, served_gangs, until
from tests.integration.scheduling.conftest import (
    add_node,
    apply,
    build_unknown_gang_crd,
    capacity,
    condition,
    create,
    delete,
    events,
    inspected,
    pods_of,
    set_gpus,
)
from tests.shapes.profiles import recorded_profiles

GANG_SCHEDULING = False
TOO_MANY_REQUESTS = 429
ZONE = "topology.kubernetes.io/zone"


async def nodes_of(server: ApiServer, namespace: str, name: str) -> set[str]:
    """Returns the nodes of a group's pods if every pod has a node, or nothing."""
    placed = [pod["spec"].get("nodeName", "") for pod in await pods_of(server, namespace, name)]
    return set(placed) if len(placed) == 2 and all(placed) else set()


async def test_groups_wait_for_capacity_and_release_it_for_others(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    await add_node(server, "a", gpus=0)
    await add_node(server, "b", gpus=4, taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "one")

        async def refused() -> str:
            status, reason, message = await capacity(server, namespace, "one")
            return message if (status, reason) == ("False", "InsufficientGPU") else ""

        words = await until("the condition names the blocking pods", refused, timeout_s=30)
        blocker = (
            "needs 1 pod (role gpu) with 1 nvidia.com/gpu; "
            "node a has no nvidia.com/gpu, node b is tainted team=x:NoSchedule"
        )
        assert words.startswith(blocker)
        reported = await until("the event", lambda: events(server, namespace, "InsufficientGPU"))
        assert [note.startswith(blocker) for note in reported] == [True], "said once"
        assert await pods_of(server, namespace, "one") == []

        await set_gpus(server, "a", 1)
        await until(
            "all pods placed",
            lambda: nodes_of(server, namespace, "one"),
            timeout_s=30,
            details=lambda: (
                plane.kubectl("get", "hinf,pods,events", "-n", namespace, "-o", "yaml") + process.output
            ),
        )
        by_role = {
            p["metadata"]["labels"]["heteroinfer.dev/role"]: p
            for p in await pods_of(server, namespace, "one")
        }
        assert by_role["gpu"]["spec"]["nodeName"] == "a"

        # The last GPU is in use. Two other groups wait for it, and only one of them can get it.
        await apply(server, namespace, "two")
        await apply(server, namespace, "three")
        await until("both wait", lambda: all_wait(server, namespace, "two", "three"), timeout_s=30)
        await delete(server, namespace, "one")
        await until(
            "one of them has all its pods",
            lambda: one_is_placed(server, namespace),
            timeout_s=60,
            details=lambda: plane.kubectl("get", "hinf,pods", "-n", namespace, "-o", "yaml") + process.output,
        )
        placed = [name for name in ("two", "three") if await nodes_of(server, namespace, name)]
        (other,) = {"two", "three"} - {*placed}
        assert await pods_of(server, namespace, other) == [], "nothing of the other is created"
        assert (await capacity(server, namespace, other))[0] == "False"


async def test_nodes_of_other_systems_and_architectures_are_neither_counted_nor_used(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """An arm64 and a Windows node have free capacity, and the amd64 node comes later.

    A user's own values take precedence.
    """
    await add_node(server, "arm", labels={"kubernetes.io/arch": "arm64", "pool": "mixed"})
    await add_node(server, "win", labels={"kubernetes.io/os": "windows", "pool": "mixed"})
    role = {"device": "CPU", "resources": {"requests": {"cpu": "2"}}}
    template = {"nodeSelector": {"pool": "mixed"}}
    roles = [{"name": name, **role, "template": template} for name in ("first", "second")]
    own = {"nodeSelector": {"pool": "mixed", "kubernetes.io/arch": "arm64"}}
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "mixed", roles=roles)

        async def refused() -> str:
            _, reason, message = await capacity(server, namespace, "mixed")
            return message if reason == "InsufficientCapacity" else ""

        def details() -> str:
            return plane.kubectl("get", "hinf,pods,nodes", "-n", namespace, "-o", "yaml") + process.output

        words = await until("the refusal", refused, timeout_s=30, details=details)
        assert "node arm is of architecture arm64, and the pod needs amd64" in words
        assert "node win is of system windows, and the pod needs linux" in words
        assert await pods_of(server, namespace, "mixed") == []

        await apply(server, namespace, "ours", roles=[{**each, "template": own} for each in roles])
        placed = await until(
            "placed", lambda: nodes_of(server, namespace, "ours"), timeout_s=30, details=details
        )
        assert placed == {"arm"}, "the user has images for it"
        await add_node(server, "amd", labels={"pool": "mixed"})
        placed = await until(
            "placed", lambda: nodes_of(server, namespace, "mixed"), timeout_s=30, details=details
        )
        assert placed == {"amd"}
        wanted = {"pool": "mixed", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        pods = await pods_of(server, namespace, "mixed")
        assert [pod["spec"]["nodeSelector"] for pod in pods] == [wanted, wanted]


async def test_a_group_never_waits_for_the_capacity_of_its_own_pods(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """The node has room for the group once. While the status waits for its budget, no pod is created."""
    await add_node(server, "once", labels={"pool": "once"})
    template = {"nodeSelector": {"pool": "once"}}
    half = {"device": "CPU", "resources": {"requests": {"cpu": "6"}}, "template": template}
    roles = [{"name": name, **half} for name in ("first", "second")]
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        for number in range(6):
            name = f"own-{number}"

            def details() -> str:
                return (
                    plane.kubectl("get", "hinf,pods,events", "-n", namespace, "-o", "yaml") + process.output
                )

            await create(server, namespace, name, roles=roles)
            inspecting = partial(pods_of, server, namespace, name, names.COMPONENT_INSPECT)
            await until("the inspect pod", inspecting, timeout_s=30)
            for seconds in range(1, 5):  # each change writes a status
                change = {"spec": {"drainTimeout": f"{seconds}s"}}
                await server.merge(HETERO_INFERENCE.path(namespace, name), change)
                await asyncio.sleep(0.05)
            assert await inspected(server, namespace, name)
            await until("placed", partial(nodes_of, server, namespace, name), timeout_s=30, details=details)
            assert await events(server, namespace, "InsufficientCapacity") == []
            await delete(server, namespace, name)


async def all_wait(server: ApiServer, namespace: str, *resources: str) -> bool:
    found = [await capacity(server, namespace, name) for name in resources]
    return {reason for _, reason, _ in found} == {"InsufficientGPU"}


async def one_is_placed(server: ApiServer, namespace: str) -> bool:
    found = [await nodes_of(server, namespace, name) for name in ("two", "three")]
    return any(found)


async def test_a_group_uses_the_zone_with_capacity_for_all_its_pods(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    await add_node(
        server,
        "z1",
        gpus=8,
        labels={ZONE: "1", "pool": "z"},
    )
    for name in ("z2", "z3"):
        await add_node(server, name, gpus=1, labels={ZONE: "2", "pool": "z"})
    roles = [
        {
            "name": name,
            "device": "GPU",
            "deviceMemory": "80Gi",
            "template": {"nodeSelector": {"pool": "z"}},
            "resources": {"requests": {"cpu": "12"}},
        }
        for name in ("first", "second")
    ]
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "zoned", roles=roles, scheduling={"topologyKey": ZONE})
        found = await until("placed", lambda: nodes_of(server, namespace, "zoned"), timeout_s=30)
        assert found == {"z2", "z3"}, "zone 1 has GPUs for both, but not CPUs"


async def test_pods_that_must_be_near_each_other_are_all_placed_or_not_created(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Four pods have required pod affinity by zone.

    At first no zone has nodes for all of them, later one has.
    """
    key = "tests.heteroinfer.dev/zone"

    async def add_nodes(zone: str, *numbers: int) -> None:
        for number in numbers:
            await add_node(server, f"near-{zone}{number}", labels={key: zone, "pool": "near"})

    term = {"topologyKey": key, "labelSelector": {"matchLabels": {"app": "x"}}}
    template = {
        "labels": {"app": "x"},
        "nodeSelector": {"pool": "near"},
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
    }
    # Twelve of a node's sixteen CPUs, so a node has space for one pod.
    roles = [{"name": "r", "device": "CPU", "pods": 4, "resources": {"requests": {"cpu": "12"}}}]
    await add_nodes("a", 1, 2, 3)
    await add_nodes("b", 1, 2, 3)
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "near", roles=[{**roles[0], "template": template}])

        async def refused() -> str:
            _, reason, message = await capacity(server, namespace, "near")
            return message if reason == "InsufficientCapacity" else ""

        def details() -> str:
            return plane.kubectl("get", "hinf,pods,nodes", "-n", namespace, "-o", "yaml") + process.output

        words = await until("the refusal", refused, timeout_s=30, details=details)
        assert words.startswith(
            f"no single value of {key} has enough free capacity: a: needs 4 pods (role r)"
        )
        assert await pods_of(server, namespace, "near") == [], "none of its pods has a node"
        await add_nodes("b", 4)

        async def placed() -> set[str]:
            found = [pod["spec"].get("nodeName", "") for pod in await pods_of(server, namespace, "near")]
            return set(found) if len(found) == 4 and all(found) else set()

        assert await until("all pods placed", placed, timeout_s=60, details=details) == {
            f"near-b{number}" for number in range(1, 5)
        }


async def test_pods_without_a_gang_quote_the_scheduler_once(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    selector = {"template": {"nodeSelector": {"pool": "none"}}}
    roles = [{"name": name, "device": "CPU", **selector} for name in ("first", "second")]
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        # The inspect pod has the resources of a pod of the first role.
        await apply(server, namespace, "picky", roles=roles, scheduling={"gang": "Never"})

        async def words() -> str:
            _, reason, message = await capacity(server, namespace, "picky")
            return message if "node affinity/selector" in message and reason == "Unschedulable" else ""

        def details() -> str:
            kinds = "hinf,pods,nodes,events.events.k8s.io"
            return plane.kubectl("get", kinds, "-n", namespace, "-o", "yaml") + process.output

        message = await until("the scheduler's words", words, timeout_s=30, details=details)
        assert re.match(r"pod picky-0-[0-9]+-", message), message
        assert len(await pods_of(server, namespace, "picky")) == 2
        await add_node(server, "more", gpus=0)

        async def other_words() -> bool:
            return (await words()) not in ("", message)

        await until(
            "another message, because there is one more node", other_words, timeout_s=30, details=details
        )
        # Before the scheduler's first message, the condition may have the operator's own count.
        notes = await events(server, namespace, "Unschedulable")
        of_scheduler = sum("is not placed" in note for note in notes)
        assert of_scheduler <= 1, details()
        assert 1 <= len(notes) <= of_scheduler + 1, details()


async def test_a_drain_evicts_one_rank_and_the_budget_blocks_the_others(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        roles = [{"name": name, "device": "CPU"} for name in ("first", "second")]
        await apply(server, namespace, "drained", roles=roles)
        await until("placed", lambda: nodes_of(server, namespace, "drained"), timeout_s=30)
        for pod in await pods_of(server, namespace, "drained"):
            await run_pod(server, namespace, pod["metadata"]["name"])
        first, second = [pod["metadata"]["name"] for pod in await pods_of(server, namespace, "drained")]
        await until("an eviction is allowed", lambda: evict(server, namespace, first), timeout_s=30)
        with pytest.raises(ApiError, match="disruption budget"):
            await evict_now(server, namespace, second)


async def test_a_drain_evicts_stuck_pods_but_not_pods_of_a_serving_group(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """A running pod is Ready only with its group.

    Earlier, its eviction waited forever for another pod's image.
    """
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        roles = [{"name": name, "device": "CPU"} for name in ("first", "second")]
        await apply(server, namespace, "stuck", roles=roles, replicas=2)

        async def placed() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for pod in await pods_of(server, namespace, "stuck"):
                if pod["spec"].get("nodeName"):
                    group = pod["metadata"]["labels"][names.LABEL_GROUP]
                    found.setdefault(group, []).append(pod["metadata"]["name"])
            return found if sum(map(len, found.values())) == 4 else {}

        groups = await until("placed", placed, timeout_s=30)
        for name in groups["0"]:
            await run_pod(server, namespace, name)
        # the image of the other pod never arrives
        await run_pod(server, namespace, groups["1"][0], ready=False)

        async def counted() -> bool:
            (budget,) = (await server.get(DISRUPTION_BUDGET.path(namespace)))["items"]
            status = budget.get("status", {})
            return (budget["spec"]["minAvailable"], status.get("currentHealthy")) == (3, 2)

        await until("the pods are counted", counted, timeout_s=30)
        for name in groups["0"]:
            with pytest.raises(ApiError, match="disruption budget"):
                await evict_now(server, namespace, name)
        await evict_now(server, namespace, groups["1"][0])


async def evict_now(server: ApiServer, namespace: str, name: str) -> None:
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"gracePeriodSeconds": 30},
    }
    await server.create(POD.path(namespace, name, "eviction"), body)


async def evict(server: ApiServer, namespace: str, name: str) -> bool:
    """Evicts a pod as soon as the disruption controller has counted the pods."""
    try:
        await evict_now(server, namespace, name)
    except ApiError as error:
        if error.status != TOO_MANY_REQUESTS:
            raise
        return False
    return True


async def test_a_pod_whose_scheduler_does_not_run_is_reported(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Also after a restart of the operator. The healthy scheduler's pods are never reported."""
    await add_node(server, "roomy", labels={"pool": "looked"})
    role = {"device": "CPU", "resources": {"requests": {"cpu": "2"}}}
    template = {"nodeSelector": {"pool": "looked"}}
    roles = [{"name": name, **role, "template": template} for name in ("first", "second")]
    seen: dict[str, list[tuple[str, str]]] = {"healthy": [], "absent": []}

    async def reported(name: str, wanted: tuple[str, str]) -> str:
        status, reason, message = await capacity(server, namespace, name)
        if not seen[name] or seen[name][-1] != (status, reason):
            seen[name].append((status, reason))
        return message or "none" if (status, reason) == wanted else ""

    def details() -> str:
        return plane.kubectl("get", "hinf,pods", "-n", namespace, "-o", "yaml") + process.output

    placed, unschedulable = ("True", "Placed"), ("False", "Unschedulable")
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "healthy", roles=roles)
        await until("placed", lambda: reported("healthy", placed), timeout_s=60, details=details)
        assert unschedulable not in seen["healthy"]
        scheduling = {"gang": "Never", "schedulerName": "nope"}
        await apply(server, namespace, "absent", roles=roles, scheduling=scheduling)
        words = await until(
            "the cause", lambda: reported("absent", unschedulable), timeout_s=60, details=details
        )
        assert "no scheduler has looked at the pod (schedulerName nope). Start that scheduler" in words
        assert await process.stop() == 0
    seen["absent"] = []
    async with operator(plane.kubeconfig, tmp_path / "again", allow_host_paths="true") as process:
        await process.working()
        since = time.monotonic()
        while time.monotonic() - since < NOT_LOOKED_S + 3:
            assert await reported("absent", unschedulable) == words
            await asyncio.sleep(0.1)
        assert seen["absent"] == [unschedulable], "the earlier operator's condition stays"


async def test_a_missing_resource_claim_is_a_possible_cause(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """kube-scheduler reports nothing about such a pod, although it has placed the other pod."""
    await add_node(server, "claims", labels={"pool": "claims"})
    role = {"device": "CPU", "resources": {"requests": {"cpu": "2"}}}
    template = {"nodeSelector": {"pool": "claims"}}
    claims = [{"name": "nic", "resourceClaimName": "nope"}]
    roles = [
        {"name": "first", **role, "template": template},
        {"name": "second", **role, "template": {**template, "resourceClaims": claims}},
    ]
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        await apply(server, namespace, "devices", roles=roles)

        async def named() -> bool:
            status, reason, message = await capacity(server, namespace, "devices")
            words = f"A possible cause is that resource claim nope does not exist in namespace {namespace}"
            return (status, reason) == ("False", "Unschedulable") and words in message

        def details() -> str:
            return plane.kubectl("get", "hinf,pods", "-n", namespace, "-o", "yaml") + process.output

        await until("the resource claim in the condition", named, timeout_s=60, details=details)
        assert await process.stop() == 0


async def test_gang_always_with_only_an_unknown_version_lists_the_known_ones(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """The cluster serves one gang API, in a version that the operator does not know."""
    await add_node(server, "ganged", labels={"pool": "ganged"})
    definition = build_unknown_gang_crd()
    apply_crds(plane, definition)
    served = "scheduling.volcano.sh/v9"

    async def is_only_unknown() -> bool:
        return await find_unsupported_versions(server) == (served,) and not await served_gangs(server)

    try:
        await until("its discovery", is_only_unknown, timeout_s=30)
        async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
            await process.working()
            template = {"template": {"nodeSelector": {"pool": "ganged"}}}
            roles = [{"name": name, "device": "CPU", **template} for name in ("first", "second")]
            await apply(server, namespace, "always", roles=roles, scheduling={"gang": "Always"})

            async def refused() -> str:
                status, reason, message = await condition(server, namespace, "always", "Planned")
                return message if (status, reason) == ("False", "NoGangScheduler") else ""

            words = await until("the refusal", refused, timeout_s=30, details=lambda: process.output)
            assert f"the cluster serves {served}, which this operator does not know" in words
            assert "v1alpha1 of Kubernetes 1.35, v1alpha2 of 1.36, v1beta1 of 1.37" in words
            assert "set scheduling.gang: Auto" in words
            assert await pods_of(server, namespace, "always") == []

            change = {"spec": {"scheduling": {"gang": "Auto"}}}
            await server.merge(HETERO_INFERENCE.path(namespace, "always"), change)
            placed = partial(nodes_of, server, namespace, "always")
            assert await until("placed", placed, timeout_s=30, details=lambda: process.output) == {"ganged"}
    finally:
        plane.kubectl("delete", "crd", definition["metadata"]["name"], "--wait=false")


async def test_a_gpu_holds_the_first_stage_of_a_model_with_an_encoder(
    plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """The CPU role is listed first. With text only, the CPU stage is first."""
    pool = {"template": {"nodeSelector": {"pool": "encoder"}}}
    await add_node(server, "seeing", gpus=2, labels={"pool": "encoder"})
    memory = {"requests": {"cpu": "2", "memory": "24Gi"}, "limits": {"memory": "24Gi"}}
    roles = [
        {"name": "cpu", "device": "CPU", "resources": memory, **pool},
        {"name": "gpu", "device": "GPU", "deviceMemory": "80Gi", **pool},
    ]
    profile = recorded_profiles()["Qwen2.5-VL-7B-Instruct"].to_json()
    images = {**SPEC["engine"], "dtype": "bfloat16"}
    engines = {"images": images, "text": {**images, "args": ["--language-model-only"]}}
    async with operator(plane.kubeconfig, tmp_path / "log", allow_host_paths="true") as process:
        await process.working()
        order: dict[str, list[str]] = {}
        for name, engine in engines.items():
            await apply(server, namespace, name, profile=profile, roles=roles, engine=engine)

            def details() -> str:
                return plane.kubectl("get", "hinf", "-n", namespace, "-o", "yaml") + process.output

            await until("placed", partial(is_bound, server, namespace, name), timeout_s=30, details=details)
            labels = [pod["metadata"]["labels"] for pod in await pods_of(server, namespace, name)]
            labels.sort(key=lambda each: int(each[names.LABEL_POD_INDEX]))
            order[name] = [each[names.LABEL_ROLE] for each in labels]
        assert order == {"images": ["gpu", "cpu"], "text": ["cpu", "gpu"]}


async def is_bound(server: ApiServer, namespace: str, name: str) -> bool:
    """Reports whether the two pods of a group have nodes."""
    return [pod["spec"].get("nodeName") for pod in await pods_of(server, namespace, name)] == ["seeing"] * 2
