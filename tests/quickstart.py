"""Runs `make quickstart`: from a file to served tokens on this machine.

The program runs the same commands as a user. It ends with 0 only if every token equals the token of
transformers in float32, and if no process is left.
"""

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.table import Table

from heteroinfer_contract import metric_names
from tests.models import PROMPTS, cache_dir
from tests.ports import free_port
from tests.running_up import REPOSITORY, RunningUp, UpError

EXAMPLE = Path("examples/quickstart.yaml")
WORKER_PYTHON = REPOSITORY / ".venv-worker/bin/python"
DEFAULT_PORT = 8000
MAKE_TIMEOUT_S = 300.0
GONE_TIMEOUT_S = 2.0
_STEPS = 6


class QuickstartError(Exception):
    """A step of the quickstart has failed. The text is the reason."""


class Progress:
    """Prints numbered steps with the time since the start."""

    def __init__(self) -> None:
        self._start = monotonic()
        self._step = 0

    def step(self, text: str) -> None:
        self._step += 1
        print(f"[{self._step}/{_STEPS} {monotonic() - self._start:4.0f} s] {text}", flush=True)

    def detail(self, text: str) -> None:
        print(f"      {text}", flush=True)


def main() -> int:
    """Runs the quickstart, and returns the exit code."""
    progress = Progress()
    try:
        model_dir, references = _make_model(progress)
        _serve_and_check(progress, model_dir, references)
    except (QuickstartError, UpError) as error:
        print(f"quickstart failed: {error}", file=sys.stderr)
        return 1
    return 0


def _make_model(progress: Progress) -> tuple[Path, dict[str, Any]]:
    model_dir = cache_dir() / "quickstart"
    progress.step(f"a small Llama-shaped model with random weights: {model_dir}")
    _tests_models(str(model_dir))
    progress.step("its greedy tokens by Hugging Face transformers in float32, kept for the next time")
    references: dict[str, Any] = json.loads(_tests_models("reference", str(model_dir)))
    return model_dir, references


def _tests_models(*arguments: str) -> str:
    done = subprocess.run(
        [WORKER_PYTHON, "-m", "tests.models", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=MAKE_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise QuickstartError(f"python -m tests.models {' '.join(arguments)}:\n{done.stderr[-3000:]}")
    return done.stdout


def _serve_and_check(progress: Progress, model_dir: Path, references: dict[str, Any]) -> None:
    arguments = ["-f", str(EXAMPLE), "--model-dir", str(model_dir), *_port_option()]
    progress.step(f"heteroinfer up {' '.join(arguments)}")
    with RunningUp(arguments, on_line=progress.detail) as up:
        url = up.wait_ready()
        progress.step("a completion over HTTP")
        prompt = PROMPTS[0]
        answer = up.complete(url, prompt)
        progress.detail(f"{prompt!r} -> {answer['text']!r}")
        progress.step(f"greedy tokens of {len(PROMPTS)} prompts at the same time against transformers")
        _check_tokens(up, url, references, progress)
        _print_ranks(up)
        progress.step("Ctrl-C")
        _stop(up)
    progress.detail("stopped, no process left")


def _port_option() -> list[str]:
    """Returns nothing if the usual port is free, or the option for another port."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            return ["--port", str(free_port())]
        return []


def _check_tokens(up: RunningUp, url: str, references: dict[str, Any], progress: Progress) -> None:
    """Sends all prompts at the same time, and compares the tokens with those of transformers."""

    def ask(prompt: str) -> list[int]:
        wanted = references[prompt]
        choice = up.complete(url, wanted["prompt_token_ids"], len(wanted["token_ids"]))
        token_ids: list[int] = choice["token_ids"]
        return token_ids

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = dict(zip(PROMPTS, pool.map(ask, PROMPTS), strict=True))
    wrong = [prompt for prompt, got in answers.items() if got != references[prompt]["token_ids"]]
    for prompt in wrong:
        print(f"{prompt!r}: got {answers[prompt]}, expected {references[prompt]['token_ids']}")
    if wrong:
        raise QuickstartError(f"{len(wrong)} of {len(PROMPTS)} answers differ from transformers'")
    tokens = sum(len(got) for got in answers.values())
    progress.detail(f"{len(PROMPTS)} of {len(PROMPTS)} equal, {tokens} tokens")


def _print_ranks(up: RunningUp) -> None:
    """Prints the ranks: moving averages from the leader's report, and totals from each rank's own metrics."""
    table = Table(box=None)
    for heading in ("rank", "role", "device", "layers", "steps"):
        table.add_column(heading)
    for heading in ("step ms", "compute ms", "wait ms", "transfer ms", "compute s in all", "wait s in all"):
        table.add_column(heading, justify="right")
    seats, metrics = up.seats(), up.metrics()
    for rank in up.group_report().ranks:
        text = metrics[rank.rank]
        totals = (_sum(text, name) for name in (metric_names.COMPUTE_SECONDS, metric_names.WAIT_SECONDS))
        times = (rank.step_s, rank.compute_s, rank.wait_s, rank.transfer_s)
        table.add_row(
            str(rank.rank),
            *seats[rank.rank],
            str(rank.steps),
            *(f"{1e3 * seconds:.2f}" for seconds in times),
            *(f"{seconds:.2f}" for seconds in totals),
        )
    Console(width=120).print(table)


def _sum(text: str, histogram: str) -> float:
    """Returns the seconds in a histogram, summed over all labels."""
    found = re.findall(rf"^{re.escape(histogram)}_sum\S* (\S+)$", text, re.MULTILINE)
    if not found:
        raise QuickstartError(f"/metrics has no {histogram}")
    return sum(map(float, found))


def _stop(up: RunningUp) -> None:
    started = up.processes()
    code = up.stop()
    if code != 0:
        raise QuickstartError(f"heteroinfer up exited with {code} after Ctrl-C, expected 0")
    if left := started.wait_gone(GONE_TIMEOUT_S):
        raise QuickstartError(f"processes {left} still run after `heteroinfer up` has ended")


if __name__ == "__main__":
    sys.exit(main())
