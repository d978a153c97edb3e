"""Tests an engine that hangs while no rank is busy: the group must end in time, and name the engine.

The last tests of test_platform.py and test_tensor.py stop an idle engine and the API server.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.worker.answers import ONE_THREAD, answer_all, rank_pids
from tests.integration.worker.conftest import Reference
from tests.integration.worker.deaths import check_cut_off, start_clients, wait_steps
from tests.integration.worker.engine_stops import (
    STOPPED_WITHIN_S,
    api_pid,
    check_stopped_engine,
    end_of,
    engine_pid,
    is_ready,
    wait_not_ready,
)
from tests.integration.worker.groups import Group, build_plan, start_group

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 15.0
"""Longer than a step may take while images are built at the same time: a step of more than 7 s was seen."""
ENV = {
    **ONE_THREAD,
    names.ENV_STEP_TIMEOUT: str(LIMIT_S),
    "PYTHONPATH": str(Path(__file__).parent / "hanging"),
}


@pytest.fixture
def group(model: Path, tmp_path: Path) -> Iterator[Group]:
    """A group of one pod, which starts faster than two."""
    plan = build_plan(model, layers=[4, 4], pods=[2], max_model_len=2048)
    with start_group(plan, tmp_path, env=ENV) as group:
        group.wait_ready()
        yield group


def test_a_stopped_engine_is_reported_while_requests_wait(group: Group, reference: Reference) -> None:
    with ThreadPoolExecutor(len(reference)) as pool:
        running = start_clients(group, reference, pool)
        check_stopped_engine(group)
        check_cut_off(running)


def test_a_killed_engine_is_reported_while_requests_wait(group: Group, reference: Reference) -> None:
    """Linux kills a process in this way if its pod exceeds the memory limit."""
    with ThreadPoolExecutor(len(reference)) as pool:
        running = start_clients(group, reference, pool)
        began = time.monotonic()
        os.kill(engine_pid(group), signal.SIGKILL)
        wait_not_ready(group, began)
        assert group.children[0].process.wait(STOPPED_WITHIN_S) == names.EXIT_RANK_FAILED
        failure = group.failure(0)
        check_cut_off(running)
    assert failure is not None, group.logs()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.API_SERVER_EXITED, 0, None)
    assert failure.exit_code == -signal.SIGKILL
    words = (
        "vLLM's engine (pod 0) was killed by SIGKILL while Ready. If no user killed the process, memory was "
        "missing"
    )
    assert failure.message.startswith(words)


@pytest.mark.parametrize("find", [engine_pid, api_pid], ids=["engine", "API server"])
def test_ending_a_leaders_process_ends_the_group_despite_running_requests(
    group: Group, reference: Reference, find: Callable[[Group], int]
) -> None:
    """Earlier, the API server waited until stepTimeout for requests that no process could answer."""
    with ThreadPoolExecutor(len(reference)) as pool:
        running = start_clients(group, reference, pool)
        began = time.monotonic()
        os.kill(find(group), signal.SIGTERM)
        wait_not_ready(group, began)
        assert group.children[0].process.wait(LIMIT_S - 5) == names.EXIT_RANK_FAILED
        failure = group.failure(0)
        for client in running:  # vLLM aborts some requests, and answers with the tokens so far
            client.exception(30)
    assert failure is not None, group.logs()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.API_SERVER_EXITED, 0, None)


def test_a_hanging_engine_is_reported_and_a_long_step_is_not(group: Group, reference: Reference) -> None:
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answer_until, enough, group, reference)
        try:
            wait_steps(group, 20)
            os.kill(rank_pids(group)[0], signal.SIGUSR1)  # hangs for 4 s, while the engine waits for it
            began = time.monotonic()
            while time.monotonic() - began < 4.0:
                assert is_ready(group), group.logs()
                time.sleep(0.05)
        finally:
            enough.set()
        answers.result()
    answer_all(group, reference)
    engine = engine_pid(group)
    began = time.monotonic()
    os.kill(engine, signal.SIGUSR2)
    wait_not_ready(group, began)
    failure = end_of(group, began, LIMIT_S + STOPPED_WITHIN_S)
    assert time.monotonic() - began > LIMIT_S
    assert "vLLM's engine (pod 0) has not answered for" in failure.message


def answer_until(enough: threading.Event, group: Group, reference: Reference) -> None:
    """Sends all prompts together again and again, so that requests are always in progress."""
    while not enough.is_set():
        answer_all(group, reference)
