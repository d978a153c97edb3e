"""Short scripts in processes of the worker's Python that have imported what vLLM imports of others.

vLLM itself is imported by each script, under its own environment. Not for an environment that must be
there when a process begins (LD_LIBRARY_PATH).
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.integration.forked_python import Ended, forks

OTHERS: Final = ("torch._dynamo", "torch._inductor.config", "transformers", "openai", "aiohttp", "fastapi")
"""Most of the time of `import vllm`; they know nothing of its platforms."""


def run_script(
    python: Path,
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Runs a script until it ends, or pytest's time limit comes.

    Args:
        python: of the worker.
        script: source; what it prints last is its answer.
        arguments: its `sys.argv[1:]`.
        env: added to this environment.
        folder: that it runs in.
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
