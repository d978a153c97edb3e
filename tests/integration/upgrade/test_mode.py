"""Tests the modes of resources over an upgrade and over restarts of the operator, on a real API server.

The CRD of 0.1.0 has a default for parallelism.mode, which the API server wrote into each object.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.kube.paths import CONFIG_MAP, HETERO_INFERENCE, NODE, POD
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.manifests.identity import first_revision, revision
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import add_node, end_pod, operator, run_pod, until
from tests.integration.upgrade.record import NAMESPACE
from tests.integration.upgrade.test_upgrade import RELEASE, VERSIONS, account_kubeconfig, plane
from tests.unit.planning.test_auto_mode import shapes

__all__ = ["plane"]
CHART = str(REPOSITORY / "charts" / "heteroinfer")
WAYS: dict[str, tuple[str, ...]] = {
    "client-side": ("apply",),
    "server-side": ("apply", "--server-side"),
    "replaced": ("create",),
    "migrated": ("apply",),
}
"""How a user created each resource before the upgrade."""


def manifest(name: str, **parallelism: Any) -> str:
    """Returns the manifest of a resource with these fields of `parallelism`."""
    role = {"name": "cpu", "device": "CPU", "pods": 2, "resources": {"requests": {"memory": "3Gi"}}}
    spec: dict[str, Any] = {"model": {"uri": "pvc://models/tiny"}, "roles": [role]}
    if parallelism:
        spec["parallelism"] = parallelism
    return json.dumps(
        {
            "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": spec,
        }
    )


def prepare(plane: Cluster) -> None:
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("wait", "-n", NAMESPACE, "--for=create", "serviceaccount/default", "--timeout=20s")


def stored(plane: Cluster, name: str) -> dict[str, Any]:
    """Returns mode, generation and revision names of a stored resource."""
    found = json.loads(plane.kubectl("get", "hinf", name, "-n", NAMESPACE, "-o", "json"))
    spec = parse_spec(found["spec"])
    return {
        "mode": found["spec"]["parallelism"].get("mode"),
        "generation": found["metadata"]["generation"],
        "revisions": (revision(spec), first_revision(spec)),
    }


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_stored_resources_keep_their_mode_and_revision(version: Path, plane: Cluster) -> None:
    (package,) = version.glob("*.tgz")
    plane.helm("install", RELEASE, str(package), "-n", RELEASE, "--create-namespace", "--set", "replicas=0")
    prepare(plane)
    for name, command in WAYS.items():
        plane.kubectl(*command, "-f", "-", stdin=manifest(name))
    before = {name: stored(plane, name) for name in WAYS}
    assert {each["mode"] for each in before.values()} == {"Pipeline"}, "the default of the older CRD"
    values = ("--reset-then-reuse-values", "-f", str(LEAST_VALUES))
    plane.helm("upgrade", RELEASE, CHART, "-n", RELEASE, *values)

    assert {name: stored(plane, name) for name in WAYS} == before, "the upgrade alone"
    for name in ("client-side", "server-side"):
        plane.kubectl(*WAYS[name], "-f", "-", stdin=manifest(name))
        assert stored(plane, name) == before[name], f"{name} apply of the same manifest"
    plane.kubectl("replace", "-f", "-", stdin=manifest("replaced"))
    replaced = stored(plane, "replaced")
    assert replaced["mode"] is None
    assert replaced["generation"] == before["replaced"]["generation"] + 1
    assert not set(replaced["revisions"]) & set(before["replaced"]["revisions"])

    plane.kubectl("apply", "--server-side", "-f", "-", stdin=manifest("migrated"))
    # kubectl moves the fields of its client-side apply to the new owner. One of them is the default, which
    # the manifest lacks.
    assert stored(plane, "migrated")["mode"] is None, "the first server-side apply of an older object"

    for name in ("client-side", "server-side"):
        plane.kubectl(*WAYS[name], "-f", "-", stdin=manifest(name, mode="Auto"))
        assert stored(plane, name)["mode"] == "Auto"
        assert stored(plane, name)["revisions"] == replaced["revisions"], "Auto is the same as no mode"
    plane.kubectl("apply", "-f", "-", stdin=manifest("new"))
    assert stored(plane, "new")["mode"] is None
    assert stored(plane, "new")["revisions"] == replaced["revisions"]


ROLES = [
    {"name": "gpu", "device": "GPU"},
    {"name": "cpu", "device": "CPU", "resources": {"requests": {"cpu": "14", "memory": "48Gi"}}},
]
MANY = {"requests": 32, "promptTokens": 256, "outputTokens": 512}


async def set_gpu(server: ApiServer, gib: int) -> None:
    """Reports another GPU on the node, like the device plugin and GPU feature discovery."""
    labels = {"nvidia.com/gpu.memory": str(gib * 1024)}
    await server.merge(NODE.path(None, "spacious"), {"metadata": {"labels": labels}})
    amounts = {"cpu": "32", "memory": "128Gi", "pods": "110", "nvidia.com/gpu": "4"}
    status = {"allocatable": amounts, "capacity": amounts}
    await server.merge(NODE.path(None, "spacious", "status"), {"status": status})


async def ready_mode(server: ApiServer, name: str, epoch: int = 0) -> str:
    """Plays the kubelet. Returns the mode of a group that serves in a later epoch, or ""."""
    query = {"labelSelector": f"{names.LABEL_RESOURCE}={name}"}
    for pod in (await server.get(POD.path(NAMESPACE), query))["items"]:
        metadata = pod["metadata"]
        if pod.get("status", {}).get("phase") != "Pending" or "deletionTimestamp" in metadata:
            continue
        if metadata["labels"][names.LABEL_COMPONENT] == names.COMPONENT_WORKER:
            await run_pod(server, NAMESPACE, metadata["name"])
        else:
            profile = shapes()["mixture"].to_json()
            await end_pod(server, NAMESPACE, metadata["name"], exit_code=0, message=profile)
    status = (await server.get(HETERO_INFERENCE.path(NAMESPACE, name))).get("status", {})
    groups = status.get("groups", [])
    serves = groups and groups[0]["phase"] == "Ready" and groups[0]["epoch"] > epoch
    return str(status["summary"]["mode"]) if serves else ""


async def create(server: ApiServer, name: str) -> None:
    body = json.loads(manifest(name))
    body["spec"] |= {"roles": ROLES, "planning": {"load": MANY}, "engine": {"maxModelLen": 4096}}
    await server.create(HETERO_INFERENCE.path(NAMESPACE), body)


async def test_the_mode_stays_after_a_restart_and_a_change_of_nodes(plane: Cluster, tmp_path: Path) -> None:
    values = ("-f", str(LEAST_VALUES), "--set", "replicas=0")
    plane.helm("install", RELEASE, CHART, "-n", RELEASE, "--create-namespace", *values)
    prepare(plane)
    server = ApiServer(await load_configuration(str(plane.kubeconfig)))
    settings = {"resync_seconds": "1", "namespace": RELEASE, "key_secret": f"{RELEASE}-operator-key"}
    account = account_kubeconfig(plane, tmp_path)
    try:
        await add_node(server, "spacious")
        await set_gpu(server, 24)
        async with operator(account, tmp_path / "first.log", **settings) as process:
            await process.working()
            await create(server, "kept")
            chosen = await until("the mode", lambda: ready_mode(server, "kept"), 60, lambda: process.output)
            assert await process.stop() == 0
        assert chosen == "FeedForward"
        assert "FeedForward" in plane.kubectl("get", "hinf", "kept", "-n", NAMESPACE)
        events = plane.kubectl("get", "events", "-n", NAMESPACE, "--field-selector", "reason=ModeChosen")
        assert "Pipeline:" in events
        await set_gpu(server, 80)
        async with operator(account, tmp_path / "second.log", **settings) as process:
            await process.working()
            status = (await server.get(HETERO_INFERENCE.path(NAMESPACE, "kept")))["status"]
            epoch = status["groups"][0]["epoch"]
            await end_pod(server, NAMESPACE, f"kept-0-{epoch}-0", exit_code=137, message="")
            again = await until(
                "the next epoch", lambda: ready_mode(server, "kept", epoch), 60, lambda: process.output
            )
            await create(server, "fresh")
            other = await until(
                "another resource", lambda: ready_mode(server, "fresh"), 60, lambda: process.output
            )
            assert "Traceback" not in process.output, process.output
        assert again == chosen, "the stored mode"
        assert other == "Pipeline", "the mode that this version would choose for this node"
        maps = (await server.get(CONFIG_MAP.path(NAMESPACE)))["items"]
        records = [
            json.loads(each["data"]["revision.json"])
            for each in maps
            if each["metadata"]["name"].startswith("kept-revision-")
        ]
        assert [record["mode"]["mode"] for record in records] == ["FeedForward"]
    finally:
        await server.close()
