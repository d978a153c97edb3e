"""The failure report of an asking rank names the late rank. Other reports name the rank itself."""

import pytest

from heteroinfer_contract.failure import FailureReason
from tests.unit.launch.test_environment import PLAN
from vllm_heteroinfer.feed_forward.lane_judge import LaneError, LaneFailedError
from vllm_heteroinfer.rank.entry import build_failure


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LaneError(1, "feed-forward rank 1: got no answer"), FailureReason.STEP_TIMEOUT),
        (LaneFailedError(1, "feed-forward rank 1: its computation failed"), FailureReason.RANK_RAISED),
    ],
)
def test_an_accusation_names_the_accused_rank(error: LaneError, reason: FailureReason) -> None:
    seen = build_failure(error, PLAN.ranks[0], starting=False)
    assert (seen.reason, seen.rank, seen.message) == (reason, 1, str(error))


def test_a_ranks_own_report_has_the_kind_of_its_exception() -> None:
    seen = build_failure(OSError("expert weights: Input/output error"), PLAN.ranks[1], starting=False)
    assert (seen.reason, seen.rank) == (FailureReason.RANK_RAISED, 1)
    assert seen.message == "OSError: expert weights: Input/output error"
