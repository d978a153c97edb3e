"""Stops a group's API server or engine after its other tests: the group must name it within a time limit."""

import os
import re
import signal
import subprocess
import time

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from tests.integration.worker.groups import Group, fetch

STOPPED_WITHIN_S = 3.0
"""A second until the stop is detected, the verdict, and the end of all processes."""
NOT_READY_WITHIN_S = 2.5


def check_stopped_api_server(group: Group) -> None:
    """Stops the API server of a group of one pod, and checks the reported failure."""
    began = time.monotonic()
    os.kill(api_pid(group), signal.SIGSTOP)
    wait_not_ready(group, began)
    failure = end_of(group, began, STOPPED_WITHIN_S)
    assert "vLLM's API server (pod 0) has been stopped for more than 1 s" in failure.message


def check_stopped_engine(group: Group) -> None:
    """Stops the engine of a group of one pod, and checks the reported failure."""
    engine, began = engine_pid(group), time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    wait_not_ready(group, began)
    failure = end_of(group, began, STOPPED_WITHIN_S)
    assert f"vLLM's engine (pod 0, process {engine}) has been stopped for more than 1 s" in failure.message


def api_pid(group: Group) -> int:
    found = re.search(r"started api as process (\d+)", group.children[0].log.read_text())
    assert found is not None, group.logs()
    return int(found[1])


def engine_pid(group: Group) -> int:
    """Returns the engine's process: the child of the API server with the engine's title."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(api_pid(group))], check=True, capture_output=True, text=True
    ).stdout
    found = [int(line.split()[0]) for line in listed.splitlines() if "EngineCore" in line]
    assert len(found) == 1, listed
    return found[0]


def is_ready(group: Group) -> bool:
    url = group.health_url(names.PATH_READYZ)
    return fetch(url, timeout_s=2.0) is not None


def end_of(group: Group, began: float, within_s: float) -> Failure:
    """Waits for the end of a group within a time limit, and returns the failure that it reports."""
    try:
        assert group.children[0].process.wait(within_s) == names.EXIT_RANK_FAILED
    except subprocess.TimeoutExpired:
        pytest.fail(f"not ended after {time.monotonic() - began:.2f} s: {group.logs()}")
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
