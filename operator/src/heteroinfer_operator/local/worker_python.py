"""Finds the Python that runs the workers. It has vLLM; the Python of this command may lack it."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from heteroinfer_operator.errors import HeteroInferError

ENV_WORKER_PYTHON: Final = "HETEROINFER_WORKER_PYTHON"
"""Name of an environment variable. Only the command line reads it, never a pod, so the contract lacks it."""
WORKER_ENVIRONMENT: Final = ".venv-worker"
"""`make setup` creates it beside the command's own environment."""
HELP: Final = f"the Python that has vLLM. Default: {ENV_WORKER_PYTHON}, else {WORKER_ENVIRONMENT}/bin/python"
"""Help of the option `--worker-python`."""


class WorkerPythonError(HeteroInferError):
    """No Python with vLLM was found. The message lists the searched places and the remedy."""

    reason = "NoWorkerPython"


def find_worker_python(option: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of the Python that runs workers.

    Searches in this order: the option `--worker-python`, HETEROINFER_WORKER_PYTHON, .venv-worker beside the
    environment of this command or in the working directory, and this Python itself if it has vLLM.

    Raises:
        WorkerPythonError: no Python was found, or the named file is not a program.
    """
    for source, named_path in (("--worker-python", option), (ENV_WORKER_PYTHON, env.get(ENV_WORKER_PYTHON))):
        if named_path:
            return _check_named_python(source, Path(named_path))
    paths = list(_default_paths())
    for path in paths:
        if os.access(path, os.X_OK):
            return path
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    searched = " nor ".join(str(path) for path in paths)
    raise WorkerPythonError(
        f"found no Python with vLLM: neither {searched} exists, and {sys.executable} has no vLLM. Run "
        "`make setup`, or name a Python with --worker-python"
    )


def _check_named_python(source: str, path: Path) -> Path:
    """Returns the absolute path of the Python that the user named; raises if it is no program."""
    path = path.absolute()  # not resolved: the python of an environment is a link to a file elsewhere
    if not os.access(path, os.X_OK) or path.is_dir():
        raise WorkerPythonError(
            f"{source}: must be the Python that has vLLM (got {path}, which is not a program). `make setup` "
            f"creates {WORKER_ENVIRONMENT}/bin/python"
        )
    return path


def _default_paths() -> Iterator[Path]:
    """Yields the paths at which `make setup` creates the worker's Python."""
    parents = (Path(sys.prefix).parent, Path.cwd())
    return (parent / WORKER_ENVIRONMENT / "bin" / "python" for parent in dict.fromkeys(parents))
