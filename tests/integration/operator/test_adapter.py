"""Tests the operator's port to the cluster on a real API server: effect and refusal of each action."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    ConflictError,
    CreateObject,
    DeleteObject,
    PatchStatus,
    RecordEvent,
    RemoveFinalizer,
    ResourceKey,
    ResourceObservation,
)
from heteroinfer_operator.kube.kept import MAX_RESTORATIONS
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, POD, SERVICE
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.kube.unlabelled_pods import LOOK_AGAIN_S
from heteroinfer_operator.manifests.identity import Owner
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import (
    DEADLINE_S,
    Watched,
    child,
    create_resource,
    pod,
    until,
    watching,
)


async def observe(watched: Watched, owner: Owner) -> ResourceObservation:
    observation = await watched.cluster.observe(owner.key)
    assert observation is not None
    return observation


async def seen(
    watched: Watched, owner: Owner, check: Callable[[ResourceObservation], bool]
) -> ResourceObservation:
    """Waits for the first observation that shows a change by another writer."""

    async def found() -> ResourceObservation | None:
        observation = await observe(watched, owner)
        return observation if check(observation) else None

    observation: ResourceObservation = await until("another writer's change is observed", found)
    return observation


async def gone(watched: Watched, owner: Owner) -> bool:
    return await watched.cluster.observe(owner.key) is None


async def not_there(watched: Watched, owner: Owner) -> bool:
    return not (await observe(watched, owner)).pods


async def act(watched: Watched, owner: Owner, *actions: Action) -> ResourceObservation:
    await watched.cluster.run(await observe(watched, owner), actions)
    await watched.recorder.flush(DEADLINE_S)
    return await observe(watched, owner)


async def own_events(server: ApiServer, namespace: str) -> list[Any]:
    """Returns the operator's events; the API server also writes events about Services."""
    found = (await server.get(EVENT.path(namespace)))["items"]
    return [event for event in found if event["reportingController"] == names.MANAGER]


def service(owner: Owner, name: str, port: int = 80) -> dict[str, Any]:
    ports = [{"port": port, "protocol": "TCP", "targetPort": port}]
    return child(owner, "Service", name, spec={"type": "ClusterIP", "selector": {"app": "x"}, "ports": ports})


async def test_own_writes_are_observed_immediately(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    async with watching(server) as watched:
        after = await act(
            watched,
            owner,
            CreateObject(manifest=pod(owner, "tiny-0-1-0", epoch="1")),
            ApplyObject(manifest=service(owner, "tiny")),
            ApplyObject(manifest=child(owner, "ConfigMap", "tiny-plan", data={"a": "1"}, immutable=True)),
        )
        assert [(p.name, p.labels[names.LABEL_EPOCH], p.phase) for p in after.pods] == [
            ("tiny-0-1-0", "1", "Pending")
        ]
        assert sorted(o["kind"] for o in after.objects) == ["ConfigMap", "Service"]
        assert after.nodes == ()
        gone = await act(
            watched,
            owner,
            *(DeleteObject(kind="Pod", name=p.name, uid=p.uid, grace_s=0) for p in after.pods),
            *(
                DeleteObject(kind=o["kind"], name=o["metadata"]["name"], uid=o["metadata"]["uid"])
                for o in after.objects
            ),
        )
        assert gone.objects == ()
        assert all(p.ended for p in gone.pods)
        await until(
            "the pod is gone from the cache", lambda: not watched.cluster_state.pods(owner.key, owner.uid)
        )
        here = {
            key for key in watched.touched if key.namespace == namespace
        }  # other pods may still be in deletion
        assert here == {owner.key}


@pytest.mark.parametrize("label", [None, "somebody"])
async def test_a_pod_that_loses_its_label_during_a_leader_query_is_kept(
    server: ApiServer, namespace: str, label: str | None
) -> None:
    owner = await create_resource(server, namespace)
    rank = {"rank": 0, "role": "cpu", "pod": "tiny-0-1-0", "started": True, "ready": True}
    group = {"index": 0, "epoch": 1, "phase": "Ready", "members": [rank]}
    async with watching(server) as watched:
        before = await act(watched, owner, CreateObject(manifest=pod(owner, "tiny-0-1-0", epoch="1")))
        version = before.resource.resource_version
        await watched.cluster.run(before, [PatchStatus(status={"groups": [group]}, resource_version=version)])
        ask = watched.groups.observe

        async def ask_and_lose_the_label(known: Sequence[PodRecord], *, pods_unwatched: bool = False) -> Any:
            watched.groups.observe = ask  # type: ignore[method-assign]
            change = {"metadata": {"labels": {names.LABEL_RESOURCE: label}}}
            await server.merge(POD.path(namespace, "tiny-0-1-0"), change)
            await until("no watch shows it", lambda: not watched.cluster_state.pods(owner.key, owner.uid))
            return await ask(known, pods_unwatched=pods_unwatched)

        watched.groups.observe = ask_and_lose_the_label  # type: ignore[assignment, method-assign]
        observation = await observe(watched, owner)
        assert [p.name for p in observation.pods] == ["tiny-0-1-0"]
        assert await watched.cluster.run(observation, []) == LOOK_AGAIN_S


async def test_a_missing_pod_is_read_once(server: ApiServer, namespace: str) -> None:
    """Pods disappear one by one. Earlier, a missing pod was read again while another pod existed."""
    owner = await create_resource(server, namespace)
    pods = [f"tiny-0-1-{index}" for index in range(8)]
    ranks = [{"rank": rank, "role": "cpu", "pod": name} for rank, name in enumerate(pods)]
    group = {"index": 0, "epoch": 1, "phase": "Stopping", "members": ranks}
    asked: list[str] = []
    async with watching(server) as watched:
        made = [CreateObject(manifest=pod(owner, name, epoch="1")) for name in pods]
        before = await act(watched, owner, *made)
        version = before.resource.resource_version
        await watched.cluster.run(before, [PatchStatus(status={"groups": [group]}, resource_version=version)])
        ask = server.get_quickly

        async def note_and_ask(path: str) -> Any:
            asked.append(path)
            return await ask(path)

        server.get_quickly = note_and_ask  # type: ignore[method-assign]
        for count, name in enumerate(pods):
            await server.delete(POD.path(namespace, name), {"gracePeriodSeconds": 0})
            left = len(pods) - count - 1
            await seen(watched, owner, lambda now, left=left: len(now.pods) == left)  # type: ignore[misc]
            await observe(watched, owner)
        assert sorted(asked) == [POD.path(namespace, name) for name in pods]


async def test_an_unlabelled_pod_that_blocks_a_name_is_observed_next(
    server: ApiServer, namespace: str
) -> None:
    """The status does not name the pod, because the pod inspects the model or was never seen."""
    owner = await create_resource(server, namespace)
    name = "tiny-inspect-0123456789"
    async with watching(server) as watched:
        before = await act(watched, owner, CreateObject(manifest=pod(owner, name)))
        change = {"metadata": {"labels": {names.LABEL_RESOURCE: None}}}
        await server.merge(POD.path(namespace, name), change)
        await seen(watched, owner, lambda now: not now.pods)
        with pytest.raises(ConflictError, match="already exists"):
            await watched.cluster.run(before, [CreateObject(manifest=pod(owner, name))])
        for _ in range(2):
            assert [p.uid for p in (await observe(watched, owner)).pods] == [before.pods[0].uid]
        await server.delete(POD.path(namespace, name), {"gracePeriodSeconds": 0})
        await until("it is gone", lambda: not_there(watched, owner))


async def test_a_pod_name_in_use_is_a_conflict_and_its_pod_is_observed_next(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    async with watching(server) as watched:
        observation = await observe(watched, owner)
        await server.create(POD.path(namespace), pod(owner, "tiny-0-1-0"))
        with pytest.raises(ConflictError, match="already exists"):
            await watched.cluster.run(
                observation,
                [
                    CreateObject(manifest=pod(owner, "tiny-0-1-0"), scopes=frozenset({"group/0"})),
                    ApplyObject(manifest=service(owner, "later"), scopes=frozenset({"group/0"})),
                    ApplyObject(manifest=service(owner, "other"), scopes=frozenset({"group/1"})),
                ],
            )
        after = await observe(watched, owner)
        assert [p.name for p in after.pods] == ["tiny-0-1-0"]
        made = [stored["metadata"]["name"] for stored in after.objects]
        assert made == ["other"], "no object of the same group was created"


async def test_reports_a_foreign_object_of_the_same_name_and_keeps_it(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    theirs = {**service(owner, "tiny", port=5432), "metadata": {"name": "tiny", "namespace": namespace}}
    await server.create(SERVICE.path(namespace), theirs)
    async with watching(server) as watched:
        (refusal,) = (await act(watched, owner, ApplyObject(manifest=service(owner, "tiny")))).refusals
        assert (refusal.kind, refusal.name, refusal.reason) == ("Service", "tiny", "NameTaken")
        assert re.match(f"Service {namespace}/tiny exists .* Delete that object, or give", refusal.message)
        assert [event["reason"] for event in await own_events(server, namespace)] == ["NameTaken"]
    stored = await server.get(SERVICE.path(namespace, "tiny"))
    assert stored["spec"]["ports"][0]["port"] == 5432
    assert "ownerReferences" not in stored["metadata"]


async def test_waits_for_children_of_an_earlier_resource_of_the_same_name(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    earlier = Owner(key=owner.key, uid="11111111-2222-3333-4444-555555555555")
    async with watching(server) as watched:
        before = await observe(watched, owner)
        old = service(earlier, "tiny")
        old["metadata"]["finalizers"] = [
            "heteroinfer.dev/test"
        ]  # the garbage collector must not delete it before the test has read it
        await server.create(SERVICE.path(namespace), old)
        apply = ApplyObject(manifest=service(owner, "tiny"))
        (refusal,) = (await act(watched, owner, apply)).refusals
        assert refusal.reason == "NameHeld"
        # The reason depends on whether the garbage collector already knows that the owner is gone.
        assert re.search(r"belongs to an earlier HeteroInference|is being deleted", refusal.message)
        await server.delete(SERVICE.path(namespace, "tiny"), {})  # like the garbage collector

        async def tried_again(tries: int) -> str:
            (refusal,) = (await act(watched, owner, apply)).refusals
            return refusal.message if refusal.tries >= tries else ""

        message = await until("the second try", lambda: tried_again(2))
        assert "is being deleted, but finalizer heteroinfer.dev/test blocks it" in message
        assert not await own_events(server, namespace), (
            "an object that disappears by itself causes no event immediately"
        )
        await until("the fifth try", lambda: tried_again(5))
        assert [event["reason"] for event in await own_events(server, namespace)] == ["NameHeld"]
        await server.merge(SERVICE.path(namespace, "tiny"), {"metadata": {"finalizers": None}})
        await watched.cluster.run(before, [apply])
        (stored,) = (await observe(watched, owner)).objects
        assert stored["metadata"]["ownerReferences"][0]["uid"] == owner.uid


async def test_apply_repairs_drift_and_removes_obsolete_fields(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    async with watching(server) as watched:
        wanted = service(owner, "tiny")
        wanted["metadata"]["labels"]["once"] = "yes"
        await act(watched, owner, ApplyObject(manifest=wanted))
        await server.merge(SERVICE.path(namespace, "tiny"), {"spec": {"selector": {"app": "hijacked"}}})
        del wanted["metadata"]["labels"]["once"]
        after = await act(watched, owner, ApplyObject(manifest=wanted))
        (stored,) = after.objects
        assert stored["spec"]["selector"] == {"app": "x"}
        assert "once" not in stored["metadata"]["labels"]
        assert "managedFields" not in stored["metadata"]


async def test_a_delete_keeps_an_object_with_another_uid(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    async with watching(server) as watched:
        await act(
            watched,
            owner,
            CreateObject(manifest=pod(owner, "tiny-0-1-0")),
            DeleteObject(kind="Pod", name="tiny-0-1-0", uid="not-this-one"),
            DeleteObject(kind="Pod", name="never-was", uid="x"),
        )
        after = await observe(watched, owner)
        assert [(p.name, p.ended) for p in after.pods] == [("tiny-0-1-0", False)]
    assert "deletionTimestamp" not in (await server.get(POD.path(namespace, "tiny-0-1-0")))["metadata"]


async def test_a_status_based_on_an_old_state_is_a_conflict(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    path = HETERO_INFERENCE.path(namespace, "tiny")
    defaults = {"observedGeneration": -1, "readyReplicas": 0, "updatedReplicas": 0}
    async with watching(server) as watched:
        old = await observe(watched, owner)
        version = old.resource.resource_version
        await watched.cluster.run(
            old, [PatchStatus(status={"replicas": 1, "selector": "a=b"}, resource_version=version)]
        )
        with pytest.raises(ConflictError, match="modified"):
            await watched.cluster.run(old, [PatchStatus(status={"replicas": 7}, resource_version=version)])
        assert (await server.get(path))["status"] == {**defaults, "replicas": 1, "selector": "a=b"}

        # The write replaces the whole status: omitted fields disappear; the spec stays.
        async def replaced() -> bool:
            """Repeats the write until the budget of two status writes a second allows it."""
            now = await observe(watched, owner)
            version = now.resource.resource_version
            await watched.cluster.run(now, [PatchStatus(status={"replicas": 2}, resource_version=version)])
            return bool((await server.get(path))["status"] == {**defaults, "replicas": 2})

        await until("the status is replaced", replaced)
        stored = await server.get(path)
        assert stored["spec"]["roles"][0]["name"] == "front"


async def test_finalizer_and_status_of_one_reconcile_do_not_conflict(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    path = HETERO_INFERENCE.path(namespace, "tiny")
    await server.merge(path, {"metadata": {"finalizers": ["example.com/theirs", names.FINALIZER]}})
    async with watching(server) as watched:
        first = await observe(watched, owner)
        await server.delete(path, {})
        deleting = await seen(watched, owner, lambda now: now.resource.deleting)
        with pytest.raises(ConflictError):
            await watched.cluster.run(first, [RemoveFinalizer()])
        after = await act(
            watched,
            owner,
            RemoveFinalizer(),
            PatchStatus(status={"replicas": 1}, resource_version=deleting.resource.resource_version),
        )
        assert after.resource.finalizers == ("example.com/theirs",)
        assert after.resource.status["replicas"] == 1
        await server.merge(path, {"metadata": {"finalizers": []}})
        await until("it is gone", lambda: gone(watched, owner))


async def test_a_finalizer_that_another_controller_restores_each_time_is_removed_rarely(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    path = HETERO_INFERENCE.path(namespace, "tiny")
    async with watching(server) as watched:
        for _ in range(MAX_RESTORATIONS):
            await server.merge(path, {"metadata": {"finalizers": [names.FINALIZER]}})
            await seen(watched, owner, lambda now: bool(now.resource.finalizers))
            assert not (await observe(watched, owner)).refusals
            after = await act(watched, owner, RemoveFinalizer())
            assert after.resource.finalizers == ()
        (refusal,) = (await observe(watched, owner)).refusals
        assert (refusal.kind, refusal.reason) == (names.KIND, "MadeByOthers")
        assert ": field manager " in refusal.message
        assert "an unknown client" not in refusal.message


async def test_a_repeated_event_is_one_event(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    async with watching(server) as watched:
        for _ in range(20):
            await act(watched, owner, RecordEvent(reason="GroupFailed", message="rank 1", warning=True))
        await act(watched, owner, RecordEvent(reason="GroupFailed", message="rank 2", warning=True))
    events = await own_events(server, namespace)
    assert sorted((e["reason"], e["note"], e["type"]) for e in events) == [
        ("GroupFailed", "rank 1", "Warning"),
        ("GroupFailed", "rank 2", "Warning"),
    ]
    assert {e["regarding"]["uid"] for e in events} == {owner.uid}


async def test_no_events_are_written_to_a_terminating_namespace(
    control_plane: Cluster, server: ApiServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier, the API server refused each event, and the operator logged a warning."""
    owner = await create_resource(server, namespace)
    path = HETERO_INFERENCE.path(namespace, "tiny")
    await server.merge(path, {"metadata": {"finalizers": ["example.com/theirs"]}})
    async with watching(server) as watched:
        control_plane.kubectl("delete", "namespace", namespace, "--wait=false")
        await seen(watched, owner, lambda observation: observation.resource.deleting)
        for rank in range(3):
            await act(watched, owner, RecordEvent(reason="GroupFailed", message=f"rank {rank}", warning=True))
        await server.merge(path, {"metadata": {"finalizers": []}})
    assert "not recorded" not in caplog.text


async def test_pods_of_other_resources_and_uids_are_not_observed(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    other = await create_resource(server, namespace, "other")
    async with watching(server, namespace) as watched:
        await act(watched, other, CreateObject(manifest=pod(other, "other-0-1-0")))
        stranger = Owner(key=owner.key, uid=other.uid)
        await server.create(POD.path(namespace), pod(stranger, "impostor"))
        await until("the foreign object is changed", lambda: owner.key in watched.touched)
        observation = await observe(watched, owner)
        assert observation.pods == ()
        assert observation.nodes is None, "the operator may not read nodes in namespaced mode"
        assert await watched.cluster.observe(ResourceKey(namespace=namespace, name="no-such")) is None
