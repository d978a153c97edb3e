"""Tests rollouts, scaling and refusals by the operator as a process, on a real API server.

A task plays the kubelets: it answers inspect pods, makes each worker pod ready, and ends pods with the image
BROKEN.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.life import Install
from tests.integration.operator.running_operator import PROFILE, SPEC, end_pod, operator, run_pod, until

GOOD, BETTER, BROKEN = "worker:1", "worker:2", "worker:broken"


class Fleet:
    """A resource with several groups in its own namespace.

    Attributes:
        two_epochs: groups that had pods of two epochs at the same time.
        fewest: smallest number of serving groups since the test last set it.
    """

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server = server
        self.namespace = namespace
        self.two_epochs: list[str] = []
        self.fewest = 0

    async def create(self, **spec: Any) -> None:
        body = {
            "apiVersion": HETERO_INFERENCE.api_version,
            "kind": names.KIND,
            "metadata": {"name": "tiny", "namespace": self.namespace},
            "spec": {**SPEC, **spec},
        }
        await self._server.create(HETERO_INFERENCE.path(self.namespace), body)

    async def change(self, **spec: Any) -> None:
        await self._server.merge(HETERO_INFERENCE.path(self.namespace, "tiny"), {"spec": spec})

    async def status(self) -> dict[str, Any]:
        stored = await self._server.get(HETERO_INFERENCE.path(self.namespace, "tiny"))
        return dict(stored.get("status") or {})

    async def condition(self, kind: str) -> tuple[str, str, str]:
        for found in (await self.status()).get("conditions", ()):
            if found["type"] == kind:
                return found["status"], found["reason"], found.get("message", "")
        return "", "", ""

    async def rolled_out(self, replicas: int) -> bool:
        status = await self.status()
        counts = {status.get(key) for key in ("readyReplicas", "updatedReplicas", "replicas")}
        return counts == {replicas} and status["currentRevision"] == status["updateRevision"]

    async def pods(self) -> dict[str, dict[str, Any]]:
        """Returns the worker pods by uid."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"
        listed = await self._server.get(POD.path(self.namespace), {"labelSelector": selector})
        return {pod["metadata"]["uid"]: pod for pod in listed["items"]}

    async def uids(self, *groups: int) -> set[str]:
        """Returns the uids of the pods of some groups."""
        wanted = {str(group) for group in groups}
        return {uid for uid, pod in (await self.pods()).items() if _label(pod, names.LABEL_GROUP) in wanted}

    async def play_kubelets(self) -> None:
        """Plays the kubelets until it is cancelled."""
        while True:
            with contextlib.suppress(ApiError):  # a pod was deleted in the meantime
                await self._act_once()
            await asyncio.sleep(0.05)

    async def _act_once(self) -> None:
        """Updates the status of all pods once, and records groups with two epochs and serving groups."""
        listed = await self._server.get(POD.path(self.namespace))
        epochs: dict[str, set[str]] = {}
        serving: dict[str, bool] = {}
        for pod in listed["items"]:
            name, phase = pod["metadata"]["name"], pod["status"]["phase"]
            if _label(pod, names.LABEL_COMPONENT) == names.COMPONENT_INSPECT:
                if phase == "Pending":
                    await end_pod(
                        self._server, self.namespace, name, exit_code=0, message=json.dumps(PROFILE)
                    )
                continue
            group = _label(pod, names.LABEL_GROUP)
            epochs.setdefault(group, set()).add(_label(pod, names.LABEL_EPOCH))
            serving[group] = serving.get(group, True) and _is_ready(pod)
            if phase == "Pending":
                await run_pod(self._server, self.namespace, name)
                if pod["spec"]["containers"][0]["image"] == BROKEN:
                    await end_pod(self._server, self.namespace, name, exit_code=70, message="no such file")
        self.two_epochs += [group for group, found in epochs.items() if len(found) > 1]
        self.fewest = min(self.fewest, sum(serving.values()))


def _label(pod: dict[str, Any], name: str) -> str:
    return str(pod["metadata"]["labels"].get(name, ""))


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@pytest_asyncio.fixture
async def fleet(server: ApiServer, namespace: str, install: Install, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Yields a fleet without its resource, with kubelets and an operator for its namespace."""
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    settings = {"watch_namespaces": namespace, "resync_seconds": "5"}
    made = Fleet(server, namespace)
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        acting = asyncio.ensure_future(made.play_kubelets())
        try:
            yield made
        finally:
            acting.cancel()
            await asyncio.wait({acting})
        assert not acting.done() or acting.cancelled(), acting.exception()
        assert "Traceback" not in process.output, process.output


async def test_a_stuck_rollout_can_be_rolled_back_and_scaled(fleet: Fleet, control_plane: Cluster) -> None:
    await fleet.create(replicas=3, engine={**SPEC["engine"], "image": GOOD}, restart={"maxRestarts": 1})
    await until("three groups serve", lambda: fleet.rolled_out(3), 60)
    first = (await fleet.status())["currentRevision"]

    fleet.fewest = 3
    await fleet.change(engine={"image": BETTER})
    await until("the new revision is everywhere", lambda: is_at_another(fleet, first), 90)
    assert fleet.fewest == 2
    second = (await fleet.status())["currentRevision"]
    kept = await fleet.uids(1, 2)

    await fleet.change(engine={"image": BROKEN})
    await until("the rollout is stuck", lambda: is_stuck(fleet), 90)
    assert await fleet.uids(1, 2) == kept
    status = await fleet.status()
    assert (status["readyReplicas"], status["currentRevision"]) == (2, second)
    assert status["updateRevision"] != second
    assert (await fleet.condition("Available"))[:2] == ("True", "Serving")
    assert (await fleet.condition("Ready"))[0] == "False"

    await fleet.change(engine={"image": BETTER})
    await until("the previous revision is everywhere", lambda: fleet.rolled_out(3), 60)
    assert (await fleet.status())["currentRevision"] == second
    assert await fleet.uids(1, 2) == kept

    all_kept = await fleet.uids(0, 1, 2)
    control_plane.kubectl("scale", "-n", fleet.namespace, "hinf/tiny", "--replicas=4")
    await until("four groups serve", lambda: fleet.rolled_out(4), 60)
    assert (await fleet.status())["currentRevision"] == second
    assert await fleet.uids(0, 1, 2) == all_kept
    scale = json.loads(
        control_plane.kubectl(
            "get", "hinf", "tiny", "-n", fleet.namespace, "--subresource=scale", "-o", "json"
        )
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (4, 4)
    leaders = control_plane.kubectl(
        "get", "pods", "-n", fleet.namespace, "-l", scale["status"]["selector"], "-o", "name"
    )
    assert len(leaders.split()) == 4
    control_plane.kubectl("scale", "-n", fleet.namespace, "hinf/tiny", "--replicas=1")
    await until("one group is left", lambda: fleet.rolled_out(1), 60)
    left = await fleet.uids(0)
    assert left <= all_kept
    assert set(await fleet.pods()) == left
    assert fleet.two_epochs == []


async def is_at_another(fleet: Fleet, revision: str) -> bool:
    return await fleet.rolled_out(3) and (await fleet.status())["currentRevision"] != revision


async def is_stuck(fleet: Fleet) -> bool:
    status, reason, message = await fleet.condition("Progressing")
    return (status, reason) == ("False", "RolloutStuck") and "no such file" in message


async def test_reports_the_api_servers_message_for_a_refused_object(fleet: Fleet, server: ApiServer) -> None:
    first, second = SPEC["roles"]
    # No schema contains this rule: huge pages need a limit.
    wrong = {**second, "resources": {"requests": {"hugepages-2Mi": "0", "cpu": "1"}}}
    await fleet.create(roles=[first, wrong])

    async def reported() -> bool:
        status, reason, message = await fleet.condition("Progressing")
        return (status, reason) == ("False", "ObjectRefused") and "Limit must be set" in message

    await until("the refusal is in the status", reported, 60)
    events = (await server.get(EVENT.path(fleet.namespace)))["items"]
    notes = [event["note"] for event in events if event["reason"] == "ObjectRefused"]
    assert any(re.search(r"the API server refuses Pod tiny-0-\d+-1:", note) for note in notes), notes
    await fleet.change(roles=[first, second])
    await until("it serves", lambda: fleet.rolled_out(1), 90)
    assert (await fleet.condition("Progressing"))[:2] == ("False", "Settled")


async def test_a_spec_with_refused_pods_stops_no_group(fleet: Fleet, server: ApiServer) -> None:
    """Earlier, the operator deleted the group before the API server refused the new pods."""
    await fleet.create()
    await until("it serves", lambda: fleet.rolled_out(1), 90)
    before, tried = await fleet.uids(0), await dry_runs(server)
    first, second = SPEC["roles"]
    wrong = {**second, "resources": {"requests": {"hugepages-2Mi": "0", "cpu": "1"}}}
    await fleet.change(roles=[first, wrong])

    async def stalled() -> bool:
        status, reason, message = await fleet.condition("Stalled")
        return (status, reason) == ("True", "ObjectRefused") and "Limit must be set" in message

    await until("the refusal is in the status", stalled, 60)
    await asyncio.sleep(12)  # two resyncs
    assert await fleet.uids(0) == before
    assert (await fleet.condition("Available"))[:2] == ("True", "Serving")
    assert (await fleet.condition("Ready"))[:2] == ("False", "ObjectRefused")
    assert await dry_runs(server) - tried <= 5, "immediately, 5 s and 10 s later, of two pods each at most"

    better = {**second, "resources": {"requests": {"cpu": "1"}}}
    await fleet.change(roles=[first, better])
    await until("another revision is everywhere", lambda: is_whole_without(fleet, before), 90)
    tried = await dry_runs(server)
    await asyncio.sleep(12)
    assert await dry_runs(server) == tried, "an idle operator sends no dry runs"


async def test_a_missing_priority_class_stops_no_group(fleet: Fleet) -> None:
    """The API server answers 403 as for a quota.

    Earlier, the group was deleted and its new pods were refused.
    """
    await fleet.create()
    await until("it serves", lambda: fleet.rolled_out(1), 90)
    before = await fleet.uids(0)
    await fleet.change(scheduling={"priorityClassName": "nobody-made-it"})

    async def stalled() -> bool:
        status, reason, message = await fleet.condition("Stalled")
        return (status, reason) == ("True", "ObjectRefused") and "no PriorityClass with name" in message

    await until("the refusal is in the status", stalled, 60)
    assert await fleet.uids(0) == before
    assert (await fleet.condition("Available"))[:2] == ("True", "Serving")
    await fleet.change(scheduling={"priorityClassName": None})
    await until("all groups serve the previous spec", lambda: fleet.rolled_out(1), 90)
    assert await fleet.uids(0) == before


async def is_whole_without(fleet: Fleet, before: set[str]) -> bool:
    return await fleet.rolled_out(1) and not before & await fleet.uids(0)


async def dry_runs(server: ApiServer) -> float:
    """Returns the number of pods in dry runs."""
    lines = (await server.get_text("/metrics")).splitlines()
    meant = ("apiserver_request_total{", 'dry_run="All"', 'resource="pods"')
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in meant))
