"""Runs a group of one pod many times in one process. Prints the resources that it held before and after.

This finds leaks that one life of a supervisor hides: descriptors, threads, zombies.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

from heteroinfer_contract.parent_death import adopt_orphans
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.integration.launch.groups import addresses, pipeline_plan
from vllm_heteroinfer.launch.child_process import child_pids
from vllm_heteroinfer.launch.pod_processes import Commands
from vllm_heteroinfer.launch.supervisor import Supervisor, SupervisorSettings

LIFE_TIMEOUT_S = 10.0


async def one_life(directory: Path, at: tuple[PodAddress, ...], *, failing: bool) -> int:
    """Runs a supervisor until its rank fails, or until SIGTERM. Returns the exit code."""
    launch = PodLaunch(group="default/churn/0", group_uid="uid", epoch=1, pod_index=0, addresses=at)
    settings = SupervisorSettings(
        base_env=os.environ,
        commands=Commands(
            rank=("/bin/sh", "-c", "exit 3") if failing else ("/bin/sleep", "600"), api_server=()
        ),
        termination_message_path=directory / "termination",
    )
    async with asyncio.timeout(LIFE_TIMEOUT_S):
        running = asyncio.ensure_future(Supervisor(pipeline_plan((1,)), launch, settings).run())
        if not failing:
            while not child_pids():
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), 15)
        return await running


def held() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": len(child_pids()),
    }


def main(lives: int, directory: Path) -> None:
    adopt_orphans()
    at = addresses(1)  # the same for all lives, like those of a restarted container
    codes = [asyncio.run(one_life(directory, at, failing=False))]
    before = held()
    codes += [asyncio.run(one_life(directory, at, failing=life % 4 == 0)) for life in range(lives)]
    print(json.dumps({"codes": sorted(set(codes)), "before": before, "after": held()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
