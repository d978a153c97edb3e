"""Tests that kopf reports the changes that decisions read, but not the operator's own writes."""

import asyncio

from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.handlers import announce_changes
from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.stored_fields import version_number
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import create_resource, until


async def test_every_change_except_the_status_is_announced(
    control_plane: Cluster, server: ApiServer, namespace: str
) -> None:
    announced: list[int] = []

    def announce(key: ResourceKey, version: int) -> None:
        assert key == ResourceKey(namespace=namespace, name="tiny")
        announced.append(version)

    configuration = await load_configuration(str(control_plane.kubeconfig))
    task = asyncio.ensure_future(announce_changes(configuration, [namespace], announce))
    try:
        await create_resource(server, namespace)
        path = HETERO_INFERENCE.path(namespace, "tiny")
        stored = await server.get(path)
        expected = [version_number(stored["metadata"]["resourceVersion"])]
        await until("the new resource is announced", lambda: announced == expected)
        changed = {**stored, "status": {"observedGeneration": 1}}
        await server.update(HETERO_INFERENCE.path(namespace, "tiny", "status"), changed)
        await server.merge(path, {"metadata": {"annotations": {"by": "others"}, "labels": {"team": "a"}}})
        for change in ({"spec": {"suspend": True}}, {"metadata": {"finalizers": ["example.com/others"]}}):
            stored = await server.merge(path, change)
            expected.append(version_number(stored["metadata"]["resourceVersion"]))
            await until(f"{change} is announced", lambda: announced == expected)
        await server.merge(path, {"metadata": {"finalizers": None}})
        await until("the finalizer's end is announced", lambda: len(announced) == len(expected) + 1)
        await server.delete(path, {})
        await until("the deletion is announced", lambda: len(announced) == len(expected) + 2)
    finally:
        task.cancel()
        await asyncio.wait({task})
