"""User commands on a real API server, with resources that no operator has handled."""

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from aiohttp import web

from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.command_line import heteroinfer, reported
from tests.integration.operator.running_operator import create_resource, pod


async def test_top_shows_resources_without_an_operator(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    await create_resource(server, namespace)
    shown = reported(control_plane.kubeconfig, "top", "-n", namespace, "--once")
    assert shown == (
        f"{namespace}/tiny: no operator has acted on this resource yet. Run `heteroinfer check`\n"
    )


async def test_a_selector_and_a_context_choose_resources(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    await create_resource(server, namespace, "one")
    await create_resource(server, namespace, "two")
    await server.merge(HETERO_INFERENCE.path(namespace, "two"), {"metadata": {"labels": {"team": "search"}}})
    options = ("-n", namespace, "-l", "team=search", "-o", "yaml")
    (context,) = (each["name"] for each in yaml.safe_load(control_plane.kubeconfig.read_text())["contexts"])
    shown = yaml.safe_load(reported(control_plane.kubeconfig, "top", *options, "--context", context))
    assert [each["name"] for each in shown["resources"]] == ["two"]
    code, _, errors = heteroinfer(control_plane.kubeconfig, "top", "-l", "not a selector!")
    assert code == 1
    assert "unable to parse requirement" in errors


async def spec_of(server: ApiServer, namespace: str, name: str) -> dict[str, Any]:
    return dict((await server.get(HETERO_INFERENCE.path(namespace, name)))["spec"])


async def test_suspend_and_resume_change_one_field(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    await create_resource(server, namespace, replicas=2)
    config = control_plane.kubeconfig
    before = await spec_of(server, namespace, "tiny")
    options = ("tiny", "-n", namespace)
    assert reported(config, "resume", *options) == "heteroinference/tiny was not suspended\n"
    assert reported(config, "suspend", *options) == "heteroinference/tiny suspended\n"
    assert await spec_of(server, namespace, "tiny") == {**before, "suspend": True}
    assert reported(config, "suspend", *options) == "heteroinference/tiny was suspended already\n"
    assert reported(config, "restart", *options) == (
        "heteroinference/tiny restart requested (suspended: takes effect when you resume the resource)\n"
    )
    assert reported(config, "resume", *options) == "heteroinference/tiny resumed\n"
    spec = await spec_of(server, namespace, "tiny")
    restarted = datetime.fromisoformat(spec.pop("restartedAt"))
    assert abs(datetime.now(UTC) - restarted) < timedelta(minutes=2)
    assert spec == {**before, "suspend": False}
    stored = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
    managers = {each["manager"] for each in stored["metadata"]["managedFields"]}
    assert "heteroinfer-cli" in managers


async def test_a_command_accepts_several_names_and_a_selector(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    config = control_plane.kubeconfig
    for name in ("one", "two", "three"):
        await create_resource(server, namespace, name)
        await server.merge(
            HETERO_INFERENCE.path(namespace, name), {"metadata": {"labels": {"own": str(name == "one")}}}
        )
    code, out, errors = heteroinfer(config, "restart", "one", "four", "-n", namespace)
    assert (code, out) == (1, "")
    assert "no HeteroInference four" in errors
    assert "restartedAt" not in await spec_of(server, namespace, "one"), "a misspelt name changes nothing"
    assert reported(config, "restart", "one", "two", "-n", namespace).splitlines() == [
        "heteroinference/one restart requested",
        "heteroinference/two restart requested",
    ]
    assert "restartedAt" not in await spec_of(server, namespace, "three")
    shown = reported(config, "suspend", "-l", "own=False", "-n", namespace).splitlines()
    assert sorted(shown) == ["heteroinference/three suspended", "heteroinference/two suspended"]
    code, _, errors = heteroinfer(config, "suspend", "-n", namespace)
    assert (code, errors) == (
        1,
        "error: the command needs either NAMEs of resources or -l LABELS. Give one of the two\n",
    )
    code, _, errors = heteroinfer(config, "suspend", "-n", namespace, "-l", "own=nobody")
    problem = f"namespace {namespace}: no HeteroInference has the labels own=nobody"
    assert (code, errors) == (1, f"error: {problem}. Correct -l, or name another namespace with -n\n")


async def test_status_reports_that_no_operator_has_acted_yet(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    await create_resource(server, namespace)
    config = control_plane.kubeconfig
    shown = reported(config, "status", "tiny", "-n", namespace)
    assert shown.startswith(f"HeteroInference {namespace}/tiny\n")
    assert "no operator has acted on this resource yet" in shown
    assert shown.endswith("Next step\n  find out whether an operator runs: heteroinfer check\n")
    code, _, errors = heteroinfer(config, "status", "none", "-n", namespace)
    assert code == 1
    assert "no HeteroInference none" in errors


def own_address() -> str:
    """Returns an address of this machine that is not loopback, to which the API server may pass requests."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


async def test_wake_asks_the_leaders_of_sleeping_groups(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    """The API server passes the request to the address of the pod: a server of this test answers there."""
    asked: list[str] = []
    host = own_address()

    async def wake_up(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.Response()

    app = web.Application()
    app.router.add_post("/wake_up", wake_up)
    runner = web.AppRunner(app)
    await runner.setup()
    config = control_plane.kubeconfig
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        port = runner.addresses[0][1]
        owner = await create_resource(server, namespace, engine={"port": port})
        options = ("wake", "tiny", "-n", namespace)
        assert await asyncio.to_thread(reported, config, *options) == (
            "heteroinference/tiny: no group is asleep\n"
        )
        await server.create(POD.path(namespace), pod(owner, "tiny-1-5-0"))
        address = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}
        await server.merge(POD.path(namespace, "tiny-1-5-0", "status"), {"status": address})
        members = [{"rank": 0, "role": "front", "pod": "tiny-1-5-0"}]
        groups = [
            {"index": 0, "epoch": 4, "phase": "Ready"},
            {"index": 1, "epoch": 5, "phase": "Sleeping", "members": members},
        ]
        status = {"status": {"groups": groups}}
        await server.merge(HETERO_INFERENCE.path(namespace, "tiny", "status"), status)
        other = await asyncio.to_thread(reported, config, *options, "--group", "0")
        assert other == "heteroinference/tiny: no group is asleep\n"
        woken = await asyncio.to_thread(reported, config, *options)
        assert woken == "heteroinference/tiny group 1 woken\n"
        assert asked == ["POST"]
    finally:
        await runner.cleanup()
    code, _, errors = await asyncio.to_thread(heteroinfer, config, *options)
    assert code == 1
    assert errors.startswith("error: group 1: POST /api/v1/namespaces/")
