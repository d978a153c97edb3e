"""Kills a rank of a real group: the whole group must end, and every pod must name the rank.

Tests of several groups end with it.
"""

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from tests.integration.worker.conftest import Reference
from tests.integration.worker.groups import Group, fetch

NAMED_WITHIN_S = 2.0
ENDED_WITHIN_S = 10.0
"""The supervisors wait until the kernel has freed the memory of the processes that they killed."""
MAX_TOKENS = 400


def check_death(group: Group, rank: int, requests: "Sequence[Future[NoReturn]]") -> None:
    """Kills a rank. Every pod must name it and end, and running requests must end."""
    pids, of_rank = session_pids(group), group.plan.ranks[rank].pod
    killed_at = time.time()
    os.kill(group.rank_pid(rank), signal.SIGKILL)
    wait_not_ready(group, killed_at)
    for pod, child in enumerate(group.children):
        code = child.process.wait(ENDED_WITHIN_S)
        failure = group.failure(pod)
        assert failure is not None, group.logs()
        check_failure(failure, rank, killed_at)
        assert code == (names.EXIT_RANK_FAILED if pod == of_rank else names.EXIT_PEER_FAILED)
    check_cut_off(requests)
    # A process whose parent died earlier is reaped by the machine's init, a moment later.
    deadline = time.monotonic() + NAMED_WITHIN_S
    while left := living(pids):
        assert time.monotonic() < deadline, f"processes {left} are left:\n{group.logs()}"
        time.sleep(0.02)


def start_clients(group: Group, reference: Reference, pool: ThreadPoolExecutor) -> "list[Future[NoReturn]]":
    """Starts clients that send requests until the group fails. Waits until it has run some of their steps."""
    before = group.status().ranks[0].steps
    prompts = [answer["prompt_token_ids"] for answer in reference.values()]
    clients = [pool.submit(keep_asking, group, prompt) for prompt in prompts]
    wait_steps(group, before + 20)
    return clients


def wait_steps(group: Group, steps: int) -> None:
    """Waits until the first rank has run this number of steps since its start."""
    deadline = time.monotonic() + 60
    while group.status().ranks[0].steps < steps:
        assert time.monotonic() < deadline, group.logs()
        time.sleep(0.02)


def keep_asking(group: Group, prompt: Sequence[int]) -> NoReturn:
    """Requests the tokens after a prompt again and again, so that a request always runs.

    Raises:
        OSError, http.client.HTTPException: the group has ended.
    """
    while True:
        assert len(group.complete(prompt, MAX_TOKENS)) == MAX_TOKENS, (
            "a client got a part of an answer as a complete answer"
        )


def check_cut_off(clients: "Sequence[Future[NoReturn]]") -> None:
    """Checks that clients of an ended group got an error soon."""
    for client in clients:
        assert isinstance(client.exception(30), OSError | http.client.HTTPException), client.exception()


def wait_not_ready(group: Group, killed_at: float) -> None:
    url = group.health_url(names.PATH_READYZ)
    while fetch(url, timeout_s=1.0) is not None:
        assert time.time() - killed_at < NAMED_WITHIN_S, group.logs()
        time.sleep(0.02)


def check_failure(failure: Failure, rank: int, killed_at: float) -> None:
    assert (failure.reason, failure.rank, failure.exit_code) == (FailureReason.RANK_EXITED, rank, -9)
    assert 0 <= failure.time - killed_at < NAMED_WITHIN_S


def session_pids(group: Group) -> list[int]:
    """Returns the processes below the supervisors."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [child.process.pid for child in group.children]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    assert len(found) >= 4  # two ranks, the API server and its engine
    return found


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
