"""Short scripts in processes of the worker's Python that have imported what vLLM imports of others.

vLLM itself is imported by each script, under its own environment. Not for an environment that must be
there when a process begins (LD_LIBRARY_PATH).
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.integration.forked_python import forks

OTHERS: Final = ("torch._dynamo", "torch._inductor.config", "transformers", "openai", "aiohttp", "fastapi")
"""Most of the time of `import vllm`; they know nothing of its platforms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A script that has ended: what it printed, and whether with an error."""

    lines: list[str]
    errors: str

    def answer(self) -> Any:
        """Returns the last line, parsed."""
        assert self.lines, self.errors[-4000:]
        return json.loads(self.lines[-1])


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
    with tempfile.TemporaryDirectory() as scratch:
        errors = Path(scratch) / "stderr"
        process = forks(python, __name__, *OTHERS).start(__name__, request, errors=errors, env=env)
        try:
            return Ended(lines=process.stdout.read().splitlines(), errors=errors.read_text())
        finally:
            process.close()


def main(request: str) -> None:
    """Runs the script of a request in this process."""
    script, arguments, folder = json.loads(request)
    if folder is not None:
        os.chdir(folder)
    sys.argv = ["script", *arguments]
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
