"""What the processes of a pod import before they part: no threads of OpenMP, no CUDA, no worker of a device.

Imports the standard library only; the rest inside functions, once the environment is right.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path

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
            register_class(plan.engine.model)
    except Exception as error:  # the boundary of a rank's start: main() reports it
        return error
    finally:
        gc.freeze()
        gc.enable()
    return None


def register_class(model: str) -> None:
    """Registers the class of the model in this folder as itself, in place of by its name.

    What vLLM wants to know of a model's class it finds out in a process of its own, which imports torch
    and vLLM anew: 13 s of a CPU for each rank and the API server, wherever its cache folder is empty, as
    in each new pod. That process is there lest the class touches CUDA; a CPU rank has none to touch.
    Source: vllm/model_executor/models/registry.py::_LazyRegisteredModel.inspect_model_cls@v0.32.0.

    Architectures that vLLM does not have are left to it: it says so in words.
    """
    from vllm import ModelRegistry

    for architecture in architectures(Path(model)):
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def architectures(model: Path) -> list[str]:
    """Returns what the model's config.json names; nothing where it cannot be read, which vLLM will say."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return []
    names = config.get("architectures") if isinstance(config, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def settle(module: str) -> None:
    """Gives a fork its own name, and the threads of its own environment: OpenMP has read its parent's."""
    import torch
    from setproctitle import setproctitle

    setproctitle(f"{sys.executable} -m {module}")

    threads = first_level(os.environ)
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
