"""Tests the port to this machine's processes, with small programs instead of the worker.

The port starts, observes and ends real processes. Only their program is not vLLM.
"""

import asyncio
import os
import stat
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    ApplyObject,
    ConflictError,
    CreateObject,
    DeleteObject,
    PatchStatus,
    PodView,
    ResourceObservation,
)
from heteroinfer_operator.local.adapter import LocalCluster, LocalClusterError, LocalOptions, LocalPodError
from heteroinfer_operator.local.process import PodFolder
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.running_up import Processes
from tests.unit.local.pods import pod

TIMEOUT_S = 20.0
RESOURCE = {"metadata": {"name": "x"}, "spec": {}}

EXITS = "import sys; print('to the log'); sys.exit(3)"
TELLS = f"import os; open(os.environ['{names.ENV_TERMINATION_MESSAGE_PATH}'], 'w').write('why' * 4000)"
SLEEPS = "import time; open('started', 'w'); time.sleep(600)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
LEAVES_CHILDREN = """
    import os, subprocess, sys
    sleep = [sys.executable, '-c', 'import time; time.sleep(600)']
    # In another session, without the pod's environment, elsewhere: one trace less each time.
    children = [
        subprocess.Popen(sleep),
        subprocess.Popen(sleep, start_new_session=True, env={}),
        subprocess.Popen(sleep, start_new_session=True, cwd='/'),
    ]
    open('children', 'w').write(' '.join(str(child.pid) for child in children))
    os.rename('children', 'started')
    if os.environ['STAY'] == 'yes':
        import time; time.sleep(600)
"""
SERVES = """
    import http.server, os, pathlib
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if pathlib.Path('ready').exists() else 503)
            self.end_headers()
    open('started', 'w')
    http.server.HTTPServer(('127.0.0.1', int(os.environ['PORT'])), Handler).serve_forever()
"""


def _worker(folder: Path, program: str) -> Path:
    """Writes an executable that replaces the worker's Python: called with `-m MODULE`, it runs `program`."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then exec {sys.executable} {script}; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


class Running:
    """A LocalCluster, and the folder of its only pod."""

    def __init__(self, cluster: LocalCluster, folder: Path, log_dir: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.log_dir = log_dir
        self.started = False

    async def observe(self) -> ResourceObservation:
        observation = await self.cluster.observe(self.cluster.key)
        assert observation is not None
        return observation

    async def run(self, *actions: Any) -> None:
        await self.cluster.run(await self.observe(), actions)

    async def wait(self, holds: Callable[[tuple[PodView, ...]], bool]) -> tuple[PodView, ...]:
        async with asyncio.timeout(TIMEOUT_S):
            while not holds(pods := (await self.observe()).pods):
                await asyncio.sleep(0.02)
        return pods

    async def wait_started(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not (self.folder / "started").exists():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def _cluster(
    tmp_path: Path,
    program: str,
    *,
    gpus: tuple[str, ...] = (),
    on_change: Callable[[], None] = lambda: None,
    **env: str,
) -> AsyncIterator[Running]:
    """Yields a cluster of processes on this machine. Its pods run `program`."""
    scratch, log_dir = tmp_path / "scratch", tmp_path / "logs"
    scratch.mkdir()
    log_dir.mkdir()
    options = LocalOptions(
        worker_python=_worker(tmp_path, program),
        scratch=scratch,
        log_dir=log_dir,
        node=NodeView(name="here", allocatable={"cpu": 2.0, "memory": 2.0**30}, labels=dict(IMAGE_PLATFORM)),
        gpus=gpus,
        env={**os.environ, **env},
    )
    cluster = LocalCluster(RESOURCE, options, on_change=on_change, on_event=lambda event: None)
    try:
        yield Running(cluster, scratch / "p1", log_dir)
    finally:
        await cluster.close()
        assert list(scratch.iterdir()) == []


def _ended(pods: tuple[PodView, ...]) -> bool:
    return all(pod.termination is not None for pod in pods)


def _gone(pods: tuple[PodView, ...]) -> bool:
    return not pods


async def test_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    async with _cluster(tmp_path, EXITS) as running:
        await running.run(CreateObject(manifest=pod()))
        (ended,) = await running.wait(_ended)
        assert ended.termination is not None
        assert (ended.phase, ended.termination.exit_code, ended.termination.reason) == ("Failed", 3, "Error")
        assert (running.log_dir / "p-0-1-0.log").read_text() == "to the log\n"


async def test_termination_messages_are_truncated_as_in_kubernetes(tmp_path: Path) -> None:
    async with _cluster(tmp_path, TELLS) as running:
        await running.run(CreateObject(manifest=pod()))
        (ended,) = await running.wait(_ended)
        assert ended.termination is not None
        assert (ended.phase, ended.termination.exit_code) == ("Succeeded", 0)
        assert ended.termination.message == ("why" * 4000)[:4096]


async def test_a_pod_ends_even_if_its_termination_message_cannot_be_read(tmp_path: Path) -> None:
    program = f"import os, sys; os.mkdir(os.environ['{names.ENV_TERMINATION_MESSAGE_PATH}']); sys.exit(3)"
    async with _cluster(tmp_path, program) as running:
        await running.run(CreateObject(manifest=pod()))
        (ended,) = await running.wait(_ended)
        assert ended.termination is not None
        assert ended.termination.exit_code == 3
        assert ended.termination.message == "the termination message cannot be read (Is a directory)"


async def test_a_task_that_raises_ends_the_run_with_its_pod_and_cause(tmp_path: Path) -> None:
    broken = [RuntimeError("a defect")]

    def changed() -> None:
        if running.started and broken:
            raise broken.pop()

    async with _cluster(tmp_path, SLEEPS, on_change=changed) as running:
        await running.run(CreateObject(manifest=pod()))
        await running.wait_started()
        running.started = True
        (pid,) = _of_folder(running.folder).living()
        os.kill(pid, 9)
        with pytest.raises(LocalClusterError, match=r"pod p-0-1-0: .*RuntimeError\('a defect'\)"):
            await running.wait(lambda pods: False)
        running.cluster._failure = None  # `close` also raises it


async def test_a_pod_that_does_not_start_releases_its_gpus(tmp_path: Path) -> None:
    gpu = pod(resources={"limits": {"nvidia.com/gpu": "1"}})
    async with _cluster(tmp_path, SLEEPS, gpus=("0",)) as running:
        python = tmp_path / "python"
        python.chmod(0)
        with pytest.raises(LocalPodError, match="cannot be started"):
            await running.run(CreateObject(manifest=gpu))
        python.chmod(0o755)
        running.folder = running.folder.with_name("p2")
        await running.run(CreateObject(manifest=gpu))
        await running.wait_started()


async def test_killed_pod_has_the_exit_code_of_its_signal(tmp_path: Path) -> None:
    async with _cluster(tmp_path, SLEEPS) as running:
        await running.run(CreateObject(manifest=pod()))
        await running.wait_started()
        (pid,) = _of_folder(running.folder).living()
        os.kill(pid, 9)
        (ended,) = await running.wait(_ended)
        assert ended.termination is not None
        assert ended.termination.exit_code == 137


@pytest.mark.parametrize("program", [SLEEPS, IGNORES_SIGTERM])
async def test_deleted_pod_is_gone_after_its_grace(tmp_path: Path, program: str) -> None:
    async with _cluster(tmp_path, program) as running:
        await running.run(CreateObject(manifest=pod()))
        await running.wait_started()
        (created,) = (await running.observe()).pods
        await running.run(DeleteObject(kind="Pod", name=created.name, uid="of another", grace_s=0))
        await running.run(DeleteObject(kind="Pod", name=created.name, uid=created.uid, grace_s=1))
        (deleting,) = (await running.observe()).pods
        assert (deleting.deleting, deleting.termination) == (True, None)
        processes = _of_folder(running.folder)
        await running.wait(_gone)
        assert processes.living() == []


@pytest.mark.parametrize("stay", ["yes", "no"])
async def test_no_process_outlives_its_pod(tmp_path: Path, stay: str) -> None:
    async with _cluster(tmp_path, LEAVES_CHILDREN, STAY=stay) as running:
        await running.run(CreateObject(manifest=pod()))
        await running.wait_started()
        (created,) = (await running.observe()).pods
        pids = [int(pid) for pid in (running.folder / "started").read_text().split()]
        assert len(pids) == 3
        children = Processes.of(pids)  # some may have ended already, if the program does not stay
        await running.run(DeleteObject(kind="Pod", name=created.name, uid=created.uid, grace_s=1))
        await running.wait(_gone)
        assert children.living() == []


def _of_folder(folder: Path) -> Processes:
    """Returns the processes that the program has started, whatever their parent is now."""
    mark = str(PodFolder(path=folder, log=folder).termination_message).encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return Processes.of(pid for pid in pids if mark in _environment(pid) or _cwd(pid) == folder)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _cwd(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None


async def test_readiness_follows_the_probe(tmp_path: Path, port: str) -> None:
    probe = {"httpGet": {"path": names.PATH_READYZ, "port": int(port)}}
    async with _cluster(tmp_path, SERVES, PORT=port) as running:
        await running.run(CreateObject(manifest=pod(readinessProbe=probe)))
        await running.wait_started()
        assert not (await running.observe()).pods[0].ready
        (running.folder / "ready").touch()
        await running.wait(lambda pods: pods[0].ready)
        (running.folder / "ready").unlink()
        await running.wait(lambda pods: not pods[0].ready)


async def test_objects_are_stored_by_name_and_keep_their_uid(tmp_path: Path) -> None:
    service = {"kind": "Service", "metadata": {"name": "s"}, "spec": {"a": 1}}
    async with _cluster(tmp_path, SLEEPS) as running:
        await running.run(CreateObject(manifest=service))
        with pytest.raises(ConflictError, match="Service s exists already"):
            await running.run(CreateObject(manifest=service))
        (stored,) = (await running.observe()).objects
        await running.run(ApplyObject(manifest={**service, "spec": {"a": 2}}))
        (applied,) = (await running.observe()).objects
        assert applied["metadata"]["uid"] == stored["metadata"]["uid"]
        assert applied["spec"] == {"a": 2}
        await running.run(DeleteObject(kind="Service", name="s", uid="of another"))
        assert len((await running.observe()).objects) == 1
        await running.run(DeleteObject(kind="Service", name="s", uid=stored["metadata"]["uid"]))
        assert (await running.observe()).objects == ()


async def test_status_of_an_old_observation_is_not_written(tmp_path: Path) -> None:
    async with _cluster(tmp_path, SLEEPS) as running:
        old = (await running.observe()).resource.resource_version
        await running.run(PatchStatus(status={"a": 1}, resource_version=old))
        with pytest.raises(ConflictError):
            await running.run(PatchStatus(status={"a": 2}, resource_version=old))
        assert running.cluster.status == {"a": 1}


async def test_deleted_resource_is_gone_once_its_last_pod_is(tmp_path: Path) -> None:
    async with _cluster(tmp_path, SLEEPS) as running:
        await running.run(CreateObject(manifest=pod()))
        await running.wait_started()
        running.cluster.request_deletion()
        observation = await running.observe()
        (living,) = observation.pods
        assert (observation.resource.deleting, running.cluster.deleted.is_set()) == (True, False)
        await running.run(DeleteObject(kind="Pod", name=living.name, uid=living.uid, grace_s=0))
        async with asyncio.timeout(TIMEOUT_S):
            while await running.cluster.observe(running.cluster.key) is not None:
                await asyncio.sleep(0.02)
        assert running.cluster.deleted.is_set()
        assert await running.cluster.observe(running.cluster.key) is None


async def test_each_pod_uses_its_own_gpus_and_releases_them(tmp_path: Path) -> None:
    def asks(name: str, gpus: int) -> dict[str, Any]:
        manifest = pod(resources={"limits": {"nvidia.com/gpu": str(gpus)}})
        return {**manifest, "metadata": {"name": name}}

    shows = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    async with _cluster(tmp_path, shows, gpus=("1", "3")) as running:
        for name, gpus in (("one", 1), ("two", 2), ("none", 0)):
            await running.run(CreateObject(manifest=asks(name, gpus)))
            await running.wait(_ended)
        seen = {log.stem: log.read_text().strip() for log in running.log_dir.iterdir()}
        assert seen == {"one": "1", "two": "1,3", "none": "-1"}


async def test_pod_that_asks_for_more_gpus_than_are_free_is_reported(tmp_path: Path) -> None:
    manifest = pod(resources={"limits": {"nvidia.com/gpu": "1"}})
    async with _cluster(tmp_path, SLEEPS) as running:
        with pytest.raises(LocalPodError, match="needs 1 GPUs, but 0 are free"):
            await running.run(CreateObject(manifest=manifest))
