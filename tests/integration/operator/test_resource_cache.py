"""Tests that a reconcile decides on a cached copy of its resource, and never on old data for long."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from heteroinfer_operator.cluster import ConflictError, PatchStatus, ResourceObservation
from heteroinfer_operator.kube.installation import list_resources
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.manifests.identity import Owner
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import (
    DEADLINE_S,
    Watched,
    create_resource,
    pod,
    until,
    watching,
)


@contextlib.asynccontextmanager
async def counting(
    control_plane: Cluster, answered: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[ApiServer, list[str]]]:
    """Counts the requests to the API server from now on. Awaits `answered` after each request."""
    sent: list[str] = []

    async def note(_session: object, _context: object, started: aiohttp.TraceRequestStartParams) -> None:
        sent.append(f"{started.method} {started.url.path}")

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(note)

    async def hold(*_: object) -> None:
        if answered is not None:
            await answered()

    trace.on_request_end.append(hold)
    configuration = await load_configuration(str(control_plane.kubeconfig))
    configuration.trace_configs = [trace]
    server = ApiServer(configuration)
    try:
        yield server, sent
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def frozen(server: ApiServer, namespace: str) -> AsyncIterator[Watched]:
    """Returns caches that were synced and then see no changes, like the slowest possible watch."""
    watched = Watched(server, [namespace])
    running = asyncio.ensure_future(watched.cluster_state.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await watched.cluster_state.wait_synced()
    finally:
        running.cancel()
        await asyncio.wait({running})
    yield watched
    await watched.groups.close()


async def observe(watched: Watched, owner: Owner) -> ResourceObservation:
    observation = await watched.cluster.observe(owner.key)
    assert observation is not None
    return observation


async def scale(server: ApiServer, owner: Owner, replicas: int) -> int:
    """Changes the number of replicas as another user, and returns the resourceVersion."""
    path = HETERO_INFERENCE.path(owner.key.namespace, owner.key.name)
    stored = await server.merge(path, {"spec": {"replicas": replicas}})
    return int(stored["metadata"]["resourceVersion"])


async def test_a_reconcile_reads_only_from_caches(
    control_plane: Cluster, server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    async with counting(control_plane) as (counted, sent), watching(counted, namespace) as watched:
        await asyncio.sleep(0)
        before = len(sent)
        for _ in range(5):
            observation = await observe(watched, owner)
            await watched.cluster.run(observation, [])
        assert sent[before:] == [], "all watches existed before"
        version = observation.resource.resource_version
        await watched.cluster.run(
            observation, [PatchStatus(status={"replicas": 3}, resource_version=version)]
        )
        after = await observe(watched, owner)
        assert after.resource.status["replicas"] == 3, "the written object is read"
        assert after.resource.resource_version != version
        assert [line.partition(" ")[0] for line in sent[before:]] == ["PUT"]
        await scale(server, owner, 2)

        async def seen() -> bool:
            return bool((await observe(watched, owner)).resource.spec["replicas"] == 2)

        await until("another writer's change is observed", seen)
        assert [line.partition(" ")[0] for line in sent[before:]] == ["PUT"]


async def test_a_conflicting_object_is_read_before_the_next_decision(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    async with frozen(server, namespace) as watched:
        old = await observe(watched, owner)
        await scale(server, owner, 2)
        assert (await observe(watched, owner)).resource.spec["replicas"] == 1, "no event has reported it yet"
        write = PatchStatus(status={"replicas": 7}, resource_version=old.resource.resource_version)
        with pytest.raises(ConflictError, match="modified"):
            await watched.cluster.run(old, [write])
        now = await observe(watched, owner)
        assert (now.resource.spec["replicas"], now.resource.status.get("replicas", 0)) == (2, 0)

        # The operator's own writes are visible without a watch. The second write depends on the first.
        async def written(replicas: int) -> bool:
            """Repeats the write until the budget of two status writes a second allows it."""
            seen = await observe(watched, owner)
            write = PatchStatus(
                status={"replicas": replicas}, resource_version=seen.resource.resource_version
            )
            await watched.cluster.run(seen, [write])
            return bool((await observe(watched, owner)).resource.status.get("replicas") == replicas)

        for replicas in (4, 5):
            await until("it is written", functools.partial(written, replicas))


async def test_an_announced_resource_is_read_if_the_watch_is_behind(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    async with frozen(server, namespace) as watched:
        resources = watched.cluster_state.resources
        version = int((await observe(watched, owner)).resource.resource_version)
        assert not resources.record_if_missing(owner.key, version), "it is here already"
        version = await scale(server, owner, 2)
        assert (await list_resources(server, [namespace])).resources == {owner.key: version}
        assert resources.record_if_missing(owner.key, version)
        assert (await observe(watched, owner)).resource.spec["replicas"] == 2
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        assert resources.record_if_missing(owner.key, version + 1)
        assert await watched.cluster.observe(owner.key) is None
        assert await watched.cluster.observe(owner.key) is None
        assert resources.keys() == set()


async def test_a_resource_announced_during_its_read_is_read_again(
    control_plane: Cluster, server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    answered, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        answered.set()
        await go_on.wait()

    async with frozen(server, namespace) as watched, counting(control_plane, hold) as (held, _):
        resources = watched.cluster_state.resources
        resources.record_if_missing(owner.key, await scale(server, owner, 2))
        resources._server = held
        reading = asyncio.ensure_future(observe(watched, owner))
        await answered.wait()
        assert resources.record_if_missing(owner.key, await scale(server, owner, 3))
        go_on.set()
        assert (await reading).resource.spec["replicas"] == 2
        assert (await observe(watched, owner)).resource.spec["replicas"] == 3


async def test_a_recreated_resource_is_a_different_resource(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    async with frozen(server, namespace) as watched:
        old = await observe(watched, owner)
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        again = await create_resource(server, namespace)
        await server.create(POD.path(namespace), pod(owner, "tiny-0-1-0"))
        status = PatchStatus(status={"replicas": 2}, resource_version=old.resource.resource_version)
        with pytest.raises(ConflictError):
            await watched.cluster.run(old, [status])
        now = await observe(watched, owner)
        assert now.resource.uid == again.uid != owner.uid
        assert now.pods == (), "a pod of the deleted resource"
        stored = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        assert stored["status"].get("replicas") != 2
        watched.cluster_state.resources.mark_outdated(owner.key)
        assert (await observe(watched, owner)).resource.uid == again.uid
