"""The code that raises an error marks the error as a lost peer. The text of the error does not matter."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.failure import FailureReason
from tests.unit.launch.test_environment import PLAN
from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.pod.lost_peer import Conversation, Lost, PeerGoneError, find_lost_process
from vllm_heteroinfer.rank.entry import build_failure

WORDS = [
    "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
    "[Errno 104] Connection reset by peer while reading /models/shard-3.safetensors (NFS)",
    "no weights in /models/gloo-7b",
    "timed out waiting for lock /cache/.lock",
    "Broken pipe",
    "ProcessGroupGloo: rank 1 is gone",
    "weights of layer 3 have shape [4, 4], expected [8, 4]",
]
KINDS: list[Callable[[str], Exception]] = [
    RuntimeError,
    OSError,
    ConnectionResetError,
    ValueError,
    MemoryError,
]


def raised(error: Exception) -> Exception:
    """Raises an error in this module, so that the error has a traceback. Returns the error."""
    try:
        raise error
    except Exception as same:
        return same


@given(st.sampled_from(KINDS), st.sampled_from(WORDS))
def test_a_ranks_own_error_is_recognized_with_any_text(kind: Callable[[str], Exception], words: str) -> None:
    assert find_lost_process(raised(kind(words))) is None


@given(st.sampled_from(KINDS[:3]), st.sampled_from(WORDS), st.none() | st.integers(0, 3))
def test_a_connection_error_counts_as_a_lost_peer_whatever_its_text(
    kind: Callable[[str], Exception], words: str, peer: int | None
) -> None:
    with pytest.raises(PeerGoneError) as caught, Conversation(peer, "a send"):
        raise kind(words)
    assert caught.value.peer == peer
    assert words in str(caught.value)
    assert find_lost_process(caught.value) is (Lost.ENGINE if peer is None else Lost.RANK)


def test_an_error_that_a_lost_peer_caused_counts_as_a_lost_peer() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("the step failed") from PeerLostError(1, 2.0, "no sign of it")
    assert find_lost_process(caught.value) is Lost.RANK


def test_an_error_of_our_code_during_a_conversation_is_not_a_lost_peer() -> None:
    with pytest.raises(ValueError, match="shape"), Conversation(1, "a send"):
        raise ValueError("shape")


def test_a_conversation_keeps_the_peer_of_an_error_that_names_one() -> None:
    with pytest.raises(PeerLostError) as caught, Conversation(2, "a send"):
        raise PeerLostError(1, 2.0, "no sign of it")
    assert caught.value.peer == 1


@pytest.mark.parametrize(
    ("starting", "reason"), [(True, FailureReason.STARTUP_TIMEOUT), (False, FailureReason.RANK_RAISED)]
)
def test_a_timeout_while_serving_does_not_count_as_a_startup_timeout(
    starting: bool, reason: FailureReason
) -> None:
    seen = build_failure(TimeoutError("rank 1 sent nothing"), PLAN.ranks[0], starting=starting)
    assert (seen.reason, "rank 1 sent nothing" in seen.message) == (reason, True)
