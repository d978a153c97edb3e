"""Tests groups that get the request to stop: their requests end first, then the group."""

import http.client
import os
import signal
import time
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.launch.groups import Pod, TinyGroup, tiny_group, wait_until
from tests.integration.launch.wire import wired

STOP_LIMIT_S = 5.0
DRAIN_S = 2.0
LATE_S = 1.0


class SlowRequest:
    """A request that is answered until the trigger exists."""

    def __init__(self, group: TinyGroup) -> None:
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", group.launches[0].leader.api_port, timeout=20
        )
        self._connection.request("GET", "/slow")
        self.answer = self._connection.getresponse()

    def close(self) -> None:
        self.answer.close()
        self._connection.close()

    def read_line(self) -> bytes:
        return self.answer.readline()

    def read_rest(self) -> bytes:
        """Reads until the connection ends in any way, and returns the data."""
        try:
            return self.answer.read()
        except (OSError, http.client.HTTPException):
            return b""


def is_refused(group: TinyGroup) -> bool:
    """Returns whether a new request is refused. Gives up a request that is answered."""
    request = SlowRequest(group)
    request.close()
    return request.answer.status == 503


def serve_slowly(group: TinyGroup) -> SlowRequest:
    group.start()
    return ask_slowly(group)


def ask_slowly(group: TinyGroup) -> SlowRequest:
    group.wait_ready()
    request = SlowRequest(group)
    assert request.read_line() == b"line\n"
    return request


def ask_to_stop(group: TinyGroup, *pods: int) -> float:
    """Sends SIGTERM, and waits until every pod reports that it is not ready.

    Returns the time of the signal.
    """
    asked = time.monotonic()
    for index in pods:
        group.pods[index].process.terminate()
    wait_until(lambda: not any(pod.is_ready() for pod in group.pods), 1.0, group.logs)
    return asked


@pytest.mark.parametrize("asked", [(0, 1), (0,), (1,)], ids=str)
def test_a_running_request_ends_before_its_group(tmp_path: Path, asked: tuple[int, ...]) -> None:
    with tiny_group(tmp_path) as group:
        request = serve_slowly(group)
        ask_to_stop(group, *asked)
        wait_until(lambda: is_refused(group), 5, group.logs)
        assert [pod.is_alive() for pod in group.pods] == [True, True], group.logs()
        assert request.read_line() == b"line\n"
        (tmp_path / "trigger").touch()
        triggered = time.monotonic()
        assert request.read_rest().endswith(b"end\n")
        codes = group.wait_exits(triggered + STOP_LIMIT_S)
        assert group.marked() == []
    assert [codes[index] for index in asked] == [names.EXIT_OK] * len(asked)
    for index in {0, 1} - {*asked}:
        assert codes[index] == names.EXIT_PEER_FAILED
        failure = group.pods[index].failure()
        assert (failure.reason, failure.pod) == (FailureReason.POD_LOST, asked[0])
        assert "was asked to stop" in failure.message


@pytest.mark.parametrize("asked", [(0, 1), (1,)], ids=str)
def test_a_group_with_a_running_request_ends_at_the_drain_timeout(
    tmp_path: Path, asked: tuple[int, ...]
) -> None:
    with tiny_group(tmp_path, drain_timeout_s=DRAIN_S) as group:
        request = serve_slowly(group)
        stopped = ask_to_stop(group, *asked)
        assert not request.read_rest().endswith(b"end\n")
        assert time.monotonic() - stopped > DRAIN_S - 0.1
        codes = group.wait_exits(stopped + DRAIN_S + STOP_LIMIT_S)
        assert group.marked() == []
    assert codes[asked[0]] == names.EXIT_OK


def test_a_drain_without_requests_does_not_wait(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        codes = group.wait_exits(ask_to_stop(group, 0, 1) + STOP_LIMIT_S)
    assert codes == [names.EXIT_OK] * 2


def test_a_drain_timeout_of_0_disables_draining(tmp_path: Path) -> None:
    with tiny_group(tmp_path, drain_timeout_s=0) as group:
        request = serve_slowly(group)
        codes = group.wait_exits(ask_to_stop(group, 0, 1) + STOP_LIMIT_S)
        assert not request.read_rest().endswith(b"end\n")
    assert codes == [names.EXIT_OK] * 2


def test_a_second_signal_ends_the_supervisor_immediately(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        request = serve_slowly(group)
        ask_to_stop(group, 0, 1)
        asked_again = time.monotonic()
        for pod in group.pods:
            pod.process.send_signal(signal.SIGINT)
        assert group.wait_exits(asked_again + STOP_LIMIT_S) == [names.EXIT_OK] * 2
        assert group.marked() == []
        request.close()  # until then, the group runs


def test_a_rank_that_dies_during_a_drain_ends_the_group_and_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        request = serve_slowly(group)
        ask_to_stop(group, 1)
        death = time.monotonic()
        os.kill(group.rank_pid(1), signal.SIGKILL)
        codes = group.wait_exits(death + 2.0)
        assert group.marked() == []
        request.close()
    assert codes == [names.EXIT_PEER_FAILED, names.EXIT_RANK_FAILED], group.logs()
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.RANK_EXITED, 1)


def check_its_end(group: TinyGroup, request: SlowRequest, trigger: Path) -> None:
    """Checks that the request ends only by the trigger, and that the group ends after that."""
    assert request.read_line() == b"line\n"
    assert [pod.is_alive() for pod in group.pods] == [True, True], group.logs()
    trigger.touch()
    assert request.read_rest().endswith(b"end\n"), group.logs()
    assert group.wait_exits(time.monotonic() + STOP_LIMIT_S) == [names.EXIT_OK] * 2


def test_a_connection_reset_during_a_drain_is_established_again(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group, wired(group) as wire:
        request = ask_slowly(group)
        ask_to_stop(group, 0, 1)
        wire.reset()
        log = group.pods[1].log
        wait_until(lambda: "reconnected to the leader" in log.read_text(), 5, group.logs)
        wait_until(lambda: is_refused(group), 5, group.logs)
        check_its_end(group, request, tmp_path / "trigger")


def test_a_drain_of_a_pod_that_lost_its_leader_on_a_busy_machine_fails_no_group(
    tmp_path: Path,
) -> None:
    with tiny_group(tmp_path) as group, wired(group) as wire:
        request = ask_slowly(group)
        turns_come_late(group.pods[1])
        wire.refuses = True
        wire.reset()
        wait(group.launches[1].heartbeat_timeout_s + 0.2)
        ask_to_stop(group, 0, 1)
        wire.refuses = False
        log = group.pods[1].log
        wait_until(lambda: "reconnected to the leader" in log.read_text(), 5, group.logs)
        wait_until(lambda: is_refused(group), 5, group.logs)
        check_its_end(group, request, tmp_path / "trigger")


def turns_come_late(pod: Pod) -> None:
    """Stops a supervisor for less than its peer waits.

    The supervisor reports this, and its peers wait longer.
    """
    pod.process.send_signal(signal.SIGSTOP)
    wait(LATE_S)
    pod.process.send_signal(signal.SIGCONT)
    wait(LATE_S)


def wait(seconds: float) -> None:
    since = time.monotonic()
    wait_until(lambda: time.monotonic() - since > seconds, seconds + 10)


def test_a_pod_lost_during_a_drain_ends_the_drain(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        request = serve_slowly(group)
        ask_to_stop(group, 0, 1)
        lost = time.monotonic()
        group.pods[1].process.kill()
        assert group.pods[0].process.wait(STOP_LIMIT_S) == names.EXIT_OK, group.logs()
        assert time.monotonic() - lost < STOP_LIMIT_S
        wait_until(lambda: group.marked() == [], STOP_LIMIT_S, group.logs)
        request.close()
