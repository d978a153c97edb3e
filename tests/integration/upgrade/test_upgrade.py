"""Tests an upgrade while groups run: an older chart and its operator's stored objects, then the present ones.

The folder versions/ has the objects of each version. record.py wrote them in that version's own tree.
"""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.group_key import GroupKey
from heteroinfer_operator.api import parse_spec, parse_stored_spec
from heteroinfer_operator.kube.paths import CHILDREN, CONFIG_MAP, EVENT, HETERO_INFERENCE, POD, SECRET
from heteroinfer_operator.kube.server import ApiError, ApiServer, load_configuration
from heteroinfer_operator.manifests.identity import first_revision, revision
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster, start_control_plane_only
from tests.integration.operator.running_operator import (
    OperatorProcess,
    add_node,
    end_pod,
    operator,
    run_pod,
    until,
)
from tests.integration.upgrade.record import NAMESPACE, OBJECTS

VERSIONS = sorted(path for path in (Path(__file__).parent / "versions").iterdir() if path.is_dir())
RELEASE = "heteroinfer"
KINDS = {kind.name: kind for kind in (HETERO_INFERENCE, POD, *CHILDREN)}

every_version = pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)


def recorded(version: Path) -> list[dict[str, Any]]:
    return list(json.loads((version / OBJECTS).read_text()))


def resources(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == names.KIND]


@every_version
def test_the_revision_of_an_old_spec_stays(version: Path) -> None:
    for resource in resources(recorded(version)):
        name = resource["metadata"]["name"]
        spec = parse_spec(resource["spec"])
        # The first version also hashed fields whose change needs no new pods: `first_revision`.
        assert resource["status"]["currentRevision"] in {revision(spec), first_revision(spec)}, name


@pytest.fixture
def plane() -> Iterator[Cluster]:
    """Runs a control plane of the test's own, because the CRD belongs to the release."""
    with start_control_plane_only() as cluster:
        yield cluster


async def restore(server: ApiServer, objects: list[dict[str, Any]]) -> None:
    """Stores the old operator's objects with its field manager. The objects get new uids."""
    text = json.dumps(objects)
    for resource in resources(objects):
        bare = {**resource, "metadata": at_rest(resource["metadata"])}
        stored = await server.create(HETERO_INFERENCE.path(NAMESPACE), bare)
        old, new = resource["metadata"]["uid"], stored["metadata"]["uid"]
        text = text.replace(old, new)
        path = HETERO_INFERENCE.path(NAMESPACE, resource["metadata"]["name"], "status")
        await server.update(path, {**stored, "status": resource["status"]})
    for item in json.loads(text):
        kind, name = KINDS[item["kind"]], item["metadata"]["name"]
        item["metadata"] = at_rest(item["metadata"])
        if kind is POD:
            created = await server.create(kind.path(NAMESPACE), item, {"fieldManager": names.MANAGER})
            assert created["spec"]["containers"] == item["spec"]["containers"]
            await run_pod(server, NAMESPACE, name)
        elif kind is not HETERO_INFERENCE:
            if item.get("spec", {}).get("clusterIP") not in (None, "None"):
                item["spec"] = {k: v for k, v in item["spec"].items() if not k.startswith("clusterIP")}
            await server.apply(kind.path(NAMESPACE, name), item, manager=names.MANAGER)


def at_rest(metadata: dict[str, Any]) -> dict[str, Any]:
    given = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")
    return {key: metadata[key] for key in given if key in metadata}


async def pods(server: ApiServer) -> dict[str, Any]:
    """Returns every pod of the namespace without its status, which the scheduler also writes."""
    items = (await server.get(POD.path(NAMESPACE)))["items"]
    return {pod["metadata"]["name"]: untouched(pod) for pod in items}


def untouched(pod: dict[str, Any]) -> dict[str, Any]:
    changing = ("resourceVersion", "managedFields")
    return {
        "spec": pod["spec"],
        "metadata": {key: value for key, value in pod["metadata"].items() if key not in changing},
    }


async def statuses(server: ApiServer) -> dict[str, Any]:
    items = (await server.get(HETERO_INFERENCE.path(NAMESPACE)))["items"]
    return {item["metadata"]["name"]: item["status"] for item in items}


async def settled(process: OperatorProcess) -> None:
    """Waits until several full resyncs in a row write nothing except a held Lease."""

    async def writes() -> dict[str, float]:
        return {each: count for each, count in (await process.writes()).items() if "leases" not in each}

    async def quiet() -> bool:
        written = await writes()
        count = f"{metric_names.OPERATOR_RECONCILE_SECONDS}_count"
        enough = await process.metric(count) + 9

        async def more() -> bool:
            return await process.metric(count) >= enough

        await until("three reconciles of three resources", more, details=lambda: process.output)
        return await writes() == written

    await until("reconciles that write nothing", quiet, timeout_s=40, details=lambda: process.output)


def account_kubeconfig(plane: Cluster, folder: Path) -> Path:
    token = plane.kubectl("create", "token", "-n", RELEASE, RELEASE).strip()
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = folder / "account.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


@contextlib.asynccontextmanager
async def upgraded(
    version: Path, plane: Cluster, objects: list[dict[str, Any]], folder: Path
) -> AsyncIterator[tuple[ApiServer, OperatorProcess, dict[str, Any]]]:
    """Installs an older chart, stores the objects of its operator, and upgrades as docs/user/upgrade.md says.

    Returns:
        The API server, this operator at work, and the pods as they were before the upgrade.
    """
    (package,) = version.glob("*.tgz")
    plane.helm("install", RELEASE, str(package), "-n", RELEASE, "--create-namespace", "--set", "replicas=0")
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("wait", "-n", NAMESPACE, "--for=create", "serviceaccount/default", "--timeout=20s")
    server = ApiServer(await load_configuration(str(plane.kubeconfig)))
    try:
        await restore(server, objects)
        before = await pods(server)
        chart = str(REPOSITORY / "charts" / "heteroinfer")
        plane.helm(
            "upgrade", RELEASE, chart, "-n", RELEASE, "--reset-then-reuse-values", "-f", str(LEAST_VALUES)
        )
        settings = {"resync_seconds": "1", "namespace": RELEASE, "key_secret": f"{RELEASE}-operator-key"}
        async with operator(account_kubeconfig(plane, folder), folder / "log", **settings) as process:
            await process.working()
            yield server, process, before
    finally:
        await server.close()


@every_version
async def test_groups_of_an_older_version_continue_to_run(
    version: Path, plane: Cluster, tmp_path: Path
) -> None:
    objects = recorded(version)
    async with upgraded(version, plane, objects, tmp_path) as (server, process, before):
        await settled(process)
        assert await pods(server) == before, process.output
        await check_as_recorded(server, objects)
        await check_codes(server)
        await check_next_epoch(server, process)
        await check_keys(server)
        assert "Traceback" not in process.output, process.output
        assert " 403 " not in process.output, process.output


FORBIDDEN: dict[str, Any] = {
    "engine": {
        "args": ["--middleware", "model.Middleware", "--trust-remote-code"],
        "env": [{"name": "LD_PRELOAD", "value": "/model/x.so"}, {"name": "VLLM_API_KEY", "value": "hunter2"}],
    }
}


def with_spec(objects: list[dict[str, Any]], name: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the old operator's objects with more fields in a resource's spec."""
    (resource,) = (item for item in resources(objects) if item["metadata"]["name"] == name)
    changed = {**resource["spec"], "engine": {**resource["spec"]["engine"], **spec["engine"]}}
    new, old = first_revision(parse_stored_spec(changed)), resource["status"]["currentRevision"]
    kept = [item for item in objects if item["metadata"]["name"].startswith(f"{name}-")]
    return list(json.loads(json.dumps([{**resource, "spec": changed}, *kept]).replace(old, new)))


@every_version
async def test_a_stricter_list_still_allows_status_writes_and_restarts_of_old_specs(
    version: Path, plane: Cluster, tmp_path: Path
) -> None:
    """The older list allowed the spec, and the new list refuses it.

    Its group continues to run, and restarts with its own plan.
    """
    path = HETERO_INFERENCE.path(NAMESPACE, "pair")
    objects = with_spec(recorded(version), "pair", FORBIDDEN)
    async with upgraded(version, plane, objects, tmp_path) as (server, process, before):

        async def says_so() -> bool:
            planned = await condition(server, path, "Planned")
            return planned["status"] == "False" and "VLLM_API_KEY" in planned["message"]

        await until("the condition", says_so, details=lambda: process.output)
        assert (await condition(server, path, "Available"))["status"] == "True"
        assert await pods(server) == before, process.output
        await check_next_epoch(server, process)
        epoch = (await statuses(server))["pair"]["groups"][0]["epoch"]
        (container,) = (await pods(server))[f"pair-0-{epoch}-0"]["spec"]["containers"]
        assert {"name": "LD_PRELOAD", "value": "/model/x.so"} in container["env"], "the object is unchanged"
        await server.merge(path, {"spec": {"suspend": True}})
        await until("pods that go", lambda: all_go(server), details=lambda: process.output)
        worse = [{"name": "HF_TOKEN", "value": "hunter2"}]
        with pytest.raises(ApiError, match=r"\(got HF_TOKEN\)\. Store the value"):
            await server.merge(path, {"spec": {"engine": {"env": worse}}})
        assert "Traceback" not in process.output, process.output
        assert " 422 " not in process.output, process.output


async def condition(server: ApiServer, path: str, kind: str) -> dict[str, Any]:
    found = (await server.get(path))["status"]["conditions"]
    return next((item for item in found if item["type"] == kind), {"status": "Unknown", "message": ""})


async def all_go(server: ApiServer) -> bool:
    """Returns whether all remaining pods are in deletion. No kubelet runs here."""
    return all("deletionTimestamp" in pod["metadata"] for pod in (await pods(server)).values())


async def check_as_recorded(server: ApiServer, objects: list[dict[str, Any]]) -> None:
    """Checks that every group is unchanged and that no writer has reported otherwise."""
    now = await statuses(server)
    for resource in resources(objects):
        was, name = resource["status"], resource["metadata"]["name"]
        kept = ("index", "epoch", "phase", "revision", "planHash", "restarts")
        for old, new in zip(was["groups"], now[name]["groups"], strict=True):
            assert {key: new.get(key) for key in kept} == {key: old.get(key) for key in kept}, name
            assert len(new.get("failures", ())) == len(old.get("failures", ())), name
        for key in ("currentRevision", "updateRevision", "readyReplicas", "updatedReplicas"):
            assert now[name][key] == was[key], (name, key)
        assert {"type": "Ready", "status": "True"}.items() <= next(
            c for c in now[name]["conditions"] if c["type"] == "Ready"
        ).items()
    events = (await server.get(EVENT.path(NAMESPACE)))["items"]
    ours = [e["reason"] for e in events if e["regarding"]["kind"] == names.KIND]
    ended = {"EpochStarted", "PlanLost", "RevisionChanged", "PodDeleted", "RecordNotSigned"}
    assert not ended.intersection(ours), ours


async def check_codes(server: ApiServer) -> None:
    """Checks that plans and records of a version without codes have codes now, and no other change."""
    listed = await server.get(CONFIG_MAP.path(NAMESPACE), {"labelSelector": names.LABEL_RESOURCE})
    annotations = {
        item["metadata"]["name"]: item["metadata"].get("annotations", {}) for item in listed["items"]
    }
    lacking = [name for name, found in annotations.items() if names.ANNOTATION_CODE not in found]
    assert len(annotations) == 6, annotations
    assert not lacking, lacking
    assert all("recordsSignedBy" in status for status in (await statuses(server)).values())


async def check_next_epoch(server: ApiServer, process: OperatorProcess) -> None:
    """Fails a group after the upgrade.

    The old epoch must end completely, and the new operator starts the next.
    """
    await add_node(server, "spacious")  # Not earlier, because the scheduler would give the old pods a node.
    await end_pod(server, NAMESPACE, "pair-0-1-1", exit_code=137, message="")

    async def second_epoch() -> bool:
        found = [name for name in await pods(server) if name.startswith("pair-0-")]
        newer = [name for name in found if not name.startswith("pair-0-1-")]
        for name in newer:
            await run_pod(server, NAMESPACE, name)
        group = (await statuses(server))["pair"]["groups"][0]
        return len(newer) == 2 and group["epoch"] > 1 and group["phase"] == "Ready"

    await until("the second epoch", second_epoch, timeout_s=40, details=lambda: process.output)
    assert not [name for name in await pods(server) if name.startswith("pair-0-1-")]


async def check_keys(server: ApiServer) -> None:
    """Checks that the group of the new epoch has a key in its own Secret, and running groups have none."""
    for name, pod in (await pods(server)).items():
        (container,) = pod["spec"]["containers"]
        env = {variable["name"]: variable for variable in container["env"]}
        assert (names.ENV_GROUP_KEY in env) is name.startswith("pair-0-"), name
        if names.ENV_GROUP_KEY in env:
            reference = env[names.ENV_GROUP_KEY]["valueFrom"]["secretKeyRef"]
            secret = await server.get(SECRET.path(NAMESPACE, reference["name"]))
            key = GroupKey.from_env(
                {names.ENV_GROUP_KEY: base64.b64decode(secret["data"][reference["key"]]).decode()}
            )
            assert key is not None
            assert reference["name"] == f"pair-0-key-{key.fingerprint}"
