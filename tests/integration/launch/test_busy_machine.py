"""A machine that has no CPU time to spare ends no group: who speaks late is not dead."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.launch.groups import TinyGroup, tiny_group

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
