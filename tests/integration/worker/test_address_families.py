"""Tests groups of pods without IPv4, and of pods with both families: every port and pod is reached."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.conftest import Reference
from tests.integration.worker.groups import REPOSITORY, build_plan
from tests.integration.worker.pod_networks import API_ON_LOOPBACK

pytestmark = pytest.mark.timeout(600)

IPV6 = "fd00:5e1f::/48"
IPV4 = "10.213.0.0/16"


def serve(
    model: Path, reference: Reference, scratch: Path, *ranges: str, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns what clients saw of a group whose pods have only addresses of these ranges."""
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    (scratch / "plan").write_text(plan.to_json())
    (scratch / "reference").write_text(json.dumps(reference))
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    apart = ("unshare", *user, "--net", "--mount", "--propagation", "private", "--kill-child", "--fork")
    script = (sys.executable, "-m", "tests.integration.worker.pod_networks")
    files = [str(scratch / name) for name in ("plan", "", "reference")]
    command = [*apart, *script, *options, *files, *ranges]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=500, check=True)
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_a_group_serves_without_ipv4(model: Path, reference: Reference, tmp_path: Path) -> None:
    seen = serve(model, reference, tmp_path, IPV6)
    assert len(seen["answers"]) == 5
    assert all(seen["answers"].values()), seen
    assert seen["listening"]
    assert all(host.startswith("fd00:5e1f:") for host in seen["listening"]), seen


def test_a_group_serves_with_ipv4_and_ipv6(model: Path, reference: Reference, tmp_path: Path) -> None:
    seen = serve(model, reference, tmp_path, IPV4, IPV6)
    assert len(seen["answers"]) == 10
    assert all(seen["answers"].values()), seen


def test_a_group_whose_api_listens_on_loopback_only_is_never_ready(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """The API answers inside of the leader's pod, and every client of its Service would be refused."""
    seen = serve(model, reference, tmp_path, IPV4, options=(API_ON_LOOPBACK,))
    assert seen == {"readyz": [503], "ready": False, "api": False, "ended": []}
