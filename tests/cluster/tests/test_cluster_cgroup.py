"""Tests that a cluster's cgroup can be removed while containers in it end."""

import contextlib
import os
import threading
from pathlib import Path

from tests.cluster import cluster_cgroup


def test_removes_a_cgroup_while_other_processes_change_its_children() -> None:
    name = f"heteroinfer-test-{os.getpid()}"
    cluster_cgroup.create(name)
    folder = cluster_cgroup.hierarchies()[0] / name
    ended = threading.Event()

    def come_and_go() -> None:
        """Creates and removes child cgroups, as container tools do for containers that end by themselves."""
        for number in range(3000):
            child = Path(folder, f"pod-{number % 7}", "container")
            with contextlib.suppress(OSError):
                child.parent.mkdir()
                child.mkdir()
            with contextlib.suppress(OSError):
                child.rmdir()
                child.parent.rmdir()
        ended.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        while not ended.is_set():
            cluster_cgroup.create(name)
            cluster_cgroup.remove(name)
    finally:
        thread.join()
        cluster_cgroup.remove(name)
    assert not any((root / name).exists() for root in cluster_cgroup.hierarchies())
