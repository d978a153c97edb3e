"""Runs short scripts in the environment that a supervisor makes for a rank's process."""

import os
from pathlib import Path
from typing import Any

from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON, build_addresses
from vllm_heteroinfer.launch.environment import rank_environment
from vllm_heteroinfer.launch.host import observe_host

SEEN = """
import json, sys
from vllm.platforms import current_platform
print(json.dumps({"class": type(current_platform).__name__, "cpu": current_platform.is_cpu(),
    "cuda_alike": current_platform.is_cuda_alike(), "device": current_platform.device_type}))
"""
ON_CPU = {"class": "HeteroCpuPlatform", "cpu": True, "cuda_alike": False, "device": "cpu"}

CONFIG = """
import json, os
from vllm_heteroinfer.rank import entry
from vllm_heteroinfer.engine import arguments
config = arguments.build_config(*entry.read_assignment(os.environ))
"""


def environment(plan: Plan, rank: int, **variables: str) -> dict[str, str]:
    """Returns the environment of a rank's process, without the variable of its channel."""
    assignment = plan.ranks[rank]
    launch = PodLaunch(
        group="test/platform/0",
        group_uid="u",
        epoch=1,
        pod_index=assignment.pod,
        addresses=build_addresses(plan),
    )
    base = {**os.environ, **plan.to_env(), **launch.to_env(), "OMP_NUM_THREADS": "1", **variables}
    return {
        **rank_environment(plan, launch, assignment, base, observe_host(launch, "127.0.0.1")),
        **variables,
    }


def see(script: str, env: dict[str, str], directory: Path, *arguments: str) -> Any:
    """Runs a script, and returns its last line, parsed."""
    return run_script(WORKER_PYTHON, script, *arguments, env=env, folder=directory).answer()
