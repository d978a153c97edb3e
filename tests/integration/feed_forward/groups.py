"""Starts feed-forward groups as real processes: their models, expected tokens, freezes and signals."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from heteroinfer_contract.failure import Failure
from heteroinfer_contract.plan import Device
from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.deaths import check_cut_off, keep_asking, session_pids, wait_steps
from tests.integration.worker.groups import (
    REPOSITORY,
    WORKER_PYTHON,
    Group,
    start_group,
)

NAMED_WITHIN_S = 2.0
ENDED_WITHIN_S = 15.0
LOAD_TOKENS = 400
TURN_S = 0.05
"""Seconds between two processes when a freeze stops or resumes all processes of a pod."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run_models(*arguments: str) -> str:
    """Runs tests.integration.feed_forward.tiny_models in the worker's Python, and returns its last line."""
    command = [str(WORKER_PYTHON), "-m", "tests.integration.feed_forward.tiny_models", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def make_model(
    architecture: str, folder: Path, dtype: str = "float32", spread: float = tiny_models.SPREAD
) -> Path:
    """Returns the folder of a tiny model. Makes the model if it does not exist."""
    options = ("--dtype", dtype, "--spread", str(spread))
    return Path(run_models(architecture, str(folder / f"{architecture}-{dtype}"), *options))


def reference(model: Path, prompts: Sequence[Sequence[int]] = tiny_models.PROMPTS) -> list[list[int]]:
    """Returns the greedy tokens of transformers after each prompt."""
    tokens: list[list[int]] = json.loads(run_models("reference", str(model), json.dumps(prompts)))
    return tokens


@contextlib.contextmanager
def serving(
    architecture: str,
    model: Path,
    logs: Path,
    *,
    shares: Sequence[int] = (1,),
    pods: Sequence[int] = (),
    tensor: int = 1,
    stages: Sequence[int] = (),
    remote: Sequence[int] = (),
    by_experts: bool = False,
    device: Device = Device.CPU,
    env: dict[str, str] | None = None,
    ready: bool = True,
    **engine: Any,
) -> Iterator[Group]:
    """Starts a group with feed-forward ranks, and yields it when it is ready."""
    all_layers = range(tiny_models.first_remote_layer(architecture), tiny_models.LAYERS)
    plan = feed_forward_plan(
        model,
        num_layers=tiny_models.LAYERS,
        remote=remote or all_layers,
        shares=shares,
        pods=pods,
        tensor=tensor,
        stages=stages,
        by_experts=by_experts,
        device=device,
        **engine,
    )
    with start_group(plan, logs, env={**ONE_THREAD, **(env or {})}) as group:
        if ready:
            group.wait_ready()
        yield group


def answers(group: Group, tokens: int = tiny_models.ANSWER_TOKENS) -> list[list[int]]:
    """Returns the group's greedy tokens after each prompt. All prompts are sent at the same time."""
    with ThreadPoolExecutor(len(tiny_models.PROMPTS)) as pool:
        return list(pool.map(lambda prompt: group.complete(prompt, tokens), tiny_models.PROMPTS))


def freeze(group: Group, seconds: float) -> None:
    """Stops every process of a group's pods for some seconds, like a frozen cgroup or a suspended machine.

    The asking rank stops after its feed-forward ranks and resumes before them. So it waits for them when it
    stops, and still when it resumes. The supervisors stop first and resume last.
    """
    supervisors = [child.process.pid for child in group.children]
    lanes = [group.rank_pid(rank.rank) for rank in group.plan.ranks if rank.feed_forward is not None]
    others = [pid for pid in session_pids(group) if pid not in lanes]
    order = (supervisors, lanes, others)
    for pids in order:
        _send(pids, signal.SIGSTOP)
        time.sleep(TURN_S)
    try:
        time.sleep(seconds)
    finally:
        for pids in reversed(order):
            _send(pids, signal.SIGCONT)
            time.sleep(TURN_S)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def answers_over_freeze(group: Group, seconds: float) -> list[list[int]]:
    """Freezes the group while it answers all prompts, and returns its greedy tokens after each prompt."""
    with ThreadPoolExecutor(len(tiny_models.PROMPTS)) as pool:
        before = group.status().ranks[0].steps
        clients = [pool.submit(group.complete, prompt, LOAD_TOKENS) for prompt in tiny_models.PROMPTS]
        wait_steps(group, before + 5)
        freeze(group, seconds)
        return [client.result()[: tiny_models.ANSWER_TOKENS] for client in clients]


def check_signal(group: Group, rank: int, number: signal.Signals) -> Failure:
    """Sends a signal to a rank while the group decodes, and checks the end as `check_end`."""
    return check_end(group, rank, lambda: os.kill(group.rank_pid(rank), number))


def check_end(group: Group, rank: int, hurt: Callable[[], object]) -> Failure:
    """Damages a rank while the group decodes. The group must end, and name the rank in time.

    Returns:
        The failure that the pod left.
    """
    with ThreadPoolExecutor(2) as pool:
        before = group.status().ranks[0].steps
        clients = [pool.submit(keep_asking, group, prompt) for prompt in tiny_models.PROMPTS]
        wait_steps(group, before + 5)
        hurt_at = time.time()
        hurt()
        group.children[0].process.wait(ENDED_WITHIN_S)
        check_cut_off(clients)
    failure = group.failure(0)
    assert failure is not None, group.logs()
    assert failure.rank == rank, failure
    assert failure.time - hurt_at < NAMED_WITHIN_S, failure
    return failure
