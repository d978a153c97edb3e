"""A code of a key is valid only for its purpose, its parts and its key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey, GroupKey, RecordKey

KEY = GroupKey.of_group(b"o" * 32, "uid-1/0")
texts = st.text(max_size=8)


def test_keys_of_other_operators_groups_or_epochs_do_not_verify_a_code() -> None:
    others = [
        GroupKey.of_group(b"p" * 32, "uid-1/0").of_epoch(2),
        GroupKey.of_group(b"o" * 32, "uid-1/1").of_epoch(2),
        KEY.of_epoch(1),
        KEY.of_epoch(2).session("nonce"),
    ]
    code = KEY.of_epoch(2).code("leader", "1", "nonce")
    assert GroupKey.of_group(b"o" * 32, "uid-1/0").of_epoch(2).verifies(code, "leader", "1", "nonce")
    assert not any(other.verifies(code, "leader", "1", "nonce") for other in others)


@given(st.tuples(texts, st.lists(texts, max_size=3)), st.tuples(texts, st.lists(texts, max_size=3)))
def test_a_code_is_valid_for_one_purpose_and_exactly_its_parts(
    one: tuple[str, list[str]], other: tuple[str, list[str]]
) -> None:
    key = KEY.of_epoch(1)
    assert key.verifies(key.code(one[0], *one[1]), other[0], *other[1]) is (one == other)


def test_reads_a_key_from_the_environment_and_its_fingerprint_hides_it() -> None:
    assert GroupKey.from_env({names.ENV_GROUP_KEY: KEY.text}) == KEY
    assert GroupKey.from_env({}) is None
    assert KEY.fingerprint not in KEY.text


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("zz", "other characters"),
        ("ab", "2 digits"),
        ("abc", "3 digits"),
        (KEY.text + "00", "66 digits"),
        ("ä" * 64, "other characters"),
    ],
)
def test_refuses_an_invalid_key_without_showing_it(text: str, got: str) -> None:
    with pytest.raises(ContractError, match=rf"must be 64 hex digits \(got {got}\)") as refusal:
        GroupKey.from_env({names.ENV_GROUP_KEY: text})
    assert text not in str(refusal.value)


def test_the_repr_of_a_key_does_not_contain_its_secret() -> None:
    for value in (KEY, KEY.of_epoch(1)):
        assert value.secret.hex() not in repr(value)
        assert repr(value.secret) not in repr(value)


def test_a_signed_text_is_valid_only_under_its_name() -> None:
    key = KEY.of_epoch(3)
    signed = key.sign("store", "rank/1", '{"addr": "tcp://10.0.0.1:5"}')
    assert key.read_signed("store", "rank/1", signed) == '{"addr": "tcp://10.0.0.1:5"}'
    wrong: list[tuple[EpochKey, str, str, str]] = [
        (key, "store", "rank/2", signed),
        (key, "hello", "rank/1", signed),
        (KEY.of_epoch(2), "store", "rank/1", signed),
        (key, "store", "rank/1", signed.replace("10.0.0.1", "10.6.6.6")),
        (key, "store", "rank/1", '{"addr": "tcp://10.6.6.6:5"}'),
        (key, "store", "rank/1", ""),
    ]
    for by, purpose, name, text in wrong:
        with pytest.raises(ContractError, match="without a valid signature of this epoch"):
            by.read_signed(purpose, name, text)


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=4), texts)
def test_the_code_of_an_object_is_valid_for_exactly_its_parts(
    one: list[str], other: list[str], wrong: str
) -> None:
    key = RecordKey.of_operator(b"o" * 32)
    assert key.verifies(key.code(*one), *other) is (one == other)
    assert not key.verifies(wrong, *one)
    assert not RecordKey.of_operator(b"p" * 32).verifies(key.code(*one), *one)


def test_no_group_can_make_the_code_of_an_object() -> None:
    """The pods of a group have the group's key, but must not sign objects."""
    key = RecordKey.of_operator(b"o" * 32)
    of_groups = [KEY.secret, *(KEY.of_epoch(epoch).secret for epoch in range(3)), b"o" * 32]
    assert key.secret not in of_groups
    assert GroupKey.of_group(b"o" * 32, "").secret != key.secret
    assert key.code("a") not in {EpochKey(secret).code("object", "a") for secret in of_groups}
    assert key.fingerprint not in {key.secret.hex()[:10], KEY.fingerprint}
    assert key.secret.hex() not in repr(key)
