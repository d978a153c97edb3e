"""API server or engine hang while no rank is busy: the group ends within a bound, and says who hung."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from tests.integration.worker.answers import ONE_THREAD, answer_all, rank_pids
from tests.integration.worker.conftest import Reference
from tests.integration.worker.deaths import ask
from tests.integration.worker.groups import Group, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 7.0
ENV = {
    **ONE_THREAD,
    names.ENV_STEP_TIMEOUT: str(LIMIT_S),
    "PYTHONPATH": str(Path(__file__).parent / "hanging"),
}
STOPPED_WITHIN_S = 3.0
"""A second until it is seen, the verdict, and the end of all processes."""
NOT_READY_WITHIN_S = 2.5


@pytest.fixture
def group(model: Path, tmp_path: Path) -> Iterator[Group]:
    """A group of one pod, which starts sooner than two."""
    plan = build_plan(model, layers=[4, 4], pods=[2], max_model_len=2048)
    with start_group(plan, tmp_path, env=ENV) as group:
        group.wait_ready()
        yield group


def api_pid(group: Group) -> int:
    found = re.search(r"started api as process (\d+)", group.children[0].log.read_text())
    assert found is not None, group.logs()
    return int(found[1])


def engine_pid(group: Group) -> int:
    """Returns the process of the engine: the API server's child that says so."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(api_pid(group))], check=True, capture_output=True, text=True
    ).stdout
    found = [int(line.split()[0]) for line in listed.splitlines() if "EngineCore" in line]
    assert len(found) == 1, listed
    return found[0]


def is_ready(group: Group) -> bool:
    url = f"http://127.0.0.1:{group.addresses[0].health_port}{names.PATH_READYZ}"
    return fetch(url, timeout_s=2.0) is not None


def end_of(group: Group, began: float, within_s: float) -> Failure:
    """Returns what a group says of its end, which must come in time."""
    assert group.children[0].process.wait(within_s) == names.EXIT_RANK_FAILED
    print(f"ended after {time.monotonic() - began:.2f} s")
    failure = group.failure(0)
    assert failure is not None, group.logs()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.ENGINE_STOPPED, 0, None)
    return failure


def wait_not_ready(group: Group, began: float) -> None:
    while is_ready(group):
        assert time.monotonic() - began < NOT_READY_WITHIN_S, group.logs()
        time.sleep(0.02)
    print(f"not ready after {time.monotonic() - began:.2f} s")


def test_a_stopped_api_server_is_named(group: Group) -> None:
    began = time.monotonic()
    os.kill(api_pid(group), signal.SIGSTOP)
    wait_not_ready(group, began)
    failure = end_of(group, began, STOPPED_WITHIN_S)
    assert "the API server (pod 0) has been stopped for more than 1 s" in failure.message


@pytest.mark.parametrize("requests", [False, True], ids=["idle", "while requests wait"])
def test_a_stopped_engine_is_named(group: Group, reference: Reference, requests: bool) -> None:
    engine = engine_pid(group)
    with ThreadPoolExecutor(len(reference)) as pool:
        running = ask(group, reference, pool) if requests else []
        began = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        wait_not_ready(group, began)
        failure = end_of(group, began, STOPPED_WITHIN_S)
        for request in running:
            assert request.exception(30) is not None, "a request was answered by a group that has ended"
    assert f"the engine (pod 0, process {engine}) has been stopped for more than 1 s" in failure.message


def test_an_engine_that_hangs_is_named_and_a_long_step_is_waited_for(
    group: Group, reference: Reference
) -> None:
    with ThreadPoolExecutor(len(reference)) as pool:
        running = ask(group, reference, pool)
        os.kill(rank_pids(group)[0], signal.SIGUSR1)  # hangs for 4 s, and the engine waits for it
        began = time.monotonic()
        while time.monotonic() - began < 4.0:
            assert is_ready(group), group.logs()
            time.sleep(0.05)
        for request in running:
            request.result(60)
    answer_all(group, reference)
    engine = engine_pid(group)
    began = time.monotonic()
    os.kill(engine, signal.SIGUSR2)
    wait_not_ready(group, began)
    failure = end_of(group, began, LIMIT_S + STOPPED_WITHIN_S)
    assert time.monotonic() - began > LIMIT_S
    assert "the engine (pod 0) has answered nothing for" in failure.message
