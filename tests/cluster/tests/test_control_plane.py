"""Tests the test cluster's control plane: it answers, several run side by side, and nothing is left."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.cluster import processes
from tests.cluster.control_plane import Site, start_control_plane
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.pki import create_pki
from tests.cluster.running_cluster import Cluster, removed_on_failure, start_control_plane_only
from tests.cluster.state import State, all_states


def test_the_api_server_answers_with_its_version(control_plane: Cluster) -> None:
    version = json.loads(control_plane.kubectl("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"] == "v1.35.4"


def test_a_new_namespace_gets_its_service_account_from_the_controllers(control_plane: Cluster) -> None:
    control_plane.kubectl("create", "namespace", "made-by-a-test")
    control_plane.kubectl(
        "wait", "-n", "made-by-a-test", "--for=create", "serviceaccount/default", "--timeout=20s"
    )
    control_plane.kubectl("delete", "namespace", "made-by-a-test", "--timeout=30s")
    with pytest.raises(ClusterError, match="NotFound"):
        control_plane.kubectl("get", "namespace", "made-by-a-test")


def test_helm_reaches_the_cluster(control_plane: Cluster) -> None:
    assert control_plane.helm("list", "-A", "-o", "json").strip() == "[]"


def test_a_second_control_plane_runs_next_to_the_first_and_leaves_nothing(control_plane: Cluster) -> None:
    with start_control_plane_only() as second:
        assert second.state.number != control_plane.state.number
        assert len(processes.marked_pids(second.state.folder)) == 4
        second.kubectl("create", "namespace", "only-here")
        assert "only-here" not in control_plane.kubectl("get", "namespaces")
    assert processes.marked_pids(second.state.folder) == []
    assert not second.state.folder.exists()


def test_a_start_that_fails_half_way_names_the_cause_and_leaves_nothing() -> None:
    state = State.claim("control-plane", 32)
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as taken:  # without SO_REUSEPORT, so no other program can listen on this port
        port = taken.getsockname()[1]
        site = Site(
            address="127.0.0.1",
            api_port=port,
            etcd_port=0,
            etcd_peer_port=0,
            controller_manager_port=0,
            scheduler_port=0,
            service_range="10.96.0.0/16",
            node_grace_s=3600,
        )
        pki = create_pki(state.folder / "pki", site.address, "10.96.0.1", node=None)
        with (
            pytest.raises(ClusterError, match=f"{port}: bind: address already in use"),
            removed_on_failure(state),
        ):
            start_control_plane(state, site, pki)
    assert processes.marked_pids(state.folder) == []
    assert not state.folder.exists()


STARTER = """
import signal
from tests.cluster.running_cluster import start_control_plane_only
print(start_control_plane_only().state.folder, flush=True)
signal.pause()
"""


def test_the_next_start_removes_the_processes_of_a_killed_owner() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as owner:
        assert owner.stdout is not None
        left = next(
            state for line in owner.stdout for state in all_states() if str(state.folder) == line.strip()
        )
        assert len(processes.marked_pids(left.folder)) == 4
        os.kill(owner.pid, signal.SIGKILL)
    assert left.abandoned()
    orphans = processes.marked_pids(left.folder)
    assert len(orphans) == 4
    fresh = State.claim("control-plane", 32)
    try:
        assert not any(processes.ProcessIdentity.of(pid) for pid in orphans)
    finally:
        fresh.remove()
