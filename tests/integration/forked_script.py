"""Runs short scripts in processes of the worker's Python that have imported the packages that vLLM uses.

Each script imports vLLM itself, in its own environment. Do not use it for variables that must be set when a
process begins (LD_LIBRARY_PATH).
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.integration.forked_python import Ended, forks

OTHERS: Final = ("torch._dynamo", "torch._inductor.config", "transformers", "openai", "aiohttp", "fastapi")
"""Packages that take most of the time of `import vllm`. They do not depend on vLLM's platforms."""


def run_script(
    python: Path,
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Runs a script until it ends, or until pytest's time limit.

    Args:
        python: the worker's Python.
        script: source code. Its last output line is the answer.
        arguments: its `sys.argv[1:]`.
        env: variables that are added to this environment.
        folder: working directory.
    """
    request = json.dumps([script, list(arguments), str(folder) if folder else None])
    return forks(python, __name__, *OTHERS).run(__name__, request, env=env)


def main(request: str) -> None:
    """Runs the script of a request in this process."""
    script, arguments, folder = json.loads(request)
    if folder is not None:
        os.chdir(folder)
    sys.argv = ["script", *arguments]
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
