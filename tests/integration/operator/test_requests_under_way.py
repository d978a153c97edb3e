"""Tests that no reconcile waits for a slow request, and that the next reconcile knows its result."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest_asyncio

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    CreateObject,
    DeleteObject,
    PatchStatus,
    RecordEvent,
    ResourceKey,
    ResourceObservation,
)
from heteroinfer_operator.kube.action_run import Callbacks
from heteroinfer_operator.kube.adapter import KubeCluster
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.events import MAX_EVENTS_PER_MINUTE, EventRecorder
from heteroinfer_operator.kube.kept import WRITES_AT_ONCE
from heteroinfer_operator.kube.leader_client import LeaderClient
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, POD, SERVICE
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.manifests.identity import Owner
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.api_proxy import ApiProxy, api_proxy
from tests.integration.operator.running_operator import DEADLINE_S, child, create_resource, until
from tests.integration.operator.running_operator import pod as bare_pod

SOON_S = 1.5
"""A reconcile waits twice for a quarter of a second. The machine may be loaded."""
GROUP = frozenset({"group/0"})


@dataclass(slots=True)
class Behind:
    """The operator's port behind a proxy, with its caches and records.

    Attributes:
        proxy: proxy in front of the API server.
        server: client through the proxy.
        direct: client of the API server itself.
        owner: the resource.
        state: the caches.
        recorder: recorder of events.
        cluster: the port.
        woken: resources whose reconcile was triggered.
        written: written statuses in their order.
        dropped: dropped events.
    """

    proxy: ApiProxy
    server: ApiServer
    direct: ApiServer
    owner: Owner
    state: ClusterState
    recorder: EventRecorder
    cluster: KubeCluster
    woken: list[ResourceKey] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    dropped: list[None] = field(default_factory=list)

    async def observe(self) -> ResourceObservation:
        observation = await self.cluster.observe(self.owner.key)
        assert observation is not None
        return observation

    async def run(self, *actions: Action) -> float | None:
        """Runs actions on the current observation. Fails if this takes longer than PROMPT_S."""
        observation = await self.observe()
        started = time.monotonic()
        again_s = await self.cluster.run(observation, actions)
        assert time.monotonic() - started < SOON_S
        return again_s

    async def pods(self) -> list[str]:
        listed = await self.direct.get(POD.path(self.owner.key.namespace))
        return sorted(pod["metadata"]["name"] for pod in listed["items"])

    async def write_members(self, *pods: str) -> None:
        observation = await self.observe()
        ranks = [
            {"rank": rank, "role": "front", "pod": pod, "started": True, "ready": True}
            for rank, pod in enumerate(pods)
        ]
        group = {"index": 0, "epoch": 7, "phase": "Ready", "members": ranks}
        version = observation.resource.resource_version
        await self.run(PatchStatus(status={"groups": [group]}, resource_version=version))


@pytest_asyncio.fixture
async def behind(
    control_plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> AsyncIterator[Behind]:
    """Yields the operator's port behind a proxy, without reconciles of its own."""
    async with api_proxy(control_plane.kubeconfig, tmp_path / "kubeconfig") as proxy:
        through = ApiServer(await load_configuration(str(proxy.kubeconfig)))
        owner = await create_resource(server, namespace)
        woken: list[ResourceKey] = []
        written: list[bool] = []
        dropped: list[None] = []
        state = ClusterState(
            through, namespaces=[namespace], touched=lambda key: None, nodes_changed=lambda: None
        )
        recorder = EventRecorder(through, reporter="test", dropped=lambda: dropped.append(None))
        groups = LeaderClient()
        callbacks = Callbacks(wake=woken.append, status_written=lambda key, done: written.append(done))
        cluster = KubeCluster(through, state, recorder=recorder, groups=groups, callbacks=callbacks)
        running = asyncio.ensure_future(state.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await state.wait_synced()
            yield Behind(proxy, through, server, owner, state, recorder, cluster, woken, written, dropped)
        finally:
            # Pending requests continue beside reconciles, and end with this test.
            under_way = {task for task in asyncio.all_tasks() if " of " in task.get_name()}
            for task in under_way:
                task.cancel()
            proxy.heal()
            running.cancel()
            await asyncio.wait({running, *under_way})
            await recorder.close()
            await groups.close()
            await through.close()


def pod(owner: Owner, index: int, epoch: int = 7) -> CreateObject:
    labels = {"component": "worker", "group": "0", "epoch": str(epoch), "pod-index": str(index)}
    manifest = bare_pod(owner, f"tiny-0-{epoch}-{index}", **labels)
    return CreateObject(manifest=manifest, scopes=GROUP)


async def is_woken(behind: Behind) -> None:
    await until("a reconcile is triggered", lambda: behind.woken)
    behind.woken.clear()


async def test_pods_are_created_in_parallel_and_each_once(behind: Behind) -> None:
    creates = [pod(behind.owner, index) for index in range(20)]
    await behind.direct.merge(
        HETERO_INFERENCE.path(behind.owner.key.namespace, "tiny"),
        {"spec": {"replicas": 10}},  # The groups have two pods each. The budget of new pods allows 20.
    )

    async def wants_20_pods() -> bool:
        return bool((await behind.observe()).resource.spec["replicas"] == 10)

    await until("the operator knows the result", wants_20_pods)
    await behind.run(creates[0])
    slow = behind.proxy.inject(r"/pods\?", method="POST", delay_s=2.0)
    started = time.monotonic()
    await behind.run(*creates[1:])
    await behind.run(*creates[1:])
    assert slow.hits == WRITES_AT_ONCE, "no create is repeated, and the concurrency is limited"
    await until("all pods are created", lambda: _are(behind, 20), timeout_s=15)
    assert time.monotonic() - started < 19 * 2.0 / 3
    assert behind.proxy.count(r"/pods\?", "POST") == 20
    await is_woken(behind)
    assert not (await behind.observe()).never_created


async def _are(behind: Behind, count: int) -> bool:
    return len((await behind.observe()).pods) == count


async def test_the_first_pod_of_an_epoch_is_created_before_the_others(behind: Behind) -> None:
    refused = behind.proxy.inject(r"/pods\?", method="POST", status=403, message="a policy says no")
    creates = [pod(behind.owner, index) for index in range(5)]
    await behind.run(*creates)
    observation = await behind.observe()
    assert [(r.name, r.reason) for r in observation.refusals] == [("tiny-0-7-0", "ObjectRefused")]
    assert observation.never_created == {f"tiny-0-7-{index}" for index in range(1, 5)}
    assert observation.never_requested == observation.never_created
    assert refused.hits == 1


async def test_an_unanswered_create_that_failed_is_repeated_later(behind: Behind) -> None:
    behind.proxy.inject(r"/pods\?", method="POST", status=503, times=1)
    creates = [pod(behind.owner, index) for index in range(3)]
    again_s = await behind.run(*creates)
    assert again_s is not None
    assert again_s <= 1.0
    observation = await behind.observe()
    assert observation.never_created == {f"tiny-0-7-{index}" for index in range(3)}
    assert observation.never_requested == {"tiny-0-7-1", "tiny-0-7-2"}

    async def all_created() -> bool:
        await behind.run(*creates)
        return await behind.pods() == [f"tiny-0-7-{index}" for index in range(3)]

    await until("all three pods are created", all_created)
    assert not (await behind.observe()).never_created


async def test_an_unanswered_create_that_succeeded_is_recognized(behind: Behind) -> None:
    """The next attempt finds the pod, and it is the same pod."""
    create = pod(behind.owner, 0)
    behind.proxy.inject(r"/pods\?", method="POST", status=504, times=1)
    await behind.run(create)
    stored = await behind.direct.create(POD.path(behind.owner.key.namespace), create.manifest)

    async def seen() -> bool:
        await behind.run(create)
        return not (await behind.observe()).never_created

    await until("the operator knows that the pod was created", seen)
    assert [p.uid for p in (await behind.observe()).pods] == [stored["metadata"]["uid"]]


async def test_pods_wait_for_the_objects_that_they_need(behind: Behind) -> None:
    ports = [{"port": 80, "protocol": "TCP", "targetPort": 80}]
    spec = {"type": "ClusterIP", "selector": {"app": "x"}, "ports": ports}
    service = ApplyObject(manifest=child(behind.owner, "Service", "tiny-0-ranks", spec=spec), scopes=GROUP)
    slow = behind.proxy.inject(r"/services/", method="PATCH", hang=True)
    await behind.run(service, pod(behind.owner, 0))
    assert await behind.pods() == []
    observation = await behind.observe()
    assert [(r.kind, r.reason) for r in observation.refusals] == [("Service", "NotAnswered")]
    assert observation.never_requested == {"tiny-0-7-0"}
    await behind.run(service, pod(behind.owner, 0))
    assert slow.hits == 1, "it is pending"
    behind.proxy.heal()
    await is_woken(behind)
    assert not (await behind.observe()).refusals
    assert await behind.direct.get(SERVICE.path(behind.owner.key.namespace, "tiny-0-ranks"))
    await behind.run(pod(behind.owner, 0))
    assert await behind.pods() == ["tiny-0-7-0"]


async def test_no_pod_is_created_while_a_create_of_another_epoch_is_unanswered(behind: Behind) -> None:
    behind.proxy.inject(r"/pods\?", method="POST", hang=True)
    await behind.run(pod(behind.owner, 0, epoch=7))
    await behind.run(pod(behind.owner, 0, epoch=8))
    assert behind.proxy.count(r"/pods\?", "POST") == 1


async def test_a_hanging_delete_does_not_delay_other_actions(behind: Behind) -> None:
    await behind.run(pod(behind.owner, 0), pod(behind.owner, 1))
    first, second = (await behind.observe()).pods
    behind.proxy.inject(rf"/pods/{first.name}", method="DELETE", hang=True)
    deletes = [DeleteObject(kind="Pod", name=p.name, uid=p.uid, grace_s=0) for p in (first, second)]
    await behind.run(*deletes)
    await until("the other one is gone", lambda: _are(behind, 1))
    await behind.run(*deletes)
    assert behind.proxy.count(rf"/pods/{first.name}", "DELETE") == 1


async def test_a_hanging_status_write_is_retried_with_the_current_status(behind: Behind) -> None:
    behind.proxy.inject(r"/status$", method="PUT", hang=True)
    before = await behind.observe()
    version = before.resource.resource_version
    again_s = await behind.run(PatchStatus(status={"replicas": 1}, resource_version=version))
    assert again_s is not None
    assert 0 < again_s < 1
    assert behind.written == [False]

    async def tried_again() -> bool:
        await behind.run(PatchStatus(status={"replicas": 2}, resource_version=version))
        return behind.proxy.count(r"/status$", "PUT") == 2

    await until("another attempt", tried_again)
    behind.proxy.heal()
    await is_woken(behind)
    assert behind.written[-1]

    async def settled() -> bool:
        observation = await behind.observe()
        status = observation.resource.status
        if status.get("replicas") == 2:
            return True
        version = observation.resource.resource_version
        with contextlib.suppress(Exception):
            await behind.run(PatchStatus(status={"replicas": 2}, resource_version=version))
        return False

    await until("the newest status is stored", settled)


async def test_nothing_is_created_before_the_status_is_written(behind: Behind) -> None:
    behind.proxy.inject(r"/status$", method="PUT", status=503)
    version = (await behind.observe()).resource.resource_version
    status = PatchStatus(status={"replicas": 1}, resource_version=version)
    again_s = await behind.run(status, pod(behind.owner, 0))
    assert again_s is not None
    assert again_s <= 1.0
    assert await behind.pods() == []


async def test_a_pod_that_a_webhook_changes_is_refused_and_deleted(behind: Behind) -> None:
    def without_owner(body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "metadata": {**body["metadata"], "ownerReferences": []}}

    behind.proxy.inject(r"/pods\?", method="POST", change=without_owner)
    creates = [pod(behind.owner, index) for index in range(4)]
    await behind.run(*creates)
    await behind.recorder.flush(DEADLINE_S)
    (refusal,) = (await behind.observe()).refusals
    assert (refusal.kind, refusal.name, refusal.reason) == ("Pod", "tiny-0-7-0", "ChangedByOthers")
    assert refusal.blocks
    assert "a mutating webhook changed metadata.ownerReferences on creation" in refusal.message
    assert "Exempt the pods of this namespace from the webhook" in refusal.message
    assert await behind.pods() == []
    assert behind.proxy.count(r"/pods\?", "POST") == 1, "one pod reveals it; the others are not requested"
    events = (await behind.direct.get(EVENT.path(behind.owner.key.namespace)))["items"]
    ours = [event["reason"] for event in events if event["reportingController"] == names.MANAGER]
    assert ours == ["ChangedByOthers"]


async def test_hanging_events_delay_nothing_and_their_queue_is_short(behind: Behind) -> None:
    behind.proxy.inject(r"/events$", method="POST", hang=True)
    events = [
        RecordEvent(reason="GroupFailed", message=f"rank {i}") for i in range(MAX_EVENTS_PER_MINUTE + 5)
    ]
    await behind.run(*events, pod(behind.owner, 0))
    assert await behind.pods() == ["tiny-0-7-0"]
    assert len(behind.dropped) == 5
    started = time.monotonic()
    await behind.recorder.close()
    assert time.monotonic() - started < SOON_S


async def test_a_pod_that_cannot_be_read_is_unknown(behind: Behind) -> None:
    name = "tiny-0-7-0"
    await behind.run(pod(behind.owner, 0))
    await behind.write_members(name)
    fault = behind.proxy.inject(rf"/pods/{name}$", method="GET", hang=True)
    await behind.direct.delete(POD.path(behind.owner.key.namespace, name), {"gracePeriodSeconds": 0})

    async def unknown() -> bool:
        started = time.monotonic()
        pods = (await behind.observe()).pods
        assert time.monotonic() - started < SOON_S
        return [(p.name, bool(p.unknown), p.ready, p.uid) for p in pods] == [(name, True, False, "")]

    await until("it is unknown", unknown)
    delete = DeleteObject(kind="Pod", name=name, uid="", grace_s=0)
    assert await behind.run(delete) is not None, "the resource is reconciled again"
    assert fault.hits == 1
    behind.proxy.heal()
    await until("it is gone", lambda: _are(behind, 0))
    behind.proxy.inject(rf"/pods/{name}$", method="GET", status=429)
    assert not (await behind.observe()).pods, "the operator remembers that it is gone"


async def test_a_pod_that_loses_its_owner_is_recognized_by_its_uid(behind: Behind) -> None:
    name = "tiny-0-7-0"
    path = POD.path(behind.owner.key.namespace, name)
    await behind.run(pod(behind.owner, 0))
    await behind.write_members(name)
    (before,) = (await behind.observe()).pods
    await behind.direct.merge(path, {"metadata": {"ownerReferences": None}})
    await until("no watch shows it", lambda: not behind.state.pods(behind.owner.key, behind.owner.uid))
    (found,) = (await behind.observe()).pods
    assert replace(found, lost_owner=False) == before
    assert found.lost_owner
    # Without owner and label, only the pod's uid identifies it.
    await behind.direct.merge(path, {"metadata": {"labels": {names.LABEL_RESOURCE: None}}})
    (found,) = (await behind.observe()).pods
    assert found.uid == before.uid
    await behind.run(DeleteObject(kind="Pod", name=name, uid=found.uid, grace_s=0))
    await until("it is gone", lambda: _are(behind, 0))
    await behind.direct.create(POD.path(behind.owner.key.namespace), _without_owner(behind.owner, name))
    assert not (await behind.observe()).pods, "another pod of that name does not belong to the resource"


def _without_owner(owner: Owner, name: str) -> dict[str, Any]:
    manifest = bare_pod(owner, name)
    del manifest["metadata"]["ownerReferences"]
    return manifest
