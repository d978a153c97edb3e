"""What the processes of a pod import before they part: no threads of OpenMP, no CUDA, no worker of a device.

Imports the standard library only; the rest inside functions, once the environment is right.
"""

import gc
import importlib
import os
import sys

from heteroinfer_contract.plan import Device, Plan, RankAssignment
from vllm_heteroinfer.pod.open_mp import first_level

SHARED = (
    "vllm_heteroinfer.engine.executor",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.engine.arg_utils",
)
"""What every process of a pod needs: ranks parse the API server's arguments too."""


def load(plan: Plan, rank: RankAssignment) -> BaseException | None:
    """Imports torch, vLLM and, on a CPU, the model's class; returns what went wrong, for the rank to report.

    The garbage collector is off meanwhile: it would look through a million objects again and again,
    none of which ever goes (2 to 3 s of 13 s, 2 cores, 2026-11-22).
    """
    gc.disable()
    try:
        for name in SHARED:
            importlib.import_module(name)
        if rank.device is Device.CPU:
            from vllm_heteroinfer.engine import model_class

            model_class.register(plan.engine.model)
    except Exception as error:  # the boundary of a rank's start: main() reports it
        return error
    finally:
        gc.freeze()
        gc.enable()
    return None


def settle(module: str) -> None:
    """Gives a fork its own name, and the threads of its own environment: OpenMP has read its parent's."""
    import torch
    from setproctitle import setproctitle

    setproctitle(f"{sys.executable} -m {module}")

    threads = first_level(os.environ)
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
