"""Tests two operators in one cluster: each handles only the resources of its class."""

import functools
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.integration.operator.life import Install, stored
from tests.integration.operator.running_operator import create_resource, operator, until


async def resource(server: ApiServer, namespace: str, name: str) -> dict[str, Any]:
    return await server.get(HETERO_INFERENCE.path(namespace, name))


async def generation_seen(server: ApiServer, namespace: str, name: str) -> bool:
    found = await resource(server, namespace, name)
    return bool(found["status"].get("observedGeneration") == found["metadata"]["generation"])


async def scale(server: ApiServer, namespace: str, name: str, replicas: int) -> None:
    await server.merge(HETERO_INFERENCE.path(namespace, name), {"spec": {"replicas": replicas}})


async def test_each_operator_handles_only_its_class(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    first, second = install(), install("operatorClass=beta")
    await create_resource(server, namespace, "plain", replicas=0)
    await create_resource(server, namespace, "classed", replicas=0, operatorClass="beta")
    await create_resource(server, namespace, "nobodys", replicas=0, operatorClass="gamma")
    logs = tmp_path / "default", tmp_path / "beta"
    settings = {"resync_seconds": "1", "log_level": "DEBUG"}
    async with operator(second.kubeconfig, logs[1], operator_class="beta", **settings) as beta:
        await beta.working()
        await until("beta serves its own", lambda: generation_seen(server, namespace, "classed"))
        plain = await resource(server, namespace, "plain")
        assert plain.get("status", {}).get("observedGeneration", -1) == -1, "no operator handles it yet"
        async with operator(first.kubeconfig, logs[0], **settings) as default:
            await default.working()
            await until(
                "the other operator serves resources without a class",
                lambda: generation_seen(server, namespace, "plain"),
            )
            for name in ("plain", "classed"):
                await scale(server, namespace, name, 1)
                await until(f"{name} is seen", functools.partial(generation_seen, server, namespace, name))
            pods = {pod["metadata"]["name"].split("-")[0] for pod in await stored(server, POD, namespace)}
            assert pods == {"plain", "classed"}
            for process, others in ((default, "classed"), (beta, "plain")):
                assert f"{namespace}/{others}" not in process.output
                assert "Traceback" not in process.output
            assert await default.stop() == 0
        # The default operator has ended. Its resource is still deleted without it.
        before = (await resource(server, namespace, "plain"))["metadata"]["resourceVersion"]
        await scale(server, namespace, "classed", 0)
        await until("beta keeps working", lambda: generation_seen(server, namespace, "classed"))
        assert (await resource(server, namespace, "plain"))["metadata"]["resourceVersion"] == before
        await server.delete(HETERO_INFERENCE.path(namespace, "plain"), {})
        assert await beta.stop() == 0
    await server.delete(HETERO_INFERENCE.path(namespace, "classed"), {})
    nobodys = await resource(server, namespace, "nobodys")
    assert [item["metadata"]["name"] for item in await resources(server, namespace)] == ["nobodys"]
    assert nobodys.get("status", {}).get("observedGeneration", -1) == -1


async def resources(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    return list((await server.get(HETERO_INFERENCE.path(namespace)))["items"])


@pytest.mark.parametrize(("before", "after"), [(None, "beta"), ("beta", None), ("beta", "gamma")])
async def test_a_resource_stays_with_its_operator(
    server: ApiServer, namespace: str, before: str | None, after: str | None
) -> None:
    await create_resource(server, namespace, **({"operatorClass": before} if before else {}))
    path = HETERO_INFERENCE.path(namespace, "tiny")
    await server.merge(path, {"spec": {"replicas": 2}})
    with pytest.raises(ApiError, match=r"operatorClass.*must not change, because two operators"):
        await server.merge(path, {"spec": {"operatorClass": after}})
