"""Tests supervisors on unusual machines: odd names of processes, a full disk, strangers, slow DNS."""

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from heteroinfer_contract import names
from heteroinfer_contract.pod_launch import PodLaunch
from tests.integration.launch.groups import REPOSITORY, addresses, pipeline_plan, tiny_group, wait_until
from vllm_heteroinfer.launch.child_process import ChildProcess, ProcessState, StopClock, child_pids
from vllm_heteroinfer.launch.cli import MAX_OPEN_FILES
from vllm_heteroinfer.rank import step_metrics

NAME_OF_8_LETTERS = "процессы"
"""16 bytes, of which the kernel keeps 15 (prctl(2), PR_SET_NAME). The result is no valid UTF-8."""
RENAMED = (
    "import ctypes, sys, time\nctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)\ntime.sleep(60)"
)


@contextmanager
def renamed_process() -> Iterator[int]:
    """Yields a process with this name."""
    process = subprocess.Popen([sys.executable, "-c", RENAMED, NAME_OF_8_LETTERS])
    try:
        expected = NAME_OF_8_LETTERS.encode()[:15]
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_bytes().strip() == expected, 20)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_process_name_cut_inside_a_letter_is_read() -> None:
    with renamed_process() as pid:
        assert pid in child_pids()
        assert StopClock().stopped_for_s(pid, 100.0) == 0.0


def test_a_rank_with_an_unusual_process_name_is_found() -> None:
    child = ChildProcess.start(
        label="rank 0", command=[sys.executable, "-c", RENAMED, NAME_OF_8_LETTERS], env=os.environ
    )
    try:
        expected = NAME_OF_8_LETTERS.encode()[:15]
        wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_bytes().strip() == expected, 20)
        assert child.observe().state is ProcessState.RUNNING
    finally:
        child.kill()
        wait_until(child.is_reaped, 20)
        wait_until(lambda: child.output.ended, 5)


ENDED_EARLY = """
import asyncio, os, sys, time
from heteroinfer_contract.parent_death import adopt_orphans
from heteroinfer_contract.pod_launch import PodLaunch
from tests.integration.launch.groups import addresses, pipeline_plan
from vllm_heteroinfer.launch.child_process import ChildProcess, child_pids
from vllm_heteroinfer.launch.host import observe_host
from vllm_heteroinfer.launch.pod_processes import Commands, PodProcesses

def start_late(**given):
    time.sleep(0.1)
    return start(**given)

async def life():
    pod = PodProcesses(pipeline_plan([1]), launch, lambda evidence: None, time.monotonic)
    commands = Commands(rank=("/bin/sleep", "600"), api_server=())
    starting = asyncio.ensure_future(pod.start(commands, os.environ, observe_host(launch, "127.0.0.1")))
    await asyncio.sleep(0.02)
    assert not child_pids()
    starting.cancel()
    return await pod.kill()

adopt_orphans()
launch = PodLaunch(group="g", group_uid="u", epoch=1, pod_index=0, addresses=addresses(1))
start, ChildProcess.start = ChildProcess.start, start_late
print(asyncio.run(life()), child_pids())
"""


def test_an_end_just_before_a_fork_leaves_no_process() -> None:
    command = [sys.executable, "-c", ENDED_EARLY]
    done = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert done.stdout == "True []\n"


def test_a_full_log_disk_delays_no_rank(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1,), do={0: "chat"}) as group:
        full = os.open("/dev/full", os.O_WRONLY)
        pod = group.start_pod(0, stdout=full)
        os.close(full)
        wait_until(pod.is_ready, 60, group.logs)
        # A pipe holds 64 KiB. A process writes more only while another process reads.
        wait_until(lambda: max(map(written_bytes, group.marked())) > 10 << 20, 30, group.logs)
        pod.process.terminate()
        assert group.wait_exits(time.monotonic() + 10) == [0]


def test_a_blocked_disk_does_not_delay_the_end(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        os.mkfifo(tmp_path / "0-0.termination")  # a writer waits for a reader, and there is none
        group.start()
        group.wait_ready()
        os.kill(group.rank_pid(1), signal.SIGKILL)
        assert group.wait_exits(time.monotonic() + 10) == [names.EXIT_PEER_FAILED, names.EXIT_RANK_FAILED]
        assert group.marked() == []
    assert "the termination message was not written" in group.logs()


def test_strangers_that_use_all_file_descriptors_do_not_end_the_group(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        leader, follower = group.pods
        for pod in group.pods:
            resource.prlimit(pod.process.pid, resource.RLIMIT_NOFILE, (64, 64))
        ports = (leader.address.health_port, leader.address.control_port, follower.address.health_port)
        with contextlib.ExitStack() as strangers:
            for _ in range(100):
                for port in ports:
                    with contextlib.suppress(OSError):  # no descriptor is free for it
                        strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.2))
            time.sleep(1)
            assert [pod.process.poll() for pod in group.pods] == [None, None], group.logs()
        group.wait_ready()
        os.kill(group.rank_pid(1), signal.SIGKILL)
        assert group.wait_exits(time.monotonic() + 10) == [names.EXIT_PEER_FAILED, names.EXIT_RANK_FAILED]
        assert group.marked() == []


def test_idle_connections_take_no_threads_of_a_rank() -> None:
    launch = PodLaunch(group="g", group_uid="u", epoch=1, pod_index=0, addresses=addresses(1))
    rank = pipeline_plan([1]).ranks[0]
    failures: list[BaseException] = []
    assert step_metrics.serve(CollectorRegistry(), launch, rank, healthy=lambda: True, failed=failures.append)
    port = launch.address.metrics_port
    before = threading.active_count()
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * step_metrics.MAX_CONNECTIONS):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.status == 200
        most = before + step_metrics.MAX_CONNECTIONS
        wait_until(lambda: threading.active_count() <= most, 4)
        wait_until(lambda: threading.active_count() <= before, 15)  # idle connections are ended
    assert failures == []


def test_a_supervisor_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1,)) as group:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        try:
            group.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        group.wait_ready()
        got, _ = resource.prlimit(group.pods[0].process.pid, resource.RLIMIT_NOFILE)
    assert got == min(hard, MAX_OPEN_FILES)


def test_a_slow_dns_name_does_not_delay_the_end(tmp_path: Path) -> None:
    slow = {"PYTHONPATH": str(Path(__file__).parent / "slow_names"), "SLOW_NAMES_SECONDS": "30"}
    with tiny_group(tmp_path, env=slow) as group:
        named = tuple(dataclasses.replace(a, host="localhost") for a in group.launches[0].addresses)
        group.launches = [dataclasses.replace(launch, addresses=named) for launch in group.launches]
        group.start()
        for pod in group.pods:
            wait_until(lambda: "asks for localhost" in pod.log.read_text(), 60, group.logs)  # noqa: B023 - called immediately
            pod.process.terminate()
        assert group.wait_exits(time.monotonic() + 10) == [0, 0]


def test_a_failure_that_cannot_be_written_is_in_the_log(tmp_path: Path) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        names.ENV_TERMINATION_MESSAGE_PATH: str(tmp_path / "no folder" / "message"),
    }
    worker = [sys.executable, "-m", "vllm_heteroinfer.launch.entry"]
    ended = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == names.EXIT_USAGE, ended
    assert f"{names.ENV_PLAN}: must be set" in ended.stdout
    assert "termination message: cannot write" in ended.stdout
    assert "Traceback" not in ended.stderr


def written_bytes(pid: int) -> int:
    """Returns the number of bytes that a process has written."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["wchar"])
