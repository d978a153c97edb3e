"""Preloads the libraries that a CPU rank needs before it loads torch. Stdlib only.

The supervisor sets threads, devices and vLLM's variables. This module adds the settings that depend on the
installed packages.
"""

import importlib.util
import os
import sys
from pathlib import Path

from heteroinfer_contract.plan import Device, RankAssignment

_LD_PRELOAD = "LD_PRELOAD"
_ENV_PRELOADED = "HETEROINFER_PRELOADED"
"""Set when the process has restarted itself with preloaded libraries."""


def restart_with_preloaded_libraries(module: str, rank: RankAssignment) -> None:
    """Restarts this process by exec, with the libraries in LD_PRELOAD that a CPU rank needs.

    Call this before torch or vLLM is imported. The process id, open descriptors and parent stay the same.
    Returns without a restart on a GPU rank, or if the libraries are already preloaded.

    Args:
        module: module that the restarted process runs by `python -m`.
    """
    if rank.device is not Device.CPU or os.environ.pop(_ENV_PRELOADED, ""):
        return
    present = os.environ.get(_LD_PRELOAD, "")
    missing = [str(path) for path in libraries_to_preload() if path.name not in present]
    if not missing:
        return
    env = {**os.environ, _LD_PRELOAD: ":".join([*missing, present]).rstrip(":"), _ENV_PRELOADED: "1"}
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], env)  # noqa: S606 - no shell


def libraries_to_preload() -> list[Path]:
    """Returns the libraries that a CPU rank must preload: vLLM's allocator and torch's own OpenMP.

    vLLM sets LD_PRELOAD for processes that it starts, but the supervisor starts our ranks.
    Source: vllm/platforms/cpu.py::CpuPlatform.check_and_update_config@v0.32.0.
    """
    libraries: list[Path] = []
    vllm, torch = _package_dir("vllm"), _package_dir("torch")
    if vllm is not None:
        for pattern in ("libtcmalloc_minimal*.so*", "libtcmalloc.so*"):
            libraries += sorted((vllm / "libs").glob(pattern))[:1]
    if torch is not None:
        # A build of torch has its copy of OpenMP in one of these folders.
        in_separate_folder = sorted((torch.parent / "torch.libs").glob("libgomp*.so*"))
        in_package = sorted((torch / "lib").glob("libgomp*.so*"))
        libraries += (in_separate_folder + in_package)[:1]
    return libraries


def _package_dir(package: str) -> Path | None:
    """Returns the folder of a package; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
