"""Only a reader with the key gets the full report, once for each challenge."""

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey
from heteroinfer_contract.report_access import (
    CHALLENGE_HEADER,
    CHALLENGE_LIFE_S,
    CODE_HEADER,
    CREDENTIALS_HEADER,
    SCHEME,
    ReportGuard,
    ReportReader,
)

KEY, OTHER = EpochKey(b"k" * 32), EpochKey(b"o" * 32)


def answer(guard: ReportGuard, headers: dict[str, str], now_s: float) -> dict[str, str]:
    """Returns the headers of a leader's answer: to a reader with the key, or to another reader."""
    challenge = guard.accepted_challenge(headers.get(CREDENTIALS_HEADER, ""), now_s)
    said = {CHALLENGE_HEADER: f"{SCHEME} {guard.challenge(now_s)}"}
    return said if challenge is None else {**said, CODE_HEADER: guard.code_of_report(challenge, "whole")}


def test_a_reader_with_the_key_gets_the_report_until_the_challenge_expires() -> None:
    guard, reader = ReportGuard(KEY), ReportReader(KEY)
    assert reader.read(answer(guard, reader.request_headers(), 100.0), "part") is None
    for now_s in (100.1, 110.0, 139.0):
        assert reader.read(answer(guard, reader.request_headers(), now_s), "whole") == "whole"
    late = 139.0 + CHALLENGE_LIFE_S + 0.1
    assert reader.read(answer(guard, reader.request_headers(), late), "part") is None
    assert reader.read(answer(guard, reader.request_headers(), late), "whole") == "whole"


def test_a_reader_without_the_key_gets_the_public_report() -> None:
    guard = ReportGuard(KEY)
    assert ReportReader(None).read(answer(guard, {}, 1.0), "part") == "part"
    assert ReportReader(KEY).read({}, "of 0.1.0") == "of 0.1.0"
    stranger = ReportReader(OTHER)
    for _ in range(3):
        assert stranger.read(answer(guard, stranger.request_headers(), 1.0), "part") is None


def test_credentials_are_valid_once_and_only_at_their_leader() -> None:
    guard, reader = ReportGuard(KEY), ReportReader(KEY)
    reader.read(answer(guard, {}, 1.0), "part")
    credentials = reader.request_headers()[CREDENTIALS_HEADER]
    assert ReportGuard(KEY).accepted_challenge(credentials, 1.0) is None
    assert guard.accepted_challenge(credentials, 1.0) is not None
    assert guard.accepted_challenge(credentials, 1.0) is None


@pytest.mark.parametrize(
    "text", ["", "HeteroInfer", "HeteroInfer a/b/c/d", "Basic x", "HeteroInfer ///", "ä/ö/ü/ß"]
)
def test_invalid_challenges_are_not_accepted(text: str) -> None:
    assert ReportGuard(KEY).accepted_challenge(text, 1.0) is None


def test_an_answer_without_the_leaders_signature_is_refused() -> None:
    guard, reader = ReportGuard(KEY), ReportReader(KEY)
    reader.read(answer(guard, {}, 1.0), "part")
    said = answer(guard, reader.request_headers(), 1.0)
    with pytest.raises(ContractError, match="without the leader's signature"):
        reader.read(said, "changed on its way")
