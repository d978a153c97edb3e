"""Who is to blame."""

import random

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from vllm_heteroinfer.launch.culprit import Evidence, Stuck, Weight, blame, blame_stuck, exit_code, weigh

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
    ("failure", "weight"),
    [
        (KILLED, Weight.OWN_END),
        (RAISED, Weight.OWN_ERROR),
        (CLOSED, Weight.LOST_PEER),
        (ABORTED, Weight.LOST_PEER),
        (ENGINE, Weight.ENGINE),
        (Failure(reason=FailureReason.API_SERVER_EXITED, message="", exit_code=-9), Weight.OWN_END),
        (Failure(reason=FailureReason.POD_LOST, message="closed its connection", pod=1), Weight.OWN_END),
        (Failure(reason=FailureReason.RANK_STOPPED, message="stopped", rank=1), Weight.OWN_END),
        (Failure(reason=FailureReason.RANK_EXITED, message="", rank=1, exit_code=3), Weight.OWN_END),
        (Failure(reason=FailureReason.CONFIG_MISMATCH, message="dtype differs", rank=1), Weight.OWN_ERROR),
    ],
)
def test_weight(failure: Failure, weight: Weight) -> None:
    assert weigh(failure) is weight


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "DistBackendError: NCCL communicator was aborted on rank 0",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_words_of_a_lost_peer(message: str) -> None:
    failure = Failure(reason=FailureReason.RANK_RAISED, message=message, rank=0)
    assert weigh(failure) is Weight.LOST_PEER


def test_cause_is_found_whatever_the_order() -> None:
    # The death is seen last, as over a slow network.
    evidence = [
        Evidence(failure=CLOSED, age_s=0.2),
        Evidence(failure=ABORTED, age_s=0.19),
        Evidence(failure=ENGINE, age_s=0.1),
        Evidence(failure=KILLED, age_s=0.01),
    ]
    for seed in range(10):
        random.Random(seed).shuffle(evidence)
        assert blame(evidence) == KILLED
    assert blame([e for e in evidence if e.failure is not KILLED]) == CLOSED
    assert blame([Evidence(failure=ENGINE)]) == ENGINE


def test_oldest_of_equals_is_the_cause() -> None:
    later = Failure(reason=FailureReason.RANK_EXITED, message="", pod=0, rank=0, exit_code=-11)
    assert blame([Evidence(failure=later, age_s=0.01), Evidence(failure=KILLED, age_s=0.02)]) == KILLED


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
def test_exit_code(failure: Failure, own_pod: int, code: int) -> None:
    assert exit_code(failure, own_pod) == code


def stuck(rank: int, busy_s: float, waiting_for: int | None = None) -> Stuck:
    return Stuck(rank=rank, pod=rank, busy="step 3", busy_s=busy_s, waiting_for_rank=waiting_for)


@pytest.mark.parametrize(
    ("ranks", "culprit"),
    [
        ([stuck(0, 299.0), stuck(1, 1.0)], None),
        ([stuck(0, 301.0), stuck(1, 1.0)], 0),
        ([stuck(0, 310.0, 1), stuck(1, 301.0)], 1),
        ([stuck(2, 310.0, 1), stuck(1, 310.0, 0), stuck(0, 305.0)], 0),
        # It began to wait before the other began to compute.
        ([stuck(0, 301.0, 1), stuck(1, 299.0)], 1),
        # Its message is lost: nobody else is late.
        ([stuck(0, 310.0, 1), stuck(1, 3.0)], 0),
        # Each waits for the other; one must be named, and the search must end.
        ([stuck(0, 310.0, 1), stuck(1, 310.0, 0)], 1),
        ([], None),
    ],
)
def test_stuck_rank(ranks: list[Stuck], culprit: int | None) -> None:
    failure = blame_stuck(ranks, 300.0)
    assert (failure.rank if failure else None) == culprit
