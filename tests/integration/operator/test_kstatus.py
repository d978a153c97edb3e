"""Tests the kstatus of each state of a resource, on real objects of a real API server.

Flux and other tools that wait for applied objects use kstatus; it reads observedGeneration and the conditions
Stalled and Ready.
"""

import json
from collections.abc import Collection
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from tests.integration.operator.kstatus import CURRENT, FAILED, IN_PROGRESS, TERMINATING, becomes, kstatus
from tests.integration.operator.life import COLLECTED_S, Install, bind, condition, nothing_left, stored
from tests.integration.operator.running_operator import (
    PROFILE,
    create_resource,
    end_pod,
    end_rank,
    operator,
    run_pod,
    until,
)


async def change(server: ApiServer, namespace: str, **spec: object) -> None:
    await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": spec})


async def remove_pods(server: ApiServer, namespace: str, names: Collection[str] = ()) -> None:
    """Removes the pods that are in deletion, in place of the kubelets, until no pod of `names` exists."""

    async def end(name: str) -> None:
        try:
            await server.delete(POD.path(namespace, name), {"gracePeriodSeconds": 0})
        except ApiError as error:
            assert error.status == NOT_FOUND, "the pod ended by itself"  # noqa: PT017 - any other is a failure

    async def are_gone() -> bool:
        pods = [pod["metadata"] for pod in await stored(server, POD, namespace)]
        for pod in pods:
            if "deletionTimestamp" in pod:
                await end(pod["name"])
        return not {pod["name"] for pod in pods}.intersection(names)

    await until("pods go", are_gone)


async def run_pods(server: ApiServer, namespace: str, node: str) -> list[str]:
    """Runs both pods of the next epoch, in place of scheduler and kubelet, and returns their names."""

    async def both() -> list[str]:
        found = [
            pod["metadata"]["name"]
            for pod in await stored(server, POD, namespace)
            if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER
            and "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(found) if len(found) == 2 else []

    pods: list[str] = await until("two pods", both, timeout_s=30)
    for pod in pods:
        await bind(server, namespace, pod, node)
        await run_pod(server, namespace, pod)
    await becomes(server, namespace, CURRENT, ("Ready", "True", "Serving"))
    return pods


async def start(server: ApiServer, namespace: str, node: str) -> list[str]:
    """Brings a stored resource from its model's inspection to Ready.

    Its kstatus must be InProgress until then.
    """

    async def inspect_pod() -> str:
        pods = [pod["metadata"]["name"] for pod in await stored(server, POD, namespace)]
        return next((name for name in pods if f"-{names.COMPONENT_INSPECT}-" in name), "")

    inspect = await until("the inspect pod", inspect_pod)
    await becomes(server, namespace, IN_PROGRESS, ("Ready", "False", "Pending"))
    await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))
    await becomes(server, namespace, IN_PROGRESS, ("Available", "False", "Scheduling"))
    return await run_pods(server, namespace, node)


async def see_the_end(server: ApiServer, namespace: str) -> None:
    """Waits until a deleted resource and all its objects are gone."""

    async def is_gone() -> bool:
        await remove_pods(server, namespace)
        return await nothing_left(server, namespace)

    await until("nothing is left", is_gone, COLLECTED_S)


async def test_kstatus_reports_progress_after_an_apply(server: ApiServer, namespace: str) -> None:
    """No operator has seen the object yet: without observedGeneration, kstatus would report it as done."""
    await create_resource(server, namespace)
    assert await kstatus(server, namespace) == IN_PROGRESS
    await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})


async def test_kstatus_matches_each_phase_of_a_resource(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    installed = install()
    async with operator(installed.kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await create_resource(server, namespace)
        pods = await start(server, namespace, node)

        await change(server, namespace, restartedAt="2026-11-22T00:00:00Z")
        await becomes(server, namespace, IN_PROGRESS, ("Available", "False", "Stopping"))
        await remove_pods(server, namespace, pods)
        pods = await run_pods(server, namespace, node)

        await change(server, namespace, model={"uri": "hf://org/model"})
        await becomes(server, namespace, FAILED, ("Stalled", "True", "ModelCacheNotGiven"))
        assert (await condition(server, namespace, "Available"))[0] == "True", (
            "the running group keeps serving"
        )
        await change(server, namespace, model={"uri": "pvc://models/tiny"})
        await becomes(server, namespace, CURRENT, ("Ready", "True", "Serving"))

        await change(server, namespace, suspend=True)
        await becomes(server, namespace, IN_PROGRESS, ("Ready", "False", "Stopping"))
        await remove_pods(server, namespace, pods)
        await becomes(server, namespace, CURRENT, ("Ready", "True", "Suspended"))
        await change(server, namespace, suspend=False, replicas=0)
        await becomes(server, namespace, CURRENT, ("Ready", "True", "ScaledToZero"))

        far_too_much = {"requests": {"cpu": "1000"}}
        spec = (await server.get(HETERO_INFERENCE.path(namespace, "tiny")))["spec"]
        roles = [{**role, "resources": far_too_much} for role in spec["roles"]]
        await change(server, namespace, replicas=1, scheduling={"gang": "Auto"}, roles=roles)
        await becomes(server, namespace, IN_PROGRESS, ("CapacityAvailable", "False", "InsufficientCapacity"))

        again = {"scheduling": {"gang": "Never"}, "roles": spec["roles"], "restart": {"maxRestarts": 0}}
        await change(server, namespace, **again)
        _, follower = await run_pods(server, namespace, node)
        await end_rank(server, namespace, follower, index=1)
        await becomes(server, namespace, FAILED, ("Stalled", "True", "RestartsUsedUp"))

        waits = {"propagationPolicy": "Foreground"}
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), waits)
        assert await kstatus(server, namespace) == TERMINATING
        await see_the_end(server, namespace)
        assert "Traceback" not in process.output, process.output


async def test_an_older_observed_generation_is_in_progress(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    """A Ready resource that is edited while no operator runs is in progress until an operator sees it."""
    installed = install()
    async with operator(installed.kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await create_resource(server, namespace)
        await start(server, namespace, node)
        assert await process.stop() == 0
    await change(server, namespace, restart={"maxRestarts": 3})
    assert await condition(server, namespace, "Ready") == ("True", "Serving")
    assert await kstatus(server, namespace) == IN_PROGRESS
    async with operator(installed.kubeconfig, tmp_path / "log-2", resync_seconds="1") as process:
        await process.working()
        await becomes(server, namespace, CURRENT, ("Ready", "True", "Serving"))
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await see_the_end(server, namespace)
