"""Tests `scope: Namespaced` with more namespaces than a client has connections.

Each namespace needs its own watches.
"""

import json
from pathlib import Path

import pytest

from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.life import Install, stored
from tests.integration.operator.running_operator import create_resource, operator, until

MAX_RSS_BYTES = 300e6
"""The limit for a thousand resources with cluster scope."""


def make_namespaces(cluster: Cluster, prefix: str, count: int) -> list[str]:
    """Creates namespaces that stay, because a deletion costs the control plane more time than this test."""
    namespaces = [f"{prefix}-{number:03d}" for number in range(count)]
    manifests = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in namespaces]
    cluster.kubectl("create", "-f", "-", stdin="\n---\n".join(map(json.dumps, manifests)))
    return namespaces


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def connections(pid: int) -> int:
    """Returns the sockets of a process."""
    return sum(str(link.readlink()).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())


async def both_have_pods(server: ApiServer, namespaces: list[str]) -> bool:
    return all([await stored(server, POD, name) for name in (namespaces[0], namespaces[-1])])


async def both_are_gone(server: ApiServer, namespaces: list[str]) -> bool:
    paths = [HETERO_INFERENCE.path(name) for name in (namespaces[0], namespaces[-1])]
    return not any([(await server.get(path))["items"] for path in paths])


@pytest.mark.parametrize("count", [17, pytest.param(200, marks=pytest.mark.many_namespaces)])
async def test_all_namespaces_are_served(
    control_plane: Cluster, server: ApiServer, install: Install, tmp_path: Path, count: int
) -> None:
    namespaces = make_namespaces(control_plane, f"team{count}", count)
    installed = install("scope=Namespaced", f"watchNamespaces={{{','.join(namespaces)}}}")
    served = {"watch_namespaces": ",".join(namespaces)}
    async with operator(installed.kubeconfig, tmp_path / "log", **served) as process:
        await process.working()
        # In the first namespace, and in the last one, which waited longest for a connection.
        for namespace in (namespaces[0], namespaces[-1]):
            await create_resource(server, namespace)
        await until(
            "a pod in each", lambda: both_have_pods(server, namespaces), details=lambda: process.output
        )
        sockets, most_resident = connections(process.process.pid), resident_bytes(process.process.pid)
        print(f"{count} namespaces: {sockets} sockets, {most_resident / 1e6:.0f} MB")
        assert sockets > 6 * count, "one watch for each of six kinds"
        assert most_resident < MAX_RSS_BYTES
        # otherwise the operators of other tests would serve these resources
        for namespace in (namespaces[0], namespaces[-1]):
            await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until(
            "they are gone", lambda: both_are_gone(server, namespaces), details=lambda: process.output
        )
        assert " 403 " not in process.output
        assert await process.stop() == 0
