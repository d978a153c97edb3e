"""The message about the end of an epoch keeps the fix, and shortens the log line first."""

import json
from datetime import UTC, datetime

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ContainerTermination, PodView
from heteroinfer_operator.reconcile.epoch_end import find_epoch_end

FIX = "Raise the memory limit of the pod's role."


def ended(message: str, log: str) -> PodView:
    """Returns a pod whose worker has written this report."""
    report = {
        "reason": "RankExited",
        "message": message,
        "pod": 0,
        "rank": 0,
        "exit_code": -9,
        "last_log": log,
    }
    return PodView(
        name="llama-0-1-0",
        uid="u",
        created=datetime(2026, 11, 28, tzinfo=UTC),
        labels={names.LABEL_POD_INDEX: "0"},
        phase="Failed",
        termination=ContainerTermination(reason="Error", exit_code=1, message=json.dumps(report)),
    )


@pytest.mark.parametrize(
    ("message", "log", "expected"),
    [
        (FIX, "step 7", f"{FIX} (last log line: step 7)"),
        ("m" * 249 + FIX, "l" * 200, f"{'m' * 249}{FIX} (last log line: …{'l' * 79})"),
        ("m" * 400, "", f"{'m' * 369}…"),
        ("m" * 400, "l" * 200, f"{'m' * 289}… (last log line: …{'l' * 79})"),
    ],
    ids=["short", "long log line", "long message", "both long"],
)
def test_a_long_log_line_is_shortened_before_the_message(message: str, log: str, expected: str) -> None:
    epoch_end = find_epoch_end([ended(message, log)])
    assert epoch_end is not None
    assert epoch_end.message == expected
