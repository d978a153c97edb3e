"""Asks a module's questions in the worker's own Python."""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from tests.integration.forked_python import forks
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

TIMEOUT_S = 900.0

Asking = Callable[..., Any]
"""A function with the name of a question and its value, which returns the answer."""


def ask(module: str, *arguments: str, question: Any = None, env: dict[str, str] | None = None) -> Any:
    """Runs `python -m module arguments`, and returns the last line of its output as the answer."""
    done = subprocess.run(
        [str(WORKER_PYTHON), "-m", module, *arguments],
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


def ask_forked(module: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """Runs `module.main(arguments)` in a forked process, which has imported torch already.

    Returns its answer.
    """
    return forks(WORKER_PYTHON, module).run(module, json.dumps(arguments), env=env).answer()


@contextlib.contextmanager
def asking(module: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Asking]:
    """Yields a function that asks one process of `python -m module arguments` many questions."""
    command = [str(WORKER_PYTHON), "-m", module, *arguments]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **(env or {})},
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        sink, source = process.stdin, process.stdout

        def ask_it(name: str, **question: Any) -> Any:
            try:
                print(json.dumps([name, question]), file=sink, flush=True)
                answer = source.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                code = process.wait(TIMEOUT_S)
                log.seek(0)
                raise AssertionError(f"{module} ended with {code} when asked {name}:\n{log.read()[-4000:]}")
            return json.loads(answer)

        try:
            yield ask_it
        finally:
            process.kill()
