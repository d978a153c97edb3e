"""Imports for all processes of a pod, before they fork.

These imports must not start OpenMP threads, initialize CUDA or load a device's worker: a fork would not
survive that. At import this module needs only the standard library; functions import the rest.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path

from heteroinfer_contract.plan import Device, Plan, RankAssignment
from vllm_heteroinfer.pod.open_mp import omp_thread_count

SHARED_MODULES = (
    "vllm_heteroinfer.engine.executor",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.engine.arg_utils",
)
"""Modules that every process of a pod needs. Ranks need the CLI to parse arguments of vLLM's API server."""

FEED_FORWARD_MODULES = ("vllm_heteroinfer.rank.answering_rank",)
"""Modules that feed-forward ranks need, without vLLM."""


def import_before_fork(plan: Plan, rank: RankAssignment) -> BaseException | None:
    """Imports torch, vLLM and, on a CPU, the model's class. Returns the error to report, or None.

    A feed-forward rank imports torch without vLLM. That is enough, because all processes that are forked from
    it are feed-forward ranks, too.

    The garbage collector is off during the imports: it would scan a million objects repeatedly, and free none
    (2 to 3 s of 13 s, 2 cores, 2026-11-22). Later scans leave out the imported objects (`gc.freeze`).
    """
    gc.disable()
    try:
        for module in SHARED_MODULES if rank.feed_forward is None else FEED_FORWARD_MODULES:
            importlib.import_module(module)
        if rank.device is Device.CPU and rank.feed_forward is None:
            register_class(plan.engine.model)
    except Exception as error:  # boundary of a rank's start: main() reports the error
        return error
    finally:
        gc.freeze()
        gc.enable()
    return None


def register_class(model: str) -> None:
    """Loads the class of a model, and registers the class with vLLM in place of its name.

    If only the name is registered, vLLM inspects the class in a separate process, which imports torch and
    vLLM again. That takes 13 s of a CPU for each rank and for vLLM's API server if vLLM's cache folder is
    empty, as in each new pod. vLLM uses a separate process because the class could initialize CUDA; a CPU
    rank has no CUDA.
    Source: vllm/model_executor/models/registry.py::_LazyRegisteredModel.inspect_model_cls@v0.32.0.

    Skips architectures that vLLM does not support; vLLM itself reports them.

    Args:
        model: the model's folder.
    """
    from vllm import ModelRegistry

    for architecture in architectures(Path(model)):
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def architectures(model: Path) -> list[str]:
    """Returns the architectures in config.json. Returns none for an unreadable file, which vLLM reports."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return []
    names = config.get("architectures") if isinstance(config, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def adapt_forked_process(module: str) -> None:
    """Sets a forked process's title and its number of OpenMP threads.

    OpenMP read its environment in the parent process, before the fork. So torch must set the number.
    """
    import torch
    from setproctitle import setproctitle

    setproctitle(f"{sys.executable} -m {module}")

    threads = omp_thread_count(os.environ)
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
