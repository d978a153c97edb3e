"""Tests that a follower makes the calls that its leader announced, or names a different call."""

import json
import subprocess
from typing import Any

import pytest

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def ran() -> Any:
    """Returns the calls of leader and follower, by the follower's mistake."""
    command = [
        str(WORKER_PYTHON),
        "-m",
        "tests.integration.worker.following_probe",
        "none",
        "twice",
        "short",
        "more",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=900, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def test_each_forward_and_computation_of_logits_is_followed(ran: Any) -> None:
    right = ran["none"]
    assert right["leader"] == [["forward", 5], ["logits", 2], ["forward", 16]]
    assert right["follower"] == right["leader"]
    assert right["error"] == ""


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "twice",
            "the model must run passes of [5] tokens, as the stage's first rank announced (ran [5, 5])",
        ),
        ("short", "the model must run passes of [5] tokens, as the stage's first rank announced (ran [4])"),
        ("more", "this rank must run all 3 passes that the stage's first rank announced (ran 2)"),
    ],
)
def test_names_a_call_that_was_not_announced(mistake: str, message: str, ran: Any) -> None:
    assert message in ran[mistake]["error"]
