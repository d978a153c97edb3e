"""Tests an attacker who can write ConfigMaps only, against a running operator."""

import json
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import CONFIG_MAP, EVENT, HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import (
    CONFLICT,
    NOT_FOUND,
    ApiError,
    ApiServer,
    load_configuration,
)
from tests.cluster.errors import ClusterError
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.life import bring_up, condition, serve_epoch, status_of, stored
from tests.integration.operator.running_operator import OperatorProcess, end_rank, operator, until

EVIL = "evil/image:1"


class Attacker:
    """A user with write access to the ConfigMaps of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._cluster, self._namespace = cluster, namespace
        verbs = "--verb=get,list,create,delete,patch,update"
        cluster.kubectl("create", "-n", namespace, "serviceaccount", "attacker")
        cluster.kubectl("create", "-n", namespace, "role", "maps", verbs, "--resource=configmaps")
        bound = ("--role=maps", f"--serviceaccount={namespace}:attacker")
        cluster.kubectl("create", "-n", namespace, "rolebinding", "maps", *bound)
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        token = cluster.kubectl("create", "token", "-n", namespace, "attacker")
        config["users"][0]["user"] = {"token": token.strip()}
        self._kubeconfig = folder / "attacker.kubeconfig"
        self._kubeconfig.write_text(yaml.safe_dump(config))
        self._kubeconfig.chmod(0o600)

    def may(self, verb: str, resource: str) -> bool:
        account = f"--as=system:serviceaccount:{self._namespace}:attacker"
        try:
            output = self._cluster.kubectl("auth", "can-i", verb, resource, "-n", self._namespace, account)
        except ClusterError:
            return False
        return output.strip() == "yes"

    async def replace(self, config_map: dict[str, Any]) -> None:
        """Replaces an immutable ConfigMap by a forged one that requests another image.

        The operator restores its ConfigMap within milliseconds, so several attempts may be needed.
        """
        metadata = {key: config_map["metadata"][key] for key in ("name", "labels", "annotations")}
        metadata["ownerReferences"] = config_map["metadata"]["ownerReferences"]
        ((key, text),) = config_map["data"].items()
        kept = json.loads(text)
        if key == names.PLAN_KEY:
            kept["engine"]["extra_args"] = ["--middleware", EVIL]
        else:
            kept["spec"].setdefault("engine", {})["image"] = EVIL
        data = {key: json.dumps(kept, sort_keys=True, separators=(",", ":"))}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "data": data,
        }
        path = CONFIG_MAP.path(self._namespace)
        server = ApiServer(await load_configuration(str(self._kubeconfig)))

        async def is_faster() -> bool:
            try:
                await server.delete(f"{path}/{metadata['name']}", {})
                await server.create(path, body)
            except ApiError as error:
                if error.status not in (CONFLICT, NOT_FOUND):
                    raise
                return False
            return True

        try:
            await until("a faster attempt", is_faster)
        finally:
            await server.close()


async def config_map(server: ApiServer, namespace: str, part: str) -> dict[str, Any]:
    found = await stored(server, CONFIG_MAP, namespace)
    (one,) = [each for each in found if f"-{part}-" in each["metadata"]["name"]]
    return one


async def events(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    listed = await server.get(EVENT.path(namespace))
    return [event for event in listed["items"] if event["reason"] == "RecordNotSigned"]


async def is_written_anew(server: ApiServer, namespace: str, old: dict[str, Any]) -> bool:
    name = old["metadata"]["name"]
    for each in await stored(server, CONFIG_MAP, namespace):
        if each["metadata"]["name"] == name:
            return bool(each["data"] == old["data"] and each["metadata"]["uid"] != old["metadata"]["uid"])
    return False


async def is_gone(server: ApiServer, namespace: str, name: str) -> bool:
    return name not in {each["metadata"]["name"] for each in await stored(server, CONFIG_MAP, namespace)}


async def images(server: ApiServer, namespace: str) -> set[str]:
    return {
        container["image"]
        for pod in await stored(server, POD, namespace)
        for container in pod["spec"]["containers"]
    }


async def test_write_access_to_config_maps_does_not_control_the_next_pods(
    server: ApiServer, namespace: str, node: str, control_plane: Cluster, tmp_path: Path
) -> None:
    control_plane.kubectl("create", "-n", namespace, "secret", "generic", "key")
    attacker = Attacker(control_plane, namespace, tmp_path)
    assert attacker.may("create", "configmaps")
    assert not any(attacker.may(verb, kind) for verb in ("create", "patch") for kind in ("pods", "hinf"))
    settings = {"watch_namespaces": namespace, "namespace": namespace, "key_secret": "key"}
    async with operator(
        control_plane.kubeconfig, tmp_path / "log", resync_seconds="5", **settings
    ) as process:
        await process.working()
        pods = await bring_up(server, namespace)

        async def signed() -> bool:
            return "recordsSignedBy" in await status_of(server, namespace)

        await until("the status relies on the codes", signed, details=lambda: process.output)
        await forge_while_the_spec_is_accepted(server, namespace, attacker, process)
        assert [pod["metadata"]["name"] for pod in await stored(server, POD, namespace)] == pods
        await end_rank(server, namespace, pods[0], index=0)
        pods = await serve_epoch(server, namespace, 2)
        await forge_while_the_spec_is_refused(server, namespace, attacker, process)
        assert (await condition(server, namespace, "Available"))[0] == "True", (
            "the serving group is not affected"
        )
        await end_rank(server, namespace, pods[0], index=0)

        async def waits() -> bool:
            return (await condition(server, namespace, "Available"))[0] == "False"

        await until("the end of the epoch", waits, details=lambda: process.output)
        assert EVIL not in await images(server, namespace)
        await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": {"engine": {"args": []}}})
        await serve_epoch(server, namespace, 3)
        assert EVIL not in await images(server, namespace)
        assert "Traceback" not in process.output, process.output


async def forge_while_the_spec_is_accepted(
    server: ApiServer, namespace: str, attacker: Attacker, process: OperatorProcess
) -> None:
    """Replaces the record while it belongs to the current revision. The operator must restore it."""
    record = await config_map(server, namespace, "revision")
    assert names.ANNOTATION_CODE in record["metadata"]["annotations"]
    await attacker.replace(record)
    await until(
        "a new record", lambda: is_written_anew(server, namespace, record), details=lambda: process.output
    )
    assert len(await events(server, namespace)) == 1
    assert (await condition(server, namespace, "Available"))[0] == "True"


async def forge_while_the_spec_is_refused(
    server: ApiServer, namespace: str, attacker: Attacker, process: OperatorProcess
) -> None:
    """Replaces the stored record while the current spec is refused, so that a group would restart with it."""
    await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": {"engine": {"args": ["--nope"]}}})

    async def refused() -> bool:
        return (await condition(server, namespace, "Planned"))[0] == "False"

    await until("the refusal", refused, details=lambda: process.output)
    for part in ("revision", "plan"):
        forged = await config_map(server, namespace, part)
        name = forged["metadata"]["name"]
        await attacker.replace(forged)
        await until(f"{name} is deleted", lambda name=name: is_gone(server, namespace, name))  # type: ignore[misc]  # bound immediately
