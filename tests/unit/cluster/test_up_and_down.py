"""`python -m tests.cluster up` and `down`, with clusters that run already."""

import os
from pathlib import Path

import pytest

from tests.cluster import cli, state
from tests.cluster.state import State


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Returns a node that belongs to this process, without any program."""
    monkeypatch.setattr(state, "state_root", lambda: tmp_path)
    return State.claim("node", limit=1)


def test_a_second_up_prints_the_lines_of_the_running_cluster(
    node: State, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cli, "ensure_tools")  # starts nothing if the test fails
    node.detach()
    assert cli.main(["up", "node"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "node-0 runs already. `make cluster-down` stops it. Its lines:\n"
    kubeconfig, path = printed.out.splitlines()
    assert kubeconfig == f"export KUBECONFIG={node.kubeconfig}"
    assert path.startswith("export PATH=")


def test_down_leaves_the_cluster_of_a_running_test_alone(
    node: State, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["down"]) == 0
    assert (
        capsys.readouterr().out
        == f"node-0 belongs to a running test (pid {os.getpid()}), so it keeps running\n"
    )
    assert node.folder.exists()
