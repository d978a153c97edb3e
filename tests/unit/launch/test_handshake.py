"""The handshake accepts two ends with the same key, and refuses all other and all repeated lines."""

import pytest

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey
from vllm_heteroinfer.launch.handshake import Opening, Seal, build_opening, check_reply, reply_to

KEY, OTHER = EpochKey(b"k" * 32), EpochKey(b"o" * 32)


def connect(key: EpochKey = KEY) -> tuple[Seal, Seal]:
    opening = build_opening(key, 1)
    reply, leader = reply_to(key, codec.to_json(opening))
    return leader, check_reply(key, opening, codec.to_json(reply))


def test_both_ends_of_a_connection_accept_each_other() -> None:
    leader, follower = connect()
    for line in ("one", "two", "", "three with spaces"):
        assert follower.open(leader.seal(line)) == line
        assert leader.open(follower.seal(line)) == line


def test_a_follower_without_the_key_gets_no_answer() -> None:
    for line in (codec.to_json(build_opening(OTHER, 1)), "GET / HTTP/1.1", "", '{"pod": 1}'):
        with pytest.raises(ContractError):
            reply_to(KEY, line)


def test_a_follower_refuses_a_leader_without_the_key() -> None:
    opening = build_opening(KEY, 1)
    forged, _ = reply_to(OTHER, codec.to_json(build_opening(OTHER, 1)))
    with pytest.raises(ContractError, match="does not have this epoch's key"):
        check_reply(KEY, opening, codec.to_json(forged))
    recorded, _ = reply_to(KEY, codec.to_json(build_opening(KEY, 1)))
    with pytest.raises(ContractError, match="does not have this epoch's key"):
        check_reply(KEY, opening, codec.to_json(recorded))


def test_a_replayed_opening_gives_no_connection() -> None:
    """The leader answers with a new nonce, for which the recorded messages are wrong."""
    opening = build_opening(KEY, 1)
    reply, _ = reply_to(KEY, codec.to_json(opening))
    recorded = check_reply(KEY, opening, codec.to_json(reply)).seal("hello")
    _, again = reply_to(KEY, codec.to_json(opening))
    with pytest.raises(ContractError):
        again.open(recorded)
    with pytest.raises(ContractError):
        reply_to(KEY, codec.to_json(Opening(pod=2, nonce=opening.nonce, code=opening.code)))


def test_lines_that_are_repeated_left_out_changed_or_sent_back_are_refused() -> None:
    leader, follower = connect()
    first, second = leader.seal("first"), leader.seal("second")
    for wrong in (second, first.replace("first", "other"), follower.seal("first"), "first", ""):
        with pytest.raises(ContractError, match="not signed with"):
            follower.open(wrong)
    assert follower.open(first) == "first"
    with pytest.raises(ContractError, match="not signed with"):
        follower.open(first)
    assert follower.open(second) == "second"
