"""The tests' proxy changes requests only as the test requests."""

import asyncio
from pathlib import Path

import pytest

from heteroinfer_operator.kube.paths import CONFIG_MAP
from heteroinfer_operator.kube.server import ApiError, ApiServer, load_configuration
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.api_proxy import api_proxy
from tests.integration.operator.running_operator import until


async def test_the_proxy_refuses_delays_holds_and_changes_requests(
    control_plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    path = CONFIG_MAP.path(namespace)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "x"}}
    async with api_proxy(control_plane.kubeconfig, tmp_path / "through") as proxy:
        through = ApiServer(await load_configuration(str(proxy.kubeconfig)))
        try:
            proxy.inject(f"{path}$", method="POST", status=503, times=1)
            with pytest.raises(ApiError, match="503 injected by the test"):
                await through.create(path, body)
            await through.create(path, body)
            changed = proxy.inject(
                "configmaps", method="POST", change=lambda sent: {**sent, "data": {"a": "b"}}
            )
            assert (await through.create(path, body))["data"] == {"a": "b"}
            proxy.heal(changed)
            assert "data" not in await through.create(path, body)
            assert proxy.count(f"{path}$", "POST") == 4

            held = proxy.inject("configmaps", method="GET", hang=True)
            answer = asyncio.ensure_future(through.get(path))
            await until("the request hangs", lambda: held.hits == 1)
            assert not answer.done()
            proxy.heal()
            assert (await answer)["kind"] == "ConfigMapList"
        finally:
            await through.close()


async def test_the_proxy_holds_and_breaks_watches(
    control_plane: Cluster, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    path = CONFIG_MAP.path(namespace)
    seen: list[str] = []
    async with api_proxy(control_plane.kubeconfig, tmp_path / "through") as proxy:
        through = ApiServer(await load_configuration(str(proxy.kubeconfig)))

        async def watch() -> None:
            async for event in through.watch(path, {}):
                name = event["object"]["metadata"]["name"]
                seen.append(name)

        watching = asyncio.ensure_future(watch())
        try:
            await until("an event", lambda: seen)
            proxy.inject("configmaps.*watch=true", hang=True)
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}}
            await server.create(path, body)
            await asyncio.sleep(0)
            assert "late" not in seen
            proxy.heal()
            await until("the delayed event", lambda: "late" in seen)
            proxy.cut_watches(namespace)
            with pytest.raises(ApiError, match="the connection broke"):
                await asyncio.wait_for(watching, 10)
        finally:
            watching.cancel()
            await through.close()
