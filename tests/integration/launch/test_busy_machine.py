"""Tests that late reports end no group on a machine with busy CPUs or slow loads of files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import gt
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.launch.groups import Pod, TinyGroup, tiny_group, wait_until
from tests.integration.launch.held_commands import held_commands

LOWEST = 19
"""For the lowest priority: a 68th of the usual share (linux/kernel/sched/core.c::sched_prio_to_weight)."""
BUSY_S = 12.0
BURNERS_PER_CPU = 3
BURN = "import time\nend = time.monotonic() + float({})\nwhile time.monotonic() < end: pass"


@contextmanager
def busy_machine(seconds: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields processes that use every CPU for some seconds."""
    cpus = len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", BURN.format(seconds)]
    burners = [subprocess.Popen(command) for _ in range(BURNERS_PER_CPU * cpus)]
    try:
        yield burners
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def starve(group: TinyGroup) -> None:
    """Gives every thread of the group the lowest priority."""
    for pid in group.marked():
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), LOWEST)


def test_a_group_without_cpu_time_keeps_running(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={0: "compute", 1: "compute"}) as group:
        group.start()
        group.wait_ready()
        starve(group)
        with busy_machine(BUSY_S) as burners:
            for burner in burners:
                burner.wait()
        assert [pod.process.poll() for pod in group.pods] == [None, None], group.logs()
        assert all(word not in group.logs() for word in ("PodLost", "ends:")), group.logs()


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_command_does_not_end_a_group(tmp_path: Path, slow: int) -> None:
    """During the command, the supervisors of leader and follower still send heartbeats and answer."""
    with tiny_group(tmp_path) as group:
        with held_commands(group, slow, 3.0) as held:
            group.start()
            wait_until(lambda: bool(held.read_text()), 30, group.logs)
            assert group.pods[slow].is_alive(), group.logs()
            group.wait_ready()
        assert "PodLost" not in group.logs()
        assert "was not scheduled" not in group.logs()


def test_a_command_that_never_loads_is_reported_by_its_rank(tmp_path: Path) -> None:
    with tiny_group(tmp_path, startup_timeout_s=3) as group, held_commands(group, 1, 600.0) as held:
        group.start()
        wait_until(lambda: bool(held.read_text()), 30, group.logs)
        codes = group.wait_exits(time.monotonic() + 20)
        assert group.marked() == []
    assert codes == [names.EXIT_STARTUP_TIMEOUT] * 2
    failure = group.pods[0].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.STARTUP_TIMEOUT, 1, 1), group.logs()


def test_a_supervisor_logs_that_it_was_not_scheduled(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1,)) as group:
        group.start()
        group.wait_ready()
        supervisor = group.pods[0].process
        supervisor.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        supervisor.send_signal(signal.SIGCONT)
        wait_until(lambda: "was not scheduled for" in group.logs(), 10, group.logs)
        assert supervisor.poll() is None


def steps_of(group: TinyGroup) -> list[int]:
    return [rank.steps for rank in group.status().ranks]


def check_all_is_heard(group: TinyGroup) -> None:
    """Checks that the supervisor has every rank's messages, and that the API server learns of the drain."""
    before = steps_of(group)
    wait_until(lambda: all(map(gt, steps_of(group), before)), 5, group.logs)
    wait_until(lambda: all(pod.is_ready() for pod in group.pods), 5, group.logs)
    assert max(rank.heartbeat_age_s for rank in group.status().ranks) < 2.0
    asked = time.monotonic()
    for pod in group.pods:
        pod.process.terminate()
    assert group.wait_exits(asked + 5.0) == [names.EXIT_OK] * len(group.pods), group.logs()


def lives_on(group: TinyGroup, seconds: float) -> bool:
    """Returns whether every supervisor still runs after some seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any(pod.process.poll() is not None for pod in group.pods):
            return False
        time.sleep(0.02)
    return True


def stop_for(pod: Pod, seconds: float) -> None:
    pod.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    pod.process.send_signal(signal.SIGCONT)


def test_a_stopped_supervisor_reads_all_messages_after_it_resumes(tmp_path: Path) -> None:
    """In a group of one pod, no other supervisor can report it.

    It must not name an engine that has answered.
    """
    env = {names.ENV_STEP_TIMEOUT: "4", "TINY_API": "asks"}
    with tiny_group(tmp_path, (2,), do={0: "compute", 1: "compute"}, env=env) as group:
        group.start()
        group.wait_ready()
        stop_for(group.pods[0], 12.0)
        wait_until(lambda: "was not scheduled for" in group.logs(), 10, group.logs)
        assert lives_on(group, 6.0), group.logs()
        check_all_is_heard(group)


def test_a_late_supervisor_of_several_pods_reads_all_messages_after_it_resumes(tmp_path: Path) -> None:
    """The event loop of the supervisor runs later and later, as on a busier machine.

    So its leader waits longer.
    """
    with tiny_group(tmp_path, do={0: "compute", 1: "compute"}) as group:
        group.start()
        group.wait_ready()
        for seconds in (1.2, 3.5, 12.0):
            stop_for(group.pods[1], seconds)
            wait_until(lambda: all(pod.is_ready() for pod in group.pods), 5, group.logs)
            assert lives_on(group, 1.0), group.logs()
        check_all_is_heard(group)


def test_a_group_continues_after_a_pause_of_its_whole_pod(tmp_path: Path) -> None:
    """The pause is like that of a machine or a container.

    The supervisor may be the first process to continue.
    """
    env = {names.ENV_STEP_TIMEOUT: "3", "TINY_API": "asks"}
    with tiny_group(tmp_path, (2,), do={0: "compute", 1: "idle"}, env=env) as group:
        group.start()
        group.wait_ready()
        supervisor = group.pods[0].process
        others = [pid for pid in group.marked() if pid != supervisor.pid]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)  # the supervisor has seen that its processes are stopped
        stop_for(group.pods[0], 5.0)
        time.sleep(0.2)
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        assert lives_on(group, 4.0), group.logs()
        wait_until(group.pods[0].is_ready, 5, group.logs)
