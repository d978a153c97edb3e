"""Tests that tests/bench/leftovers.py finds each resource that a group has left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.leftovers import SHARED_MEMORY, Holdings, describe_left, observe, unheld_shared_memory

TIMEOUT_S = 20.0
CHILD = """
import mmap, os, socket, sys, time
folder, shared, path = sys.argv[1:]
if os.fork():
    time.sleep(600)
os.setsid()
os.chdir("/")
listener = socket.create_server(("127.0.0.1", 0))
bound = socket.socket(socket.AF_UNIX)
bound.bind(path)
with open(shared, "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
open(folder + "/up", "w").close()
time.sleep(600)
"""
"""A child that leaves its parent's session and folder, and holds one resource of each kind."""


@pytest.fixture
def shared() -> Iterator[Path]:
    path = SHARED_MEMORY / f"test-leftovers-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_reports_remaining_processes_and_files(tmp_path: Path, shared: Path) -> None:
    before = frozenset(SHARED_MEMORY.iterdir())
    folder, bound = tmp_path / "folder", tmp_path / "bound"
    folder.mkdir()
    command = [sys.executable, "-c", CHILD, str(folder), str(shared), str(bound)]
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    children: list[int] = []
    try:
        held = observe_up(process, folder)
        children = [child.pid for child in held.processes if child.pid != process.pid]
        process.kill()
        process.wait(TIMEOUT_S)
        (port,) = held.ports.values()
        process_text, *others = describe_left(held, folder, tmp_path / "scratch")
        assert process_text.startswith(f"process {children[0]} ")
        assert others == [f"listening port {port}", str(shared), str(bound)]
        assert shared not in unheld_shared_memory(before)
    finally:
        process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_until_left(held, folder, tmp_path / "scratch", [str(shared), str(bound)])
    wait_until_left(held, folder, tmp_path, [str(shared)])  # files in the pods' folder are deleted with it
    assert shared in unheld_shared_memory(before)


def observe_up(process: "subprocess.Popen[bytes]", folder: Path) -> Holdings:
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "up").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held = observe([process.pid], folder)
    assert len(held.processes) == 2
    return held


def wait_until_left(held: Holdings, folder: Path, scratch: Path, expected: list[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (left := describe_left(held, folder, scratch)) != expected:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
