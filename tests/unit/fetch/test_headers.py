"""The time limit for the description of a hub's model."""

import signal
import socket
import time

import pytest

from heteroinfer_contract.failure import FailureReason
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.headers import time_limit


def test_a_read_ends_if_a_hub_never_ends_its_answer() -> None:
    ours, theirs = socket.socketpair()
    began, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    with ours, theirs, pytest.raises(FetchError, match=r"within 0\.1 s") as refused, time_limit(0.1):
        ours.recv(1)
    assert time.monotonic() - began < 5
    assert (refused.value.reason, refused.value.is_temporary) == (FailureReason.MODEL_HUB_UNREACHABLE, True)
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is before
