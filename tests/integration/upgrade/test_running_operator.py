"""Tests an upgrade from a chart whose template made the operator's key, while that chart's operator runs."""

import base64
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, POD, SECRET
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import end_pod, operator, until
from tests.integration.upgrade.record import NAMESPACE, RESOURCES, listed, play_kubelet
from tests.integration.upgrade.test_upgrade import (
    RELEASE,
    account_kubeconfig,
    plane,
    pods,
    settled,
    statuses,
)

__all__ = ["plane"]
FORMER = Path(__file__).parent / "operator-at-5ba4481.tar.xz"
FORMER_CHART = Path(__file__).parent / "heteroinfer-at-5ba4481.tgz"
CHART = REPOSITORY / "charts" / "heteroinfer"
SCOPE = (
    *("--set", "replicas=0", "--set", "scope=Namespaced", "--set", f"watchNamespaces={{{NAMESPACE}}}"),
    *("--set", "allowedAnnotations={example.com/note}"),  # a resource has it
)


def settings(plane: Cluster) -> dict[str, str]:
    """Returns the environment of the release's Deployment, without variables that the test sets itself."""
    text = plane.kubectl("get", "deployment", RELEASE, "-n", RELEASE, "-o", "json")
    (container,) = json.loads(text)["spec"]["template"]["spec"]["containers"]
    fields = {"metadata.namespace": RELEASE, "metadata.name": "operator"}
    env = {
        each["name"].removeprefix("HETEROINFER_").lower(): each.get("value")
        or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
        if "value" in each or "valueFrom" in each  # an empty variable is stored without a value
    }
    return {**env, "http_port": "0", "resync_seconds": "1"}


async def keys(server: ApiServer) -> dict[str, bytes]:
    """Returns the operator's key from each Secret of the release that has a key."""
    found = (await server.get(SECRET.path(RELEASE)))["items"]
    return {
        each["metadata"]["name"]: base64.b64decode(each["data"]["key"])
        for each in found
        if "key" in each.get("data", {})
    }


async def secrets_of_groups(server: ApiServer) -> set[str]:
    """Returns the names of all Secrets of groups, which have their keys."""
    return {each["metadata"]["name"] for each in await listed(server, SECRET)}


@pytest.mark.parametrize("options", [(), ("--force",)], ids=["plain", "force"])
async def test_an_upgrade_changes_neither_pods_nor_keys(
    options: tuple[str, ...], plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(FORMER) as archive:
        archive.extractall(tmp_path / "former", filter="data")
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("wait", "-n", NAMESPACE, "--for=create", "serviceaccount/default", "--timeout=20s")
    plane.helm("install", RELEASE, str(FORMER_CHART), "-n", RELEASE, "--create-namespace", *SCOPE)
    account = account_kubeconfig(plane, tmp_path)
    server = ApiServer(await load_configuration(str(plane.kubeconfig)))
    try:
        with monkeypatch.context() as former:
            sources = (tmp_path / "former" / part / "src" for part in ("operator", "worker_image"))
            former.setenv("PYTHONPATH", ":".join(map(str, sources)))
            async with operator(account, tmp_path / "former.log", **settings(plane)) as process:
                await process.working()
                for document in yaml.safe_load_all(RESOURCES.read_text()):
                    await server.create(HETERO_INFERENCE.path(NAMESPACE), document)
                await until("every group is Ready", lambda: play_kubelet(server), 120, lambda: process.output)
                assert await process.stop() == 0
        before, of_groups = await pods(server), await secrets_of_groups(server)
        (key,) = (await keys(server)).values()
        options_of_upgrade = ("--reset-then-reuse-values", "-f", str(LEAST_VALUES), *options)
        plane.helm("upgrade", RELEASE, str(CHART), "-n", RELEASE, *options_of_upgrade)
        async with operator(account, tmp_path / "log", **settings(plane)) as process:
            await process.working()
            await settled(process)
            assert await pods(server) == before, process.output
            assert set((await keys(server)).values()) == {key}
            await check_next_epoch(server)
            assert await secrets_of_groups(server) == of_groups, "the same keys of groups"
            assert not {"RecordNotSigned", "KeyLost"} & await reasons(server)
            assert "Traceback" not in process.output, process.output
            assert " 403 " not in process.output, process.output
    finally:
        await server.close()


async def reasons(server: ApiServer) -> set[str]:
    return {each["reason"] for each in (await server.get(EVENT.path(NAMESPACE)))["items"]}


async def check_next_epoch(server: ApiServer) -> None:
    """Fails a group after the upgrade. The next epoch must be made from the stored objects."""
    old = {name: pod for name, pod in (await pods(server)).items() if name.startswith("pair-0-")}
    await end_pod(server, NAMESPACE, min(old), exit_code=137, message="")

    async def is_ready() -> bool:
        ready = await play_kubelet(server)
        group: dict[str, Any] = (await statuses(server))["pair"]["groups"][0]
        present = {name for name in await pods(server) if name.startswith("pair-0-")}
        return ready and group["phase"] == "Ready" and not old.keys() & present and len(present) == len(old)

    await until("the next epoch", is_ready, timeout_s=60)
    new = [name for name in await pods(server) if name.startswith("pair-0-")]
    for name in new:
        pod = await server.get(POD.path(NAMESPACE, name))
        assert names.ENV_GROUP_KEY in {each["name"] for each in pod["spec"]["containers"][0]["env"]}
