"""Tests asks to ranks of other pods between real processes: answers, named failures, refused strangers."""

import json
import subprocess
from typing import Any

import pytest

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

NAMED_WITHIN_S = 2.0
OWN_NETWORK = ("unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "bash")


def play(case: str, *options: str, before: tuple[str, ...] = ()) -> Any:
    """Runs a case of `pod_protocol`, and returns its result."""
    module = "tests.integration.feed_forward.pod_protocol"
    command = [*before, str(WORKER_PYTHON), "-m", module, case, *options]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("pods", "own"), [(1, 0), (2, 1)])
def test_every_answer_of_other_pods_is_right(pods: int, own: int) -> None:
    got = play("stress", "--count", "1000", "--pods", str(pods), "--own", str(own))
    assert got == {"right": 1000, "exit_codes": [0] * own}


def check_named(named: list[Any]) -> None:
    """Checks that each damaged pod was named in time."""
    for hurt, accused, seconds, words in named:
        assert accused == hurt, words
        assert seconds < NAMED_WITHIN_S, words


def test_a_broken_connection_blames_the_pod_of_a_killed_rank() -> None:
    named = play("killed", "--pods", "2", "--times", "2")["named"]
    check_named(named)
    assert any("its connection broke" in words for *_, words in named), named


def test_blames_the_pod_of_a_stopped_rank_that_has_received_the_ask() -> None:
    named = play("stopped", "--pods", "2", "--times", "2")["named"]
    check_named(named)
    assert all("its machine has received the request" in words for *_, words in named), named


def test_blames_the_pod_with_a_half_open_connection() -> None:
    named = play("cut", "--pods", "2", "--times", "2", before=OWN_NETWORK)["named"]
    check_named(named)
    assert all("does not respond" in words or "acknowledged" in words for *_, words in named), named


def test_a_pod_that_computes_for_too_long_is_named() -> None:
    got = play("late")
    assert got["rank"] == 1
    assert "its machine has received the request" in got["words"]
    assert got["seconds"] < NAMED_WITHIN_S


def test_a_network_delay_is_measured_and_answers_stay_right() -> None:
    got = play("delayed", "--count", "20")
    for delay_ms, (asks_ms, measured_ms, failures) in got.items():
        assert failures == 0
        assert min(asks_ms, measured_ms) >= 2 * int(delay_ms)


def test_foreign_connections_are_refused_and_delay_no_rank() -> None:
    got = play("strangers")
    assert all(got["refused"]), got
    assert got["same_token"]
    assert got["token"]
    assert got["seconds"] < 1, "silent or slow strangers keep the asking rank out"
    assert got["late_s"] < 2, "a stranger holds the listener beyond its deadline"
