"""Tests a group of two real vLLM ranks under `heteroinfer up`: it serves, fails, serves again, and ends."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from heteroinfer_contract.group_report import GroupReport, RankPhase
from tests.integration.up.resources import resource, write
from tests.running_up import READY_TIMEOUT_S, RunningUp

GONE_TIMEOUT_S = 2.0
EPOCH_ENDED = re.compile(r"Warning RankExited: group 0 epoch (?P<epoch>\d+) ended: rank (?P<rank>\d+): ")
DOWN = re.compile(r"Ready=False RankExited")
_RANK_PID = re.compile(r"started rank \d+ as process (\d+)")

pytestmark = pytest.mark.timeout(900)


def _rank_pid(log_dir: Path, epoch: int, pod: int) -> int:
    """Returns the process of a pod's only rank, from the supervisor's log."""
    found = _RANK_PID.search((log_dir / f"tiny-0-{epoch}-{pod}.log").read_text())
    assert found is not None
    return int(found[1])


def _check_tokens(up: RunningUp, url: str, references: dict[str, Any]) -> None:
    def ask(wanted: dict[str, Any]) -> list[int]:
        answer = up.complete(url, wanted["prompt_token_ids"], len(wanted["token_ids"]))
        token_ids: list[int] = answer["token_ids"]
        return token_ids

    with ThreadPoolExecutor(len(references)) as pool:
        got = list(pool.map(ask, references.values()))
    assert got == [wanted["token_ids"] for wanted in references.values()]


def _report_with_steps(up: RunningUp) -> GroupReport:
    """Returns the leader's report after every rank has reported decode steps, which takes at most 2 s.

    A first report may cover only the step of the prompt, which no average counts.
    """
    deadline = time.monotonic() + 2.0
    while True:
        report = up.group_report()
        if all(rank.steps > 1 and rank.step_s > 0 for rank in report.ranks):
            return report
        assert time.monotonic() < deadline, report
        time.sleep(0.05)


def test_a_group_serves_fails_as_a_whole_serves_again_and_then_stays_failed(
    tmp_path: Path, model_dir: Path, references: dict[str, Any], port: str
) -> None:
    """The tokens are right.

    After the first kill, the rank is named and a new epoch serves. The second kill uses up the restarts.
    """
    file = write(tmp_path, resource(model_dir, restart={"maxRestarts": 1}))
    logs = tmp_path / "logs"
    with RunningUp(["-f", file, "--port", port, "--log-dir", logs]) as up:
        url = up.wait_ready()
        _check_tokens(up, url, references)
        status = _report_with_steps(up)
        # A client without the group's key learns no epoch.
        assert (status.epoch, status.ready) == (0, True)
        assert any("group 0 epoch 1 serves" in line for line in up.lines)
        assert [rank.phase for rank in status.ranks] == [RankPhase.READY, RankPhase.READY]
        assert all(rank.compute_s > 0 for rank in status.ranks)
        assert all(rank.locked_memory_bytes is not None for rank in status.ranks)
        assert [rank.transports for rank in status.ranks] == [("stages:gloo",)] * 2
        assert "heteroinfer_rank_step_seconds_count" in up.metrics()[1]

        first, reported = up.processes(), len(up.lines)
        os.kill(_rank_pid(logs, epoch=1, pod=1), signal.SIGKILL)
        ended_epoch = up.wait_line(EPOCH_ENDED, GONE_TIMEOUT_S + 5.0, after=reported)
        assert (ended_epoch["epoch"], ended_epoch["rank"]) == ("1", "1")
        up.wait_line(DOWN, 1.0, after=reported)
        assert up.wait_ready(READY_TIMEOUT_S, after=reported) == url
        assert first.living() == []
        assert any("group 0 epoch 2 serves" in line for line in up.lines[reported:])
        _check_tokens(up, url, references)

        second, reported = up.processes(), len(up.lines)
        os.kill(_rank_pid(logs, epoch=2, pod=0), signal.SIGKILL)
        ended_epoch = up.wait_line(EPOCH_ENDED, GONE_TIMEOUT_S + 5.0, after=reported)
        assert (ended_epoch["epoch"], ended_epoch["rank"]) == ("2", "0")
        assert up.wait_exit() == 1
        assert second.wait_gone(GONE_TIMEOUT_S) == []
        assert "error: group 0: RankExited: rank 0" in up.tail(1)
        assert f"the output of each pod is in {logs}" in up.tail(2)


def test_killed_up_leaves_no_process(tmp_path: Path, model_dir: Path, port: str) -> None:
    """After SIGKILL of `heteroinfer up` itself, supervisors, ranks, engine and API server end, too."""
    file = write(tmp_path, resource(model_dir))
    arguments: list[str | Path] = ["-f", file, "--port", port, "--log-dir", tmp_path / "logs"]
    # A killed process cannot remove its folders, so the test gives this process its own folder.
    with TemporaryDirectory(prefix="up-") as temporary, RunningUp(arguments, env={"TMPDIR": temporary}) as up:
        up.wait_ready()
        started = up.processes()
        # Two supervisors, two ranks, and the API server with its engine core.
        assert len(started.living()) >= 5
        up.process.kill()
        up.process.wait()
        assert started.wait_gone(GONE_TIMEOUT_S) == []


def test_ctrl_c_while_loading_leaves_no_process(tmp_path: Path, model_dir: Path, port: str) -> None:
    """Ctrl-C counts as success at any time, and no folder of a pod remains."""
    file = write(tmp_path, resource(model_dir))
    with (
        TemporaryDirectory(prefix="up-") as temporary,
        RunningUp(["-f", file, "--port", port], env={"TMPDIR": temporary}) as up,
    ):
        up.wait_line(re.compile(r"rank 1 \(cpu, CPU, layers 4-7\): "), 60.0)
        started = up.processes()
        assert len(started.living()) >= 2
        assert up.stop() == 0
        assert started.wait_gone(GONE_TIMEOUT_S) == []
        assert list(Path(temporary).iterdir()) == []
