"""The operator predicts with the calibration that a Job of the chart stores with minimal permissions."""

import asyncio
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_operator.kube.paths import CONFIG_MAP, NODE, POD
from heteroinfer_operator.kube.rights import AccessRule, find_missing_rights
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.nodes.cpu_features import AVX512_BF16
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.planning.rates import describe_cpu_defaults
from heteroinfer_operator.version import own_version
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.conftest import CHART, Installation
from tests.integration.operator.life import Install, bind, bring_up, status_of, stored, workers
from tests.integration.operator.running_operator import OperatorProcess, operator, until
from tests.unit.calibrated import CALIBRATION, NETWORK

MEASURED = replace(CALIBRATION, versions=replace(CALIBRATION.versions, heteroinfer=own_version()))
VALUES = ("calibration.nodeKinds[0].name=fast", "calibration.nodeKinds[0].nodeSelector.speed=fast")
VERSIONS = json.loads(MEASURED.to_json())["versions"]


async def test_the_operator_predicts_with_the_calibration_from_a_job(
    control_plane: Cluster,
    server: ApiServer,
    namespace: str,
    install: Install,
    tmp_path: Path,
    node: str,
) -> None:
    installed = install(*VALUES)
    release, config_map = installed.release, f"{installed.release}-heteroinfer-measured"
    await server.merge(NODE.path(None, node), {"metadata": {"labels": {"speed": "fast"}}})
    settings = {"namespace": release, "calibration_config_map": config_map}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        serving = await bring_up(server, namespace)
        for name in serving:
            await bind(server, namespace, name, node)
        before = (await status_of(server, namespace))["plans"][0]
        assert before["calibration"] == "; ".join(
            f"role {name}: {describe_cpu_defaults(AVX512_BF16)}" for name in ("back", "front")
        )

        output = await keep_as_the_job_does(control_plane, installed, tmp_path)
        assert f"calibration {MEASURED.hash} of " in output
        assert "not measured: experts in MXFP4: RuntimeError: no" in output
        assert f"stored in ConfigMap {release}/{config_map}: fast" in output

        async def predicted() -> dict[str, Any] | None:
            (plan,) = (await status_of(server, namespace))["plans"]
            return plan if MEASURED.hash in plan["calibration"] else None

        after = await until("a prediction with the calibration", predicted, details=lambda: process.output)
        assert after["calibration"].count(MEASURED.hash) == 2
        assert after["hash"] == before["hash"]
        assert await workers(server, namespace, 1) == serving
        assert all("deletionTimestamp" not in p["metadata"] for p in await stored(server, POD, namespace))

        # Entries of other writers are reported and ignored, and do not affect the Job's entry.
        older = {**json.loads(MEASURED.to_json()), "versions": {**VERSIONS, "heteroinfer": "0.0.9"}}
        slow = json.dumps({"nodeSelector": {"speed": "fast"}, "calibration": older})
        path = CONFIG_MAP.path(release, config_map)
        await server.merge(path, {"data": {"bad.json": "{", "older.json": slow}})
        await until("log lines about both", lambda: names_both(process), details=lambda: process.output)
        assert (await status_of(server, namespace))["plans"] == [after]

        async def of_defaults() -> bool:
            return bool((await status_of(server, namespace))["plans"][0] == before)

        await server.merge(path, {"data": {"fast.json": None}})
        await until("defaults for nodes of a removed kind", of_defaults, details=lambda: process.output)
        await keep_as_the_job_does(control_plane, installed, tmp_path)
        await until("the prediction again", predicted, details=lambda: process.output)
        await server.merge(NODE.path(None, node), {"metadata": {"labels": {"speed": None}}})
        await until("defaults for a node without a known kind", of_defaults, details=lambda: process.output)
        assert await workers(server, namespace, 1) == serving
        assert await process.stop() == 0

    # The chart does not render the entries of Jobs, so it keeps them; a deleted entry is measured again.
    (job,) = jobs_of(control_plane, release)
    upgrade = ("upgrade", release, str(CHART), "-n", release, "--reuse-values", "--set")
    control_plane.helm(*upgrade, "workers=2", "--force")
    assert jobs_of(control_plane, release) == [job]
    control_plane.kubectl("delete", "job", "-n", release, job)
    control_plane.helm(*upgrade, "workers=3")
    assert jobs_of(control_plane, release) == [job]
    control_plane.helm(*upgrade, f"{VALUES[0]},{VALUES[1]}er")
    (other,) = jobs_of(control_plane, release)
    assert other != job
    kept = await server.get(CONFIG_MAP.path(release, config_map))
    assert json.loads(kept["data"]["fast.json"])["nodeSelector"] == {**IMAGE_PLATFORM, "speed": "fast"}


async def test_the_operator_reads_the_network_that_a_job_stores(
    control_plane: Cluster, server: ApiServer, install: Install, tmp_path: Path
) -> None:
    installed = install(*VALUES, "calibration.networks[0].from=fast", "calibration.networks[0].to=fast")
    release, config_map = installed.release, f"{installed.release}-heteroinfer-measured"
    jobs = json.loads(control_plane.kubectl("get", "jobs", "-n", release, "-o", "json"))["items"]
    (client,) = (job for job in jobs if "-connect-" in job["metadata"]["name"])
    assert len(jobs) == 3, "a Job that measures a node, and the two of the network"
    measured = replace(NETWORK, version=own_version())
    older = replace(NETWORK, version="0.0.9")
    file = tmp_path / "network.json"
    run = functools.partial(run_keeping_container, control_plane, release, tmp_path, client)
    file.write_text(older.to_json())
    refused = await run()
    assert refused.returncode != 0
    assert "HeteroInfer 0.0.9 measured this network, but " in refused.stderr
    file.write_text("{}")
    assert f"{file}: NetworkMeasurement: " in (await run()).stderr
    file.write_text(measured.to_json())
    done = await run()
    assert done.returncode == 0, done.stderr
    assert f"network: measurement {measured.hash} of " in done.stdout
    assert f"stored in ConfigMap {release}/{config_map}: fast.fast.network" in done.stdout
    await keep_as_the_job_does(control_plane, installed, tmp_path)
    path = CONFIG_MAP.path(release, config_map)
    stored_map = await server.get(path)
    assert sorted(stored_map["data"]) == ["fast.fast.network.json", "fast.json"], "neither removes the other"
    await server.merge(path, {"data": {"fast.x.network.json": "{"}})
    settings = {"namespace": release, "calibration_config_map": config_map}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()

        async def is_read() -> bool:
            output = process.output
            known = f"network between nodes of kinds fast and fast: using measurement {measured.hash}"
            return (
                known in output and "calibration fast.x.network.json: must have a key of two kinds" in output
            )

        await until("log lines about both networks", is_read, details=lambda: process.output)
        assert await process.stop() == 0


async def names_both(process: OperatorProcess) -> bool:
    """Checks whether the operator's log reports why it ignores two entries."""
    output = process.output
    return (
        "calibration bad.json: must contain nodeSelector" in output
        and "calibration older.json: ignored, because HeteroInfer 0.0.9 measured these rates" in output
    )


def jobs_of(cluster: Cluster, release: str) -> list[str]:
    """Returns the names of a release's Jobs."""
    found = json.loads(cluster.kubectl("get", "jobs", "-n", release, "-o", "json"))["items"]
    return [job["metadata"]["name"] for job in found]


async def keep_as_the_job_does(cluster: Cluster, installed: Installation, tmp_path: Path) -> str:
    """Runs the command of the Job's container with its pod's permissions; returns the output."""
    release = installed.release
    jobs = json.loads(cluster.kubectl("get", "jobs", "-n", release, "-o", "json"))["items"]
    (job,) = (job for job in jobs if "-fast-" in job["metadata"]["name"])
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {**IMAGE_PLATFORM, "speed": "fast"}
    assert "token" not in [mount["name"] for mount in pod["initContainers"][0]["volumeMounts"]]
    measured = tmp_path / "calibration.json"
    run = functools.partial(run_keeping_container, cluster, release, tmp_path, job)
    older = replace(MEASURED, versions=replace(MEASURED.versions, heteroinfer="0.0.9"))
    measured.write_text(older.to_json())
    refused = await run()
    assert refused.returncode != 0
    assert "HeteroInfer 0.0.9 measured this calibration, but " in refused.stderr
    measured.write_text(MEASURED.to_json())
    done = await run()
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


async def run_keeping_container(
    cluster: Cluster, release: str, tmp_path: Path, job: dict[str, Any]
) -> "subprocess.CompletedProcess[str]":
    """Runs the command of the container that stores a result, with its pod's permissions."""
    pod = job["spec"]["template"]["spec"]
    kubeconfig = tmp_path / "job.kubeconfig"
    token = cluster.kubectl("create", "token", "-n", release, pod["serviceAccountName"])
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token.strip()}
    kubeconfig.write_text(yaml.safe_dump(config))
    measured_in = f"{release}-heteroinfer-measured"
    assert await rights_of(kubeconfig, release) == [f"{verb} {measured_in}" for verb in ("create", "patch")]

    container = pod["containers"][0]
    env = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    env |= {"HETEROINFER_NAMESPACE": release, "HETEROINFER_IDENTITY": "job", "NO_PROXY": "*"}
    env |= {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig)}
    arguments = [each.replace("/measured", str(tmp_path)) for each in container["args"]]
    command = [sys.executable, "-m", "heteroinfer_operator.cli", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, timeout=60, check=False
    )


VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")


async def rights_of(kubeconfig: Path, release: str) -> list[str]:
    """Returns the permissions of this user on ConfigMaps and pods, as verb and name."""
    server = ApiServer(await load_configuration(str(kubeconfig)))
    found = []
    try:
        for resource, name in (
            ("configmaps", f"{release}-heteroinfer-measured"),
            ("configmaps", "another"),
            ("pods", "any"),
        ):
            for verb in VERBS:
                rule = AccessRule(group="", resource=resource, verbs=(verb,), name=name)
                if not await find_missing_rights(server, (rule,), release):
                    found.append(f"{verb} {name}")
    finally:
        await server.close()
    return found
