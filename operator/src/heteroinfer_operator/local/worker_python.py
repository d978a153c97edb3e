"""Which Python runs the workers: the one that has vLLM, which this one need not have."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from heteroinfer_operator.errors import HeteroInferError

ENV_WORKER_PYTHON: Final = "HETEROINFER_WORKER_PYTHON"
"""Of the command line only: never in a pod, so not in the contract."""
WORKER_ENVIRONMENT: Final = ".venv-worker"
"""Made by `make setup` beside the command's own environment."""
HELP: Final = f"the Python that has vLLM; default: {ENV_WORKER_PYTHON}, or {WORKER_ENVIRONMENT}/bin/python"
"""Of the option `--worker-python`."""


class WorkerPythonError(HeteroInferError):
    """No Python with vLLM was found; the message says where was looked, and what to do."""

    reason = "NoWorkerPython"


def find_worker_python(option: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """Returns the Python that runs workers.

    Looked for in this order: the option `--worker-python`, HETEROINFER_WORKER_PYTHON,
    .venv-worker beside the environment of this command or in the working directory, and
    this Python itself if it has vLLM.

    Raises:
        WorkerPythonError: none of them is there, or the one named is no program.
    """
    for source, named in (("--worker-python", option), (ENV_WORKER_PYTHON, env.get(ENV_WORKER_PYTHON))):
        if named:
            return _named(source, Path(named))
    looked_at = list(_beside())
    for path in looked_at:
        if os.access(path, os.X_OK):
            return path
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    searched = " nor ".join(str(path) for path in looked_at)
    raise WorkerPythonError(
        f"found no Python with vLLM: neither {searched}, and {sys.executable} has no vLLM; run `make setup`, "
        "or name one with --worker-python"
    )


def _named(source: str, path: Path) -> Path:
    path = path.absolute()  # not resolved: an environment's python is a link out of it
    if not os.access(path, os.X_OK) or path.is_dir():
        raise WorkerPythonError(
            f"{source}: {path} is no program; expected the Python that has vLLM, such as "
            f"{WORKER_ENVIRONMENT}/bin/python, which `make setup` makes"
        )
    return path


def _beside() -> Iterator[Path]:
    parents = (Path(sys.prefix).parent, Path.cwd())
    return (parent / WORKER_ENVIRONMENT / "bin" / "python" for parent in dict.fromkeys(parents))
