"""Tests `heteroinfer version` and `heteroinfer check` on a real API server, with the chart as a release."""

import json
from pathlib import Path

import yaml

from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.version import own_version
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.command_line import heteroinfer, reported
from tests.integration.operator.life import Install


async def test_version_compares_client_operator_and_crd(
    server: ApiServer, install: Install, control_plane: Cluster
) -> None:
    config = control_plane.kubeconfig
    assert reported(config, "version", "--client") == f"client    {own_version()}\n"
    release = install().release
    value = json.loads(heteroinfer(config, "version", "-o", "json")[1])
    assert value["client"] == own_version()
    (found,) = (each for each in value["operators"] if each["namespace"] == release)
    assert (found["name"], found["version"], found["ready"]) == (f"{release}-heteroinfer", "0.2.0", 0)
    assert value["crd"] == {"version": "unknown", "sameSchema": True}, (
        "the tests apply the CRD without the chart"
    )
    control_plane.kubectl(
        "label", "deployment", "-n", release, f"{release}-heteroinfer", "--overwrite",
        "app.kubernetes.io/version=0.1.0",
    )  # fmt: skip
    code, out, errors = heteroinfer(config, "version")
    assert code == 0
    assert f"operator  0.1.0  {release}/{release}-heteroinfer, 0 of 0 ready" in out
    assert (
        f"warning: operator {release}/{release}-heteroinfer has version 0.1.0, but this client has " in errors
    )


async def test_version_without_rights_names_them(
    server: ApiServer, install: Install, control_plane: Cluster
) -> None:
    code, out, errors = heteroinfer(install().kubeconfig, "version")
    assert (code, out) == (0, f"client    {own_version()}\n")
    assert "warning: operators: GET /apis/apps/v1/deployments: 403" in errors
    assert "Ask an administrator" in errors


async def test_check_finds_missing_parts_and_missing_rights(
    server: ApiServer, install: Install, control_plane: Cluster, node: str, tmp_path: Path
) -> None:
    config = control_plane.kubeconfig
    release = install("scope=Cluster").release
    code, out, errors = heteroinfer(config, "check", "-o", "yaml")
    assert (code, errors) == (1, ""), errors
    checks = {each["name"]: each for each in yaml.safe_load(out)["checks"]}
    assert checks["Kubernetes"]["state"] == "ok"
    assert (checks["CRD"]["state"], checks["rights"]["state"]) == ("ok", "ok"), checks
    assert checks["operator"]["state"] == "failed", "no controller creates its pods here"
    assert checks["GPU plugin"]["state"] == "note"
    assert checks["NetworkPolicy plugin"]["state"] == "warning"
    control_plane.kubectl("delete", "clusterrolebinding", f"{release}-heteroinfer")
    code, out, _ = heteroinfer(config, "check", "--wait", "3s")
    assert code == 1
    (line,) = (line for line in out.splitlines() if " rights " in line)
    assert line.startswith("FAILED")
    assert f"{release}/{release}-heteroinfer: list nodes in the cluster" in line
    assert out.endswith("not ready. Solve each problem in a line with FAILED\n")
    code, out, _ = heteroinfer(install().kubeconfig, "check")
    assert "unknown  operator" in out, "the operator's own account may not list Deployments"
