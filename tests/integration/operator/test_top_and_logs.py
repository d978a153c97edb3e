"""Tests `heteroinfer top`, `heteroinfer logs` and kubectl's columns on a real API server, without a node.

Pods have no logs and leaders are unreachable here, so the tests check how the commands report this. The e2e
tests cover the rest.
"""

import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.command_line import heteroinfer, reported
from tests.integration.operator.life import (
    COLLECTED_S,
    Install,
    bring_up,
    nothing_left,
    nth_epoch,
    pod_of,
    serve_epoch,
    status_of,
)
from tests.integration.operator.running_operator import end_pod, operator, until

VIEWER = "viewer"


@pytest.fixture
def viewer(control_plane: Cluster, namespace: str, tmp_path: Path) -> Path:
    """Creates a user who may read resources and pods of the context's namespace. Returns the kubeconfig."""
    rule = f"--resource=pods,{names.PLURAL}.{names.API_GROUP}"
    control_plane.kubectl("create", "-n", namespace, "serviceaccount", VIEWER)
    control_plane.kubectl("create", "-n", namespace, "role", VIEWER, "--verb=get,list", rule)
    control_plane.kubectl(
        "create", "-n", namespace, "rolebinding", VIEWER, f"--role={VIEWER}",
        f"--serviceaccount={namespace}:{VIEWER}",
    )  # fmt: skip
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    token = control_plane.kubectl("create", "token", "-n", namespace, VIEWER).strip()
    config["users"][0]["user"] = {"token": token}
    config["contexts"][0]["context"]["namespace"] = namespace
    path = tmp_path / "viewer.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
    return path


def columns(cluster: Cluster, namespace: str, *options: str) -> dict[str, str]:
    header, values = cluster.kubectl("get", "hinf", "-n", namespace, "tiny", *options).splitlines()
    starts = [word.start() for word in re.finditer(r"\S+", header)]
    ends = [*starts[1:], max(len(header), len(values))]
    return {header[a:b].strip(): values[a:b].strip() for a, b in zip(starts, ends, strict=True)}


def status_of_a_serving_group(viewer: Path) -> None:
    """Checks `heteroinfer status` while the group serves, with pods that no scheduler has placed."""
    shown = reported(viewer, "status", "tiny")
    assert "State     Available, Ready (Serving)" in shown
    assert "Values of ranks come from the stored status and may be up to a minute old, because " in shown
    value = yaml.safe_load(reported(viewer, "status", "tiny", "-o", "yaml"))
    assert set(value["unexpectedConditions"]) <= {"CapacityAvailable"}, (
        "the scheduler has no node for its pods"
    )
    assert value["model"]["uri"] == "pvc://models/tiny"


def bundle_of(config: Path, namespace: str, file: Path) -> tuple[dict[str, str], str]:
    """Returns the files of a support bundle below its folder, and the command's output on stderr."""
    code, out, errors = heteroinfer(config, "report", "tiny", "-n", namespace, "-f", str(file))
    assert code == 0, errors
    assert out.startswith(f"wrote {file}. ")
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        files = {}
        for entry in archive.getmembers():
            content = archive.extractfile(entry)
            assert content is not None
            files[entry.name.partition("/")[2]] = content.read().decode()
    return files, errors


async def test_a_report_has_every_part_and_no_secret(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster, viewer: Path
) -> None:
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        await bring_up(server, namespace)
        env = [{"name": "HF_TOKEN", "value": "hidden-in-a-variable"}]
        annotation = {"kubectl.kubernetes.io/last-applied-configuration": "hidden-in-an-annotation"}
        body = {"metadata": {"annotations": annotation}, "spec": {"engine": {"env": env}}}
        try:
            await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), body)
        except ApiError:  # the schema refuses a token as a plain value
            await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"metadata": body["metadata"]})
        files, errors = bundle_of(control_plane.kubeconfig, namespace, tmp_path / "all.tar.gz")
        pod = pod_of(namespace, 1, 0)
        expected = {
            "resource.yaml", "status.txt", "events.yaml", "versions.json",
            f"manifests/pods/{pod}.yaml", "manifests/services/tiny.yaml",
        }  # fmt: skip
        assert expected <= files.keys(), sorted(files)
        assert any(name.startswith("plans/tiny-plan-") for name in files)
        assert any(name.startswith("manifests/networkpolicies/") for name in files)
        assert not any("secret" in name.lower() for name in files)
        assert not any("hidden-in" in text or "managedFields" in text for text in files.values())
        assert yaml.safe_load(files[f"manifests/pods/{pod}.yaml"])["kind"] == "Pod"
        assert "tiny" in files["events.yaml"]
        assert json.loads(files["versions.json"])["kubernetes"].startswith("v1.")
        assert f"{namespace}/tiny" in files["status.txt"]

        code, _, told = heteroinfer(viewer, "report", "tiny", "-f", str(tmp_path / "all.tar.gz"))
        assert code == 1
        assert "File exists" in told
        some, errors = bundle_of(viewer, namespace, tmp_path / "some.tar.gz")
        assert "left out: GET /api/v1/namespaces/" in errors
        assert "services" in some["missing.txt"]
        assert f"manifests/pods/{pod}.yaml" in some

        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)


async def test_top_and_logs_of_a_serving_and_a_failed_group(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster, viewer: Path
) -> None:
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        await bring_up(server, namespace)

        row = columns(control_plane, namespace)
        shown = {
            "NAME": "tiny",
            "READY": "True",
            "REASON": "Serving",
            "GROUPS": "1/1",
            "GPU": "0",
            "CPU": "2",
        }
        assert shown.items() <= row.items(), row
        assert {"STEPMS", "SLOWESTRANK", "AGE"} <= row.keys()
        assert {"MODEL", "RESTARTS", "PLAN"}.isdisjoint(row)
        wide = columns(control_plane, namespace, "-o", "wide")
        plan = (await status_of(server, namespace))["groups"][0]["planHash"]
        assert {"MODEL": "pvc://models/tiny", "RESTARTS": "0", "PLAN": plan}.items() <= wide.items(), wide

        table = reported(viewer, "top")
        assert f"{namespace}/tiny" in table
        assert "rank 0 front" in table
        assert "some values come from the stored status" in table
        assert "Ask for the right to get pods/proxy" in table
        value = json.loads(reported(viewer, "top", "tiny", "-n", namespace, "-o", "json"))
        (group,) = value["resources"][0]["groups"]
        assert [rank["pod"] for rank in group["ranks"]] == [pod_of(namespace, 1, 0), pod_of(namespace, 1, 1)]
        assert (group["live"], group["phase"], group["restarts"]) == (False, "Ready", 0)
        # A user with access to the proxy sees that the pod does not answer, because there is no kubelet.
        assert (
            pod_of(namespace, 1, 0)
            in json.loads(reported(control_plane.kubeconfig, "top", "-n", namespace, "-o", "json"))["note"]
        )

        status_of_a_serving_group(viewer)
        code, _, errors = heteroinfer(viewer, "top", "-A")
        assert code == 1
        assert "Use -n NAMESPACE with a namespace that you may read" in errors
        code, _, errors = heteroinfer(viewer, "top", "nothing")
        assert (code, errors) == (
            1,
            f"error: namespace {namespace}: has no HeteroInference nothing. List all: kubectl get hinf -A\n",
        )
        code, _, errors = heteroinfer(viewer, "logs", "tiny", "--group", "7")
        assert (code, errors) == (1, f"error: {namespace}/tiny has no group 7. Choose one of its groups: 0\n")

        failure = Failure(
            reason=FailureReason.RANK_EXITED, message="rank 1 was killed", pod=1, rank=1, exit_code=-9,
            last_log="the last line",
        )  # fmt: skip
        await end_pod(server, namespace, pod_of(namespace, 1, 1), exit_code=70, message=failure.to_json())
        await serve_epoch(server, namespace, 2)

        output = reported(viewer, "logs", "tiny").splitlines()
        assert output[0] == f"==> group 0 epoch {nth_epoch(namespace, 2)}: Ready"
        assert output[1].startswith(f"last failure: epoch {nth_epoch(namespace, 1)} ended at ")
        assert "RankExited, rank 1, exit code -9" in output[1]
        pods = [line for line in output if line.startswith("--> ")]
        assert [line.split(":")[0] for line in pods] == [
            f"--> {pod_of(namespace, 2, index)}" for index in (1, 0)
        ]
        assert [line for line in output if line.startswith("no log: ")], "the user lacks pods/log"
        output = reported(viewer, "logs", "tiny", "--previous").splitlines()
        assert "the last line" in output[1]
        assert "the pods and logs of these epochs no longer exist" in output[2]
        assert "rank 1 (-9)" in reported(viewer, "top", "tiny")
        assert "RankExited, rank 1, exit code -9" in reported(viewer, "status", "tiny", "-v")

        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)


async def test_logs_report_why_a_pod_has_ended(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster
) -> None:
    """The operator does not run, so the failed group's pods still exist."""
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        await bring_up(server, namespace)
        await process.stop()
    failure = Failure(
        reason=FailureReason.RANK_RAISED, message="no memory", pod=1, rank=1, exit_code=1, last_log="end"
    )
    await end_pod(server, namespace, pod_of(namespace, 1, 1), exit_code=70, message=failure.to_json())
    output = reported(control_plane.kubeconfig, "logs", "tiny", "-n", namespace).splitlines()
    first = output.index(next(line for line in output if line.startswith("--> ")))
    assert output[first].startswith(f"--> {pod_of(namespace, 1, 1)}: rank 1, role back")
    assert output[first].endswith("(ended the epoch)")
    assert output[first + 1] == (
        "ended with exit code 70 (Error): RankRaised: rank 1: no memory (exit code 1); its last log line: end"
    )
    async with operator(installed.kubeconfig, tmp_path / "log2", **settings) as process:
        await process.working()
        assert (await status_of(server, namespace))["groups"]
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)
