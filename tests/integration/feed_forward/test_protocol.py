"""Tests the slab's protocol between real processes: answers, time limits of waits, and idle CPU time.

A lane is the place of one feed-forward rank in the slab. Here, a small process serves each lane.
"""

import json
import subprocess
from typing import Any

import pytest

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

IDLE_CORES = 0.02
"""CPU time of a lane without asks for a second."""


def play(case: str, *options: str) -> Any:
    """Runs a case of `protocol`, and returns its result."""
    command = [str(WORKER_PYTHON), "-m", "tests.integration.feed_forward.protocol", case, *options]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("lanes", [1, 2])
def test_every_answer_is_right(lanes: int) -> None:
    count = 20_000
    got = play("stress", "--count", str(count), "--lanes", str(lanes))
    assert got["right"] == count
    assert got["asks"] == [count + 1] * lanes  # one ask is the probe
    assert got["exit_codes"] == [0] * lanes


def test_the_stress_test_counts_wrong_answers() -> None:
    assert play("wrong", "--count", "1000")["right"] == 499


def test_a_killed_process_of_a_lane_is_reported() -> None:
    got = play("killed", "--lanes", "2")
    assert got["asks"] > 0
    assert got["rank"] == 2
    assert got["seconds"] < 2.0
    assert got["exit_codes"] == [0, -9]


def test_a_stopped_slab_ends_every_wait() -> None:
    got = play("stopped", "--lanes", "2")
    assert got["seconds"] < 1.0
    assert got["exit_codes"] == [0, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_device_that_gave_up_ends_the_group_even_if_the_lane_answers_later(lanes: int) -> None:
    got = play("gave up", "--lanes", str(lanes))
    assert (got["before"], got["rank"]) == (0, lanes)
    assert "no answer" in got["words"]
    assert "gave up" in got["refused"]  # no token of that step is answered


def test_blames_a_late_lane_that_answered_before_the_check() -> None:
    assert play("given up late", "--lanes", "3") == {"seen late": 3, "named by the device": 3}


def test_a_frozen_asking_rank_blames_no_lane() -> None:
    got = play("frozen", "--lanes", "3")
    assert (got["named"], got["watch"]) == ("", [])
    assert got["longest_s"] > 3.0  # the freeze happened during an ask
    assert 0 < got["turns"] < 30  # A device counts the checks of its watch, and a frozen watch makes none.
    assert got["exit_codes"] == [0, 0, 0]


def test_reports_a_lane_that_is_stopped_while_the_asking_rank_runs() -> None:
    got = play("silent", "--lanes", "3")
    assert [rank for rank, _ in got["named"]] == [3, 3]
    assert all(seconds < 2.0 for _, seconds in got["named"]), got


def test_an_ask_that_does_not_fit_is_refused() -> None:
    assert set(play("misfits")["said"]) == {"an MLP's", "an expert's", "type", "rows", "width"}


def test_the_time_limit_of_a_lane_follows_its_warm_up_times() -> None:
    got = play("limits")
    assert got["fast"] == pytest.approx([1.502, 3.5])
    assert got["slow layer"] == pytest.approx([10.002, 12.0])


def test_a_lane_without_asks_uses_almost_no_cpu_time() -> None:
    got = play("idle")
    assert all(cores < IDLE_CORES for cores in got["cores"]), got
