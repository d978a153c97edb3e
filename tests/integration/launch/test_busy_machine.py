"""A machine that has no CPU time to spare, or loads slowly, ends no group: who speaks late is not dead."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.launch.groups import TinyGroup, tiny_group, wait_until
from tests.integration.launch.held_commands import held_commands

LOWEST = 19
"""Of priorities: a 68th of the usual share (linux/kernel/sched/core.c::sched_prio_to_weight)."""
BUSY_S = 12.0
BURNERS_PER_CPU = 3
BURN = "import time\nend = time.monotonic() + float({})\nwhile time.monotonic() < end: pass"


@contextmanager
def busy_machine(seconds: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields processes that want every CPU for so long."""
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


def test_a_group_without_cpu_time_lives_on(tmp_path: Path) -> None:
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
def test_a_command_that_takes_seconds_to_load_ends_no_group(tmp_path: Path, slow: int) -> None:
    """Its supervisor beats and answers meanwhile, the leader's as well as a follower's."""
    with tiny_group(tmp_path) as group:
        with held_commands(group, slow, 3.0) as held:
            group.start()
            wait_until(lambda: bool(held.read_text()), 30, group.logs)
            assert group.pods[slow].is_alive(), group.logs()
            group.wait_ready()
        assert "PodLost" not in group.logs()
        assert "had no turn" not in group.logs()


def test_a_command_that_never_loads_is_named_by_its_rank(tmp_path: Path) -> None:
    with tiny_group(tmp_path, startup_timeout_s=3) as group, held_commands(group, 1, 600.0) as held:
        group.start()
        wait_until(lambda: bool(held.read_text()), 30, group.logs)
        codes = group.wait_exits(time.monotonic() + 20)
        assert group.marked() == []
    assert codes == [names.EXIT_STARTUP_TIMEOUT] * 2
    failure = group.pods[0].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.STARTUP_TIMEOUT, 1, 1), group.logs()


def test_a_supervisor_without_a_turn_says_so_afterwards(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1,)) as group:
        group.start()
        group.wait_ready()
        supervisor = group.pods[0].process
        supervisor.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        supervisor.send_signal(signal.SIGCONT)
        wait_until(lambda: "had no turn for" in group.logs(), 10, group.logs)
        assert supervisor.poll() is None
