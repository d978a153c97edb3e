"""The choice of the failure that caused a group's end."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import RankStatus
from vllm_heteroinfer.launch.culprit import Evidence, Weight, exit_code, most_likely_cause, weigh
from vllm_heteroinfer.launch.readiness import find_stuck_rank
from vllm_heteroinfer.launch.supervisor_messages import RankBeat
from vllm_heteroinfer.pod.lost_peer import Lost

KILLED = Failure(reason=FailureReason.RANK_EXITED, message="killed", pod=1, rank=1, exit_code=-9)
CLOSED = Failure(
    reason=FailureReason.RANK_RAISED,
    message="RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
    pod=0,
    rank=0,
    exit_code=1,
)
RAISED = Failure(
    reason=FailureReason.RANK_RAISED, message="ValueError: shape [4, 4], expected [8, 4]", pod=2, rank=2
)
ABORTED = Failure(
    reason=FailureReason.RANK_EXITED,
    message="aborted",
    pod=2,
    rank=3,
    exit_code=-6,
    last_log="  what():  [enforce fail at pair.cc] Connection reset by peer [10.0.0.7]:41234",
)
ENGINE = Failure(reason=FailureReason.API_SERVER_EXITED, message="exited with code 1", pod=0, exit_code=1)


@pytest.mark.parametrize(
    ("evidence", "weight"),
    [
        (Evidence(failure=KILLED), Weight.OWN_END),
        (Evidence(failure=RAISED), Weight.OWN_ERROR),
        (Evidence(failure=RAISED, accused=True), Weight.ACCUSED),
        (Evidence(failure=CLOSED, lost=Lost.RANK), Weight.LOST_PEER),
        (Evidence(failure=CLOSED, lost=Lost.ENGINE), Weight.LOST_ENGINE),
        (Evidence(failure=CLOSED), Weight.OWN_ERROR),
        (Evidence(failure=ABORTED), Weight.OWN_ERROR),
        (Evidence(failure=ENGINE), Weight.ENGINE),
        (Evidence(failure=replace(ENGINE, exit_code=-9)), Weight.OWN_END),
        (Evidence(failure=replace(ENGINE, exit_code=-6)), Weight.ENGINE),
        (Evidence(failure=Failure(reason=FailureReason.POD_LOST, message="closed", pod=1)), Weight.OWN_END),
        (Evidence(failure=Failure(reason=FailureReason.RANK_STOPPED, message="", rank=1)), Weight.OWN_END),
        (Evidence(failure=replace(KILLED, exit_code=3)), Weight.OWN_END),
        (
            Evidence(failure=Failure(reason=FailureReason.CONFIG_MISMATCH, message="dtype", rank=1)),
            Weight.OWN_ERROR,
        ),
    ],
)
def test_evidence_nearer_to_the_cause_counts_more(evidence: Evidence, weight: Weight) -> None:
    assert weigh(evidence) is weight


@given(st.sampled_from(list(FailureReason)), st.text(max_size=40), st.text(max_size=40))
def test_the_text_of_an_error_does_not_decide_the_culprit(
    reason: FailureReason, message: str, last_log: str
) -> None:
    failure = Failure(reason=reason, message=message, last_log=last_log, rank=1, pod=1, exit_code=1)
    gloo = replace(failure, message="Connection closed by peer (gloo)", last_log="DistNetworkError: gloo")
    assert weigh(Evidence(failure=failure)) is weigh(Evidence(failure=gloo))


def test_the_cause_is_found_in_any_order_of_reports() -> None:
    # The evidence of the killed rank arrives last, as over a slow network.
    evidence = [
        Evidence(failure=CLOSED, age_s=0.2, lost=Lost.RANK),
        Evidence(failure=ABORTED, age_s=0.19),
        Evidence(failure=ENGINE, age_s=0.1),
        Evidence(failure=KILLED, age_s=0.01),
    ]
    for seed in range(10):
        random.Random(seed).shuffle(evidence)
        assert most_likely_cause(evidence) == KILLED
    assert most_likely_cause([e for e in evidence if e.failure is not KILLED]) == ABORTED
    assert most_likely_cause([e for e in evidence if e.failure in (CLOSED, ENGINE)]) == CLOSED
    assert most_likely_cause([Evidence(failure=ENGINE)]) == ENGINE


def test_an_input_error_of_a_rank_is_not_a_lost_peer() -> None:
    """A rank failed to read from NFS. The end of the engine then ended another rank."""
    own = replace(RAISED, message="OSError: [Errno 104] Connection reset by peer while reading /models (NFS)")
    gone = replace(CLOSED, message="PeerGoneError: the engine's calls have ended")
    evidence = [Evidence(failure=own, age_s=2.0), Evidence(failure=gone, age_s=0.1, lost=Lost.ENGINE)]
    assert most_likely_cause(evidence) == own


OWN_WORDS = st.sampled_from(
    [
        RAISED,
        replace(RAISED, reason=FailureReason.BAD_SETTINGS),
        replace(RAISED, reason=FailureReason.RANK_EXITED, exit_code=-9),
        replace(RAISED, reason=FailureReason.RANK_EXITED, exit_code=-6),
        replace(RAISED, reason=FailureReason.RANK_STOPPED),
        replace(RAISED, reason=FailureReason.CONFIG_MISMATCH),
    ]
)
"""Of rank 2."""


@st.composite
def accused_ranks(draw: st.DrawFn) -> tuple[Failure, list[Evidence]]:
    """Draws rank 2's report of its own failure, and evidence of others: accusations and lost connections."""
    ages = st.floats(0.0, 5.0)
    own = draw(OWN_WORDS)
    accusation = replace(RAISED, reason=FailureReason.STEP_TIMEOUT, message="rank 2 gave no answer")
    others = [
        *(
            Evidence(failure=accusation, age_s=draw(ages), accused=True)
            for _ in range(draw(st.integers(1, 3)))
        ),
        *(
            Evidence(failure=replace(CLOSED, rank=rank), age_s=draw(ages), lost=draw(st.sampled_from(Lost)))
            for rank in draw(st.sets(st.sampled_from([0, 1, 3])))
        ),
    ]
    if draw(st.booleans()):
        others.append(Evidence(failure=ENGINE, age_s=draw(ages)))
    evidence = [*others, Evidence(failure=own, age_s=draw(ages))]
    return own, draw(st.permutations(evidence))


@given(accused_ranks())
def test_a_ranks_own_report_comes_before_reports_of_others(drawn: tuple[Failure, list[Evidence]]) -> None:
    """The order and the age of the reports do not matter."""
    own, evidence = drawn
    assert most_likely_cause(evidence) == own


@given(accused_ranks())
def test_an_accusation_is_nearer_to_the_cause_than_a_lost_connection(
    drawn: tuple[Failure, list[Evidence]],
) -> None:
    own, evidence = drawn
    blamed = most_likely_cause([e for e in evidence if e.failure is not own])
    assert (blamed.rank, blamed.message) == (2, "rank 2 gave no answer")


def test_the_oldest_of_equal_reports_is_the_cause() -> None:
    later = Failure(reason=FailureReason.RANK_EXITED, message="", pod=0, rank=0, exit_code=-11)
    assert (
        most_likely_cause([Evidence(failure=later, age_s=0.01), Evidence(failure=KILLED, age_s=0.02)])
        == KILLED
    )


@pytest.mark.parametrize(
    ("failure", "own_pod", "code"),
    [
        (KILLED, 1, names.EXIT_RANK_FAILED),
        (KILLED, 0, names.EXIT_PEER_FAILED),
        (Failure(reason=FailureReason.PLAN_MISMATCH, message="", pod=1), 0, names.EXIT_REFUSED),
        (Failure(reason=FailureReason.CONFIG_MISMATCH, message="", pod=1), 1, names.EXIT_REFUSED),
        (Failure(reason=FailureReason.STARTUP_TIMEOUT, message=""), 1, names.EXIT_STARTUP_TIMEOUT),
        (Failure(reason=FailureReason.BAD_SETTINGS, message="", pod=1), 1, names.EXIT_USAGE),
        (Failure(reason=FailureReason.BAD_SETTINGS, message="", pod=1), 0, names.EXIT_PEER_FAILED),
        (
            Failure(reason=FailureReason.BAD_SETTINGS, message="", pod=0, exit_code=1),
            0,
            names.EXIT_RANK_FAILED,
        ),
        (Failure(reason=FailureReason.POD_LOST, message="", pod=1), 0, names.EXIT_PEER_FAILED),
    ],
)
def test_the_exit_code_shows_whether_this_pod_is_to_blame(failure: Failure, own_pod: int, code: int) -> None:
    assert exit_code(failure, own_pod) == code


def stuck(rank: int, busy_s: float, waiting_for: int | None = None) -> RankBeat:
    status = RankStatus(rank=rank, pod=rank)
    return RankBeat(status=status, busy="step 3", busy_s=busy_s, waiting_for_rank=waiting_for)


def silent(rank: int, silent_s: float) -> RankBeat:
    return RankBeat(status=RankStatus(rank=rank, pod=rank), silent_s=silent_s)


@pytest.mark.parametrize(
    ("ranks", "culprit"),
    [
        ([stuck(0, 299.0), stuck(1, 1.0)], None),
        ([stuck(0, 301.0), stuck(1, 1.0)], 0),
        ([stuck(0, 310.0, 1), stuck(1, 301.0)], 1),
        ([stuck(2, 310.0, 1), stuck(1, 310.0, 0), stuck(0, 305.0)], 0),
        # Rank 0 began to wait before rank 1 began to compute.
        ([stuck(0, 301.0, 1), stuck(1, 299.0)], 1),
        # No other rank is late, so the message that rank 0 waits for was lost.
        ([stuck(0, 310.0, 1), stuck(1, 3.0)], 0),
        # The ranks wait for each other. The search must end, and name one of them.
        ([stuck(0, 310.0, 1), stuck(1, 310.0, 0)], 1),
        ([], None),
    ],
)
def test_names_the_rank_that_blocks_the_others(ranks: list[RankBeat], culprit: int | None) -> None:
    failure = find_stuck_rank(ranks, 300.0)
    assert (failure.rank if failure else None) == culprit


@pytest.mark.parametrize(
    ("ranks", "culprit", "reason"),
    [
        # Rank 1 hangs and sends nothing. Its last report does not show that it is busy.
        ([stuck(0, 310.0, 1), silent(1, 305.0)], 1, FailureReason.RANK_STOPPED),
        ([stuck(0, 301.0, 1), silent(1, 299.0)], 1, FailureReason.RANK_STOPPED),
        ([silent(1, 301.0)], 1, FailureReason.RANK_STOPPED),
        ([silent(1, 299.0)], None, None),
        # The wait in the last report of a silent rank is outdated.
        (
            [replace(stuck(0, 310.0, 1), silent_s=309.0), stuck(1, 305.0, 2), stuck(2, 1.0)],
            0,
            FailureReason.RANK_STOPPED,
        ),
    ],
)
def test_names_a_silent_rank_as_the_culprit(
    ranks: list[RankBeat], culprit: int | None, reason: FailureReason | None
) -> None:
    failure = find_stuck_rank(ranks, 300.0)
    assert (failure and failure.rank, failure and failure.reason) == (culprit, reason)
