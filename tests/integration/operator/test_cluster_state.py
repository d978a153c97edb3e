"""Tests watch caches on a real API server that is disconnected, restarted and restored."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.cluster import CreateObject, ResourceKey
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.paths import CONFIG_MAP, NODE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer, load_configuration
from tests.cluster import processes
from tests.cluster.control_plane import api_status, site_of
from tests.cluster.crds import apply_crds
from tests.cluster.programs import Program
from tests.cluster.running_cluster import Cluster, start_control_plane_only
from tests.integration.operator.own_servers import stream_server
from tests.integration.operator.running_operator import (
    DEADLINE_S,
    child,
    create_resource,
    pod,
    until,
    watching,
)


class Wire:
    """A TCP relay to the API server that can be cut and reconnected."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        self._open = False
        for writer in self._writers:
            writer.transport.abort()

    def join(self) -> None:
        self._open = True

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays one connection until either end closes it."""
        if not self._open:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):  # the API server may be down
            back_reader, back_writer = await asyncio.open_connection(*self._target)
            ends = {writer, back_writer}
            self._writers |= ends
            try:
                if self._open:  # the wire may have been cut meanwhile
                    await asyncio.gather(self._pump(reader, back_writer), self._pump(back_reader, writer))
            finally:
                self._writers -= ends
                for end in ends:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        writer.transport.abort()


@pytest.fixture(scope="module")
def own_plane() -> Iterator[Cluster]:
    """A control plane whose API server this module may kill."""
    with start_control_plane_only() as cluster:
        apply_crds(cluster, build_crd())
        yield cluster


@pytest_asyncio.fixture
async def wired(own_plane: Cluster) -> AsyncIterator[tuple[ApiServer, Wire]]:
    """The API server behind a relay that can be cut."""
    configuration = await load_configuration(str(own_plane.kubeconfig))
    target = urlsplit(configuration.host)
    wire = Wire(str(target.hostname), int(target.port or 0))
    async with stream_server(wire.relay) as relays:
        configuration.host = f"https://127.0.0.1:{relays.sockets[0].getsockname()[1]}"
        server = ApiServer(configuration)
        yield server, wire
        await server.close()
        wire.cut()


@pytest_asyncio.fixture
async def direct(own_plane: Cluster) -> AsyncIterator[ApiServer]:
    server = ApiServer(await load_configuration(str(own_plane.kubeconfig)))
    await until("the resource is served", lambda: served(server))
    yield server
    await server.close()


async def served(server: ApiServer) -> bool:
    with contextlib.suppress(ApiError):
        return bool(await server.get("/apis/heteroinfer.dev/v1alpha1/heteroinferences"))
    return False


def restart_api_server(cluster: Cluster) -> None:
    """Kills the API server of this cluster and starts it with the same command line."""
    folder = cluster.state.folder
    (old,) = [pid for pid in processes.marked_pids(folder) if program(pid) == "kube-apiserver"]
    command = Path(f"/proc/{old}/cmdline").read_text().rstrip("\0").split("\0")
    identity = processes.ProcessIdentity.of(old)
    assert identity is not None
    os.kill(old, signal.SIGKILL)
    processes.wait_until("the API server's end", lambda: not identity.alive(), timeout_s=DEADLINE_S)
    processes.spawn(command, mark=folder, log=cluster.state.log("kube-apiserver"))
    processes.wait_until("the API server's return", lambda: answers(cluster), timeout_s=60)


def program(pid: int) -> str:
    return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]).name


def answers(cluster: Cluster) -> bool:
    with contextlib.suppress(Exception):
        return "ok" in cluster.kubectl("get", "--raw", "/readyz", timeout_s=5)
    return False


def names_of(cluster_state: ClusterState, key: ResourceKey, uid: str) -> list[str]:
    return [record.view.name for record in cluster_state.pods(key, uid)]


async def test_after_an_outage_with_410_the_list_replaces_the_cache(
    own_plane: Cluster, wired: tuple[ApiServer, Wire], direct: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    server, wire = wired
    caplog.set_level(logging.INFO)
    owner = await create_resource(direct, "default", "ghosts")
    for name in ("ghosts-a", "ghosts-b"):
        await direct.create(POD.path("default"), pod(owner, name))
    async with watching(server) as watched:
        assert names_of(watched.cluster_state, owner.key, owner.uid) == ["ghosts-a", "ghosts-b"]
        wire.cut()
        await direct.delete(POD.path("default", "ghosts-a"), {"gracePeriodSeconds": 0})
        await direct.create(POD.path("default"), pod(owner, "ghosts-c"))
        watched.cluster_state.resources.mark_outdated(owner.key)
        with pytest.raises(ApiError, match="no answer"):
            await watched.cluster.observe(owner.key)
        # A new API server has no old events, so a watch from the old version fails with 410 Gone.
        await asyncio.to_thread(restart_api_server, own_plane)
        watched.touched.clear()
        wire.join()
        await until(
            "the cache matches the stored objects",
            lambda: names_of(watched.cluster_state, owner.key, owner.uid) == ["ghosts-b", "ghosts-c"],
        )
        assert owner.key in watched.touched
        assert (
            "the API server no longer has the changes since the cached version. Listing again" in caplog.text
        )
        # The cache watches again.
        await direct.create(POD.path("default"), pod(owner, "ghosts-d"))
        await until(
            "the new pod", lambda: "ghosts-d" in names_of(watched.cluster_state, owner.key, owner.uid)
        )


def restore_etcd(cluster: Cluster, copy: Path) -> None:
    """Restores an older copy of etcd's data, and restarts the processes that read it."""
    site, pki = site_of(cluster.state)
    controllers, api_server, etcd = (
        Program.of(cluster.state, name) for name in ("kube-controller-manager", "kube-apiserver", "etcd")
    )
    for program in (controllers, api_server, etcd):
        program.kill()
    shutil.rmtree(cluster.state.folder / "etcd")
    shutil.copytree(copy, cluster.state.folder / "etcd")
    etcd.start_again()
    api_server.start_again()
    processes.wait_until(
        "the API server's return", lambda: api_status(site, pki, "/readyz") == 200, timeout_s=60
    )
    controllers.start_again()


async def test_a_restored_older_store_is_listed_again_immediately(tmp_path: Path) -> None:
    with start_control_plane_only() as plane:
        apply_crds(plane, build_crd())
        server = ApiServer(await load_configuration(str(plane.kubeconfig)))
        try:
            await until("the resource is served", lambda: served(server), timeout_s=60)
            owner = await create_resource(server, "default", "old")
            async with watching(server, "default") as watched:
                etcd = Program.of(plane.state, "etcd")
                await asyncio.to_thread(etcd.kill)
                shutil.copytree(plane.state.folder / "etcd", tmp_path / "copy")
                await asyncio.to_thread(etcd.start_again)
                await until("etcd answers", lambda: served(server), timeout_s=60)
                await server.create(POD.path("default"), pod(owner, "newer"))
                for number in range(50):
                    await server.create(CONFIG_MAP.path("default"), child(owner, "ConfigMap", f"c{number}"))
                pods = watched.cluster_state.pods
                await until("the pod is seen", lambda: pods(owner.key, owner.uid))
                await asyncio.to_thread(restore_etcd, plane, tmp_path / "copy")
                # Without the list, only 100 s of silence would reveal it.
                await until("the pod is gone", lambda: not pods(owner.key, owner.uid), timeout_s=40)
                await server.create(POD.path("default"), pod(owner, "after"))
                await until("a new pod is seen", lambda: pods(owner.key, owner.uid), timeout_s=40)
        finally:
            await server.close()


async def test_own_writes_during_a_watch_outage_stay_in_the_cache(
    wired: tuple[ApiServer, Wire], direct: ApiServer
) -> None:
    server, wire = wired
    owner = await create_resource(direct, "default", "written")
    async with watching(server) as watched:
        observation = await watched.cluster.observe(owner.key)
        assert observation is not None
        await watched.cluster.run(observation, [CreateObject(manifest=pod(owner, "written-0"))])
        assert names_of(watched.cluster_state, owner.key, owner.uid) == ["written-0"]
        wire.cut()
        await direct.delete(POD.path("default", "written-0"), {"gracePeriodSeconds": 0})
        wire.join()
        await until("the deletion is seen", lambda: not watched.cluster_state.pods(owner.key, owner.uid))


async def test_nodes_count_other_pods_requests_and_only_readiness_changes_are_reported(
    direct: ApiServer,
) -> None:
    owner = await create_resource(direct, "default", "capacity")
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "big"}}
    await direct.create(NODE.path(), node)
    status: dict[str, Any] = {
        "allocatable": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "2", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Up", "message": ""}],
    }
    await patch_node(direct, status)
    requests = {"resources": {"requests": {"cpu": "1500m", "memory": "4Gi"}}}
    for name, holder in (("mine", owner), ("theirs", None)):
        manifest = pod(owner, name)
        manifest["spec"]["nodeName"] = "big"
        manifest["spec"]["containers"][0] |= requests
        if holder is None:
            del manifest["metadata"]["labels"], manifest["metadata"]["ownerReferences"]
        await direct.create(POD.path("default"), manifest)
    async with watching(direct) as watched:
        (view,) = watched.cluster_state.nodes() or ()
        assert view.schedulable
        assert view.allocatable == {"cpu": 8, "memory": 32 * 2**30, "nvidia.com/gpu": 2, "pods": 110}
        # Pods of other tests may run there too, but they request nothing.
        assert {**view.requested, "pods": 2} == {"cpu": 3, "memory": 8 * 2**30, "pods": 2}
        before = watched.node_changes
        status["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:00:00Z"
        await patch_node(direct, status)  # a heartbeat, which plans do not read
        status["conditions"][0] |= {"status": "False"}
        await patch_node(direct, status)
        await until("the node is not ready", lambda: not (watched.cluster_state.nodes() or ())[0].schedulable)
        assert watched.node_changes == before + 1


async def patch_node(server: ApiServer, status: dict[str, Any]) -> None:
    await server.merge(NODE.path(None, "big", "status"), {"status": status})


async def test_an_object_without_its_label_is_not_a_child(direct: ApiServer) -> None:
    owner = await create_resource(direct, "default", "label")
    await direct.create("/api/v1/namespaces/default/configmaps", child(owner, "ConfigMap", "label-plan"))
    async with watching(direct, "default") as watched:
        assert len(watched.cluster_state.children(owner.key, owner.uid)) == 1
        assert watched.cluster_state.nodes() is None
        await direct.merge(
            "/api/v1/namespaces/default/configmaps/label-plan",
            {"metadata": {"labels": {"heteroinfer.dev/resource": None}}},
        )
        await until("it is gone", lambda: not watched.cluster_state.children(owner.key, owner.uid))


async def test_users_of_a_claim_are_known_unless_another_operator_may_use_it(
    server: ApiServer, namespace: str
) -> None:
    owner = await create_resource(server, namespace)
    await create_resource(server, namespace, "other", model={"uri": "pvc://shared/small"})
    async with watching(server, namespace) as watched:
        found = watched.cluster_state.other_cache_users(owner.key, "shared")
        assert found is not None
        assert [each.resource.key.name for each in found] == ["other"]
        await create_resource(server, namespace, "foreign", operatorClass="beta")
        await until(
            "the other operator's",
            lambda: watched.cluster_state.other_cache_users(owner.key, "shared") is None,
        )
