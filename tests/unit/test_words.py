"""The linter of words: what it finds, and what it leaves alone; `make lint` runs it on this tree."""

import re
from collections.abc import Sequence

import pytest

from tests.words import ALLOWED, GLOSSARY, AllowedText, find_retired, read_allowed, read_retired

RETIRED = read_retired(GLOSSARY.read_text())


def found(text: str, allowed: Sequence[AllowedText] = ()) -> list[str]:
    return [name for _, name, _ in find_retired("some/file.py", text, RETIRED, allowed)]


def test_the_glossary_retires_what_it_says() -> None:
    assert {"member", "members", "place", "room", "fell", "told", "heard", "pass"} <= RETIRED.keys()
    assert RETIRED["pass"].noun_only
    assert RETIRED["pass"].instead == "reconcile, or resync"
    assert not RETIRED["room"].noun_only


@pytest.mark.parametrize(
    "text",
    [
        "kv_room",
        "kvRoom",
        "KV_ROOM",
        "class RoomOfRank",
        "there is no room.",
        "`members`",
        "it fell",
        "_told_at",
    ],
)
def test_a_name_counts_by_its_parts(text: str) -> None:
    assert len(found(text)) == 1


@pytest.mark.parametrize("text", ["headroom", "bathrooms", "remember", "passed", "replace", "placement"])
def test_other_words_with_the_same_letters_stay(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "nouns"),
    [
        ("        pass", []),
        ("except OSError: pass", []),
        ("the tests pass", []),
        ("it passes a value to place", []),
        ("a pass over all", ["pass"]),
        ("ends the whole pass", ["pass"]),
        ("three passes", ["passes"]),
        ("the rank's place", ["place"]),
        ("schedulers that place pods", []),
        ("one_pass = 1", ["one_pass"]),
    ],
)
def test_a_word_that_is_a_verb_too_counts_as_a_noun(text: str, nouns: list[str]) -> None:
    assert found(text) == nouns


def test_what_is_allowed_hides_nothing_beside_it() -> None:
    allowed = [AllowedText(text=re.compile(r"\bkv_room_bytes\b"), files=("some/*",))]
    assert found("kv_room_bytes and room", allowed) == ["room"]
    assert found(
        "kv_room_bytes", [AllowedText(text=re.compile(r"\bkv_room_bytes\b"), files=("other/*",))]
    ) == ["kv_room_bytes"]


def test_an_entry_has_its_reason() -> None:
    with pytest.raises(ValueError, match="has no reason"):
        read_allowed({"allowed": [{"text": "x"}]})
    assert ALLOWED.is_file()
