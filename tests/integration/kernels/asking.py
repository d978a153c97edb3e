"""Asks a module of questions in the worker's own Python."""

import json
import os
import subprocess
from typing import Any

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

TIMEOUT_S = 280.0


def ask(module: str, name: str, question: Any = None, env: dict[str, str] | None = None) -> Any:
    """Returns the answer of `python -m module name`, the last line of its output."""
    done = subprocess.run(
        [str(WORKER_PYTHON), "-m", module, name],
        input=json.dumps(question or {}),
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
