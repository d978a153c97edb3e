"""Tests groups of real supervisors that lose a rank: all processes end within 2 s, and name one culprit."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.launch.groups import TinyGroup, tiny_group, wait_until
from vllm_heteroinfer.launch.supervised_process import STOPPED_LIMIT_S

LIMIT_S = 2.0
"""Seconds from a death to the exit of every supervisor of the group."""


def end_of(group: TinyGroup, death: float, limit_s: float = LIMIT_S) -> list[int]:
    """Checks that all pods name one culprit and that no process is left. Returns the exit codes."""
    codes = group.wait_exits(death + limit_s)
    assert all(codes), group.logs()
    failures = [pod.failure() for pod in group.pods]
    assert len({(f.reason, f.pod, f.rank, f.message, f.exit_code) for f in failures}) == 1, group.logs()
    assert group.marked() == []
    return codes


@pytest.mark.parametrize("do", ["idle", "compute"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_reported_by_all_pods(tmp_path: Path, victim: int, do: str) -> None:
    with tiny_group(tmp_path, (1, 2), do=dict.fromkeys(range(3), do)) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        os.kill(group.rank_pid(victim), signal.SIGKILL)
        wait_until(lambda: not any(pod.is_ready() for pod in group.pods), 1.0, group.logs)
        codes = end_of(group, death)
    failure = group.pods[0].failure()
    pod = group.plan.ranks[victim].pod
    assert (failure.reason, failure.rank, failure.pod) == (FailureReason.RANK_EXITED, victim, pod)
    assert failure.exit_code == -signal.SIGKILL
    assert "SIGKILL" in failure.message
    assert failure.last_log == f"rank {victim} is connected"
    assert codes[pod] == names.EXIT_RANK_FAILED
    assert codes[1 - pod] == names.EXIT_PEER_FAILED


def test_a_killed_rank_with_2_gib_is_reported_before_its_memory_is_freed(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={1: "allocate"}) as group:
        group.start()
        group.wait_ready()
        wait_until(lambda: "allocated" in group.pods[1].log.read_text(), 60, group.logs)
        death = time.monotonic()
        os.kill(group.rank_pid(1), signal.SIGKILL)
        wait_until(lambda: not any(pod.is_ready() for pod in group.pods), 1.0, group.logs)
        end_of(group, death)
    assert group.pods[0].failure().exit_code == -signal.SIGKILL


def test_a_stopped_rank_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        os.kill(group.rank_pid(1), signal.SIGSTOP)
        end_of(group, death, limit_s=3.0)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.RANK_STOPPED, 1)


def test_a_rank_that_is_stopped_again_and_again_continues_to_serve(tmp_path: Path) -> None:
    """The rank is stopped at most times at which the supervisor checks it, as with cpulimit."""
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        rank, until = group.rank_pid(1), time.monotonic() + 3 * STOPPED_LIMIT_S
        while time.monotonic() < until:
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(rank, signal.SIGCONT)
        assert all(pod.is_ready() for pod in group.pods), group.logs()


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_error_of_a_rank_that_raises_is_quoted(tmp_path: Path, culprit: int) -> None:
    with tiny_group(tmp_path, do={culprit: "raise"}) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        (tmp_path / "trigger").touch()
        end_of(group, death)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.RANK_RAISED, culprit)
    assert "ValueError: weights of layer 3 have shape [4, 4], expected [8, 4]" in failure.message
    assert failure.exit_code == 1
    assert failure.last_log.startswith("ValueError: weights")


@pytest.mark.parametrize("accusers", [(0,), (1,), (0, 1)])
def test_ranks_with_different_settings_name_the_different_rank(
    tmp_path: Path, accusers: tuple[int, ...]
) -> None:
    with tiny_group(tmp_path, do=dict.fromkeys(accusers, "accuse")) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        (tmp_path / "trigger").touch()
        codes = group.wait_exits(death + LIMIT_S)
        assert group.marked() == []
    assert codes == [names.EXIT_REFUSED] * 2
    for pod in group.pods:
        failure = pod.failure()
        assert (failure.reason, failure.rank, failure.pod) == (FailureReason.CONFIG_MISMATCH, 1, 1)
        assert "rank 1 has dtype float16, rank 0 has float32" in failure.message


def test_a_rank_that_exits_without_a_report_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={1: "exit3"}) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        (tmp_path / "trigger").touch()
        end_of(group, death)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank, failure.exit_code) == (FailureReason.RANK_EXITED, 1, 3)
    assert failure.last_log == "about to leave"


def test_a_killed_api_server_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        os.kill(group.child_pid("api", 0), signal.SIGKILL)
        end_of(group, death)
    failure = group.pods[1].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.API_SERVER_EXITED, 0, None)


def test_a_stopped_api_server_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        os.kill(group.child_pid("api", 0), signal.SIGSTOP)
        end_of(group, death, limit_s=3.0)
    failure = group.pods[1].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.ENGINE_STOPPED, 0, None)
    assert "vLLM's API server (pod 0) has been stopped" in failure.message


@pytest.mark.parametrize(
    ("api", "who"),
    [("silent", "vLLM's API server"), ("endless", "vLLM's API server"), ("engine", "vLLM's engine")],
)
def test_an_api_server_or_engine_without_answers_is_reported(tmp_path: Path, api: str, who: str) -> None:
    """The process is alive and no rank is busy.

    The group is not ready within 2 s, and ends after the limit.
    """
    limit_s = 4.0
    with tiny_group(tmp_path, env={names.ENV_STEP_TIMEOUT: str(limit_s), "TINY_API": api}) as group:
        group.start()
        group.wait_ready()
        began = time.monotonic()
        (tmp_path / "trigger").touch()
        wait_until(lambda: not group.pods[0].is_ready(), 2.5, group.logs)
        end_of(group, began + limit_s, limit_s=3.0)
        assert time.monotonic() - began > limit_s
    failure = group.pods[1].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.ENGINE_STOPPED, 0, None)
    assert f"{who} (pod 0) has not answered for" in failure.message


def test_a_silent_engine_is_not_reported_while_a_rank_is_busy(tmp_path: Path) -> None:
    """The rank computes as in a long prefill. The rank's own limit ends the group, and the rank is named."""
    env = {names.ENV_STEP_TIMEOUT: "4", "TINY_API": "engine"}
    with tiny_group(tmp_path, do={1: "hang"}, env=env) as group:
        (tmp_path / "trigger").touch()
        group.start()
        group.wait_ready()
        end_of(group, time.monotonic(), limit_s=10.0)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.STEP_TIMEOUT, 1)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_supervisor_ends_its_ranks_and_is_reported(tmp_path: Path, victim: int) -> None:
    with tiny_group(tmp_path, (1, 2, 1)) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        group.pods[victim].process.kill()
        codes = group.wait_exits(death + LIMIT_S)
        wait_until(lambda: group.marked() == [], death + LIMIT_S - time.monotonic(), group.logs)
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [names.EXIT_PEER_FAILED] * 2
    for index in {0, 1, 2} - {victim}:
        failure = group.pods[index].failure()
        assert (failure.reason, failure.pod) == (FailureReason.POD_LOST, victim), group.logs()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_supervisor_is_reported_and_ends_when_it_resumes(tmp_path: Path, victim: int) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        os.kill(group.pods[victim].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        other = group.pods[1 - victim]
        assert other.process.wait(20) == names.EXIT_PEER_FAILED
        took_s = time.monotonic() - began
        failure = other.failure()
        assert (failure.reason, failure.pod) == (FailureReason.POD_LOST, victim)
        found = re.search(r"was silent for ([\d.]+) s.*the limit is ([\d.]+) s", failure.message)
        assert found is not None, failure.message
        # The setting of 1.5 s, more if the machine was busy, and then the usual 2 s.
        assert float(found[1]) < float(found[2]) + LIMIT_S, failure.message
        assert took_s < float(found[1]) + LIMIT_S, failure.message
        os.kill(group.pods[victim].process.pid, signal.SIGCONT)
        assert group.pods[victim].process.wait(LIMIT_S + 1.0) == names.EXIT_RANK_FAILED
        # The supervisor lives, but its peer closed the connection with a reason.
        assert group.pods[victim].failure().message == failure.message
        assert group.marked() == []


def test_distinguishes_a_stuck_rank_from_a_waiting_rank(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={0: "wait", 1: "hang"}, env={names.ENV_STEP_TIMEOUT: "1"}) as group:
        group.start()
        # The deadline counts from the start of the step, so the group may be ready only for a moment.
        end_of(group, time.monotonic(), limit_s=20.0)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.STEP_TIMEOUT, 1)
    assert "step 7" in failure.message


@pytest.mark.parametrize(
    ("step_timeout", "startup_timeout_s", "reason"),
    [("2", 60.0, FailureReason.STEP_TIMEOUT), ("300", 4.0, FailureReason.STARTUP_TIMEOUT)],
)
def test_a_rank_stuck_in_the_first_tokens_is_reported(
    tmp_path: Path, step_timeout: str, startup_timeout_s: float, reason: FailureReason
) -> None:
    """The API server of vLLM does not listen yet, but its pod is not the culprit."""
    env = {names.ENV_STEP_TIMEOUT: step_timeout, "TINY_API": "first"}
    ranks = {0: "wait", 1: "hang"}
    with tiny_group(tmp_path, do=ranks, env=env, startup_timeout_s=startup_timeout_s) as group:
        group.start()
        end_of(group, time.monotonic(), limit_s=20.0)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.pod, failure.rank) == (reason, 1, 1)


def test_an_engine_that_hangs_in_the_first_tokens_is_reported(tmp_path: Path) -> None:
    env = {names.ENV_STEP_TIMEOUT: "2", "TINY_API": "first_hangs"}
    with tiny_group(tmp_path, env=env, startup_timeout_s=60.0) as group:
        group.start()
        end_of(group, time.monotonic(), limit_s=20.0)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.ENGINE_STOPPED, 0, None)
    assert "vLLM's engine (pod 0) has not answered" in failure.message


def test_a_slow_start_of_the_api_server_does_not_end_the_group(tmp_path: Path) -> None:
    """The API server takes longer to start than stepTimeout. Only startup.timeout limits the start."""
    with tiny_group(tmp_path, env={names.ENV_STEP_TIMEOUT: "1", "TINY_API": "first"}) as group:
        group.start()
        wait_until(group.pods[1].is_ready, 30, group.logs)
        time.sleep(3)
        (tmp_path / "trigger").touch()
        group.wait_ready()


def test_a_process_that_left_its_process_group_is_killed_too(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={1: "grandchild"}) as group:
        group.start()
        group.wait_ready()
        wait_until(lambda: len(group.marked()) == 6, 10, group.logs)
        death = time.monotonic()
        os.kill(group.rank_pid(0), signal.SIGKILL)
        end_of(group, death)


@pytest.mark.parametrize("do", ["give_up", "idle"])
def test_the_failure_shows_the_blamed_ranks_own_error(tmp_path: Path, do: str) -> None:
    """Rank 0 accuses rank 1 first. A moment later, rank 1 reports its own error."""
    with tiny_group(tmp_path, do={0: do, 1: "raise_late"}) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        (tmp_path / "trigger").touch()
        end_of(group, death)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.RANK_RAISED, 1)
    assert "RuntimeError: expert weights: Input/output error" in failure.message
    assert failure.last_log == "RuntimeError: expert weights: Input/output error"


def test_a_ranks_own_error_with_the_text_of_a_lost_peer_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1, 1, 1), do={1: "nfs"}) as group:
        group.start()
        group.wait_ready()
        death = time.monotonic()
        (tmp_path / "trigger").touch()
        end_of(group, death)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.RANK_RAISED, 1)
    assert "(NFS)" in failure.message


def test_names_a_rank_that_stopped_reporting(tmp_path: Path) -> None:
    """The group must name the rank that reports nothing, and not the busy rank that waits for it."""
    env = {names.ENV_STEP_TIMEOUT: "4"}
    with tiny_group(tmp_path, do={0: "wait_on_cue", 1: "mute"}, env=env) as group:
        group.start()
        group.wait_ready()
        began = time.monotonic()
        (tmp_path / "trigger").touch()
        end_of(group, began, limit_s=10.0)
    failure = group.pods[0].failure()
    assert (failure.reason, failure.rank) == (FailureReason.RANK_STOPPED, 1), failure
    assert "rank 1 has sent its supervisor nothing for" in failure.message


def engine_of(group: TinyGroup) -> int:
    """Waits for the process that the API server uses as its engine, and returns it."""

    def find() -> re.Match[str] | None:
        return re.search(r"engine (\d+) runs", group.pods[0].log.read_text())

    wait_until(lambda: find() is not None, 30, group.logs)
    found = find()
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            signal.SIGKILL,
            (
                "was killed by SIGKILL while Ready. If no user killed the process, memory was missing. Raise "
                "the memory limit of the pod's role, or free memory of the node"
            ),
        ),
        (signal.SIGABRT, "was killed by SIGABRT while Ready"),
        (signal.SIGTERM, "was killed by SIGTERM while Ready"),
    ],
)
def test_an_engine_that_is_killed_is_reported(tmp_path: Path, number: signal.Signals, words: str) -> None:
    with tiny_group(tmp_path, env={"TINY_API": "parent"}) as group:
        group.start()
        group.wait_ready()
        engine, death = engine_of(group), time.monotonic()
        os.kill(engine, number)
        end_of(group, death)
    failure = group.pods[1].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.API_SERVER_EXITED, 0, None)
    assert f"vLLM's engine (pod 0) {words}" in failure.message
    assert failure.exit_code == -number


def test_an_engine_that_is_stopped_during_the_start_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do=dict.fromkeys(range(2), "engine"), env={"TINY_API": "parent"}) as group:
        group.start()
        engine, death = engine_of(group), time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        end_of(group, death, limit_s=5.0)
    failure = group.pods[1].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.ENGINE_STOPPED, 0, None)
    assert f"vLLM's engine (pod 0, process {engine}) has been stopped" in failure.message


def test_ranks_wait_for_an_engine_that_hangs_during_the_start(tmp_path: Path) -> None:
    ranks = dict.fromkeys(range(2), "engine")
    with tiny_group(tmp_path, do=ranks, env={"TINY_API": "parent"}, startup_timeout_s=3) as group:
        group.start()
        end_of(group, time.monotonic(), limit_s=20.0)
    failure = group.pods[1].failure()
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.STARTUP_TIMEOUT, 0, None)
    assert "rank 1 (pod 1) is Loading and waits for the engine" in failure.message
