"""The linter of words: what it finds, and what it leaves alone; `make lint` runs it on this tree."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.words import (
    ALLOWED,
    GLOSSARY,
    AllowedText,
    find_in_path,
    find_retired,
    find_unneeded,
    main,
    read_allowed,
    read_retired,
)

RETIRED = read_retired(GLOSSARY.read_text())
OURS = read_allowed(tomllib.loads(ALLOWED.read_text()))


def found(text: str, allowed: Sequence[AllowedText] = (), path: str = "some/page.md") -> list[str]:
    return [name for _, name, _ in find_retired(path, text, RETIRED, allowed)]


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
        "rank_place",
        "member-list",
        "membership",
        "memberlist",
        "kvroom",
        "rankPlaces",
    ],
)
def test_a_name_counts_by_its_parts(text: str) -> None:
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "headroom",
        "bathrooms",
        "remember",
        "passed",
        "replace",
        "placement",
        "placeholder",
        "fallback",
        "bypass",
        "roomier",
        "passthrough",
    ],
)
def test_other_words_with_the_same_letters_stay(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "nouns"),
    [
        ("the tests pass", []),
        ("it passes a value to place", []),
        ("all pass, both place theirs, these pass on", []),
        ("what passes is recorded; a line that passes through, each passes", []),
        ("schedulers that place pods, which place them together", []),
        ("let the time pass", []),
        ("a pass over all", ["pass"]),
        ("ends the whole pass", ["pass"]),
        ("three passes", ["passes"]),
        ("after {count} passes", ["passes"]),
        ("the rank's place", ["place"]),
        ("the ranks' places", ["places"]),
        ("both places, all passes", ["places", "passes"]),
        ("these places, those passes", ["places", "passes"]),
        ("most passes, fewer places", ["passes", "places"]),
        ("such place, some pass, other places", ["place", "pass", "places"]),
        ("which place, what place, whose place", ["place", "place", "place"]),
        ("my place, your pass", ["place", "pass"]),
        ("in either place, at that place", ["place", "place"]),
        ("put into place, from place, has places", ["place", "place", "places"]),
        ("a second full pass, the `place`", ["pass", "place"]),
        ("two-pass, passes are counted", ["pass", "passes"]),
        ("it goes to the\nplace", ["place"]),
        ("# it goes to the\n# place", ["place"]),
        ("- it goes to the\n  place", ["place"]),
        ("    // a whole\n    // pass", ["pass"]),
        ("the\n\nplace", []),
        ("place: of a key", ["place"]),
        ('{"place": 1}', ["place"]),
        ("`rank.place`, `place=1`, `place.x`", ["place", "place", "place"]),
        ("`scheduler.place(pods)`", []),
        ("one_pass = 1", ["one_pass"]),
        ("places of ranks", ["places"]),
        ("Places of\nranks, the `pass` of an operator", ["Places", "pass"]),
        ("passes of the operator took 3 s", ["passes"]),
        ("a rank place, a reconcile pass", ["place", "pass"]),
        ("reconcile passes, three rank places", ["passes", "places"]),
        ("the operator places pods; a rank passes for another", []),
        ("place-hash, pass-count", ["place", "pass"]),
        ("pass 2: all, pass #3", ["pass", "pass"]),
        ("to place 3 pods", []),
        ("a pass takes 3 s; pass took 3 s", ["pass", "pass"]),
        ("passes end, passes per second", ["passes", "passes"]),
        ("the very place, its former place", ["place", "place"]),
        ('rank["place"]', ["place"]),
    ],
)
def test_a_word_that_is_a_verb_too_counts_as_a_noun(text: str, nouns: list[str]) -> None:
    assert found(text) == nouns


@pytest.mark.parametrize(
    ("code", "nouns"),
    [
        ("if full:\n    pass", []),
        ("def place(pods): ...", []),
        ("async def _pass(self): ...", []),
        ("scheduler.place(pods)", []),
        ("place = rank.place", ["place", "place"]),
        ("for place in places: ...", ["place", "places"]),
        ("def roll(passes: int, *, place=None): ...", ["passes", "place"]),
        ("settle(passes=3)", ["passes"]),
        ("class Place: ...", ["Place"]),
        ("at = Place(x=1)", ["Place"]),
        ("def places(self): ...", ["places"]),
        ("board.places()", ["places"]),
        ("rank._place = 1", ["place"]),
        ("import place", ["place"]),
        ("x = 1  # a\npass", []),
        ('x = "at the "\\\n    "place"', ["place"]),
        ('f"{self.place} of {count}"', ["place"]),
        ('"""Attributes:\n    places: of all.\n"""', ["places"]),
    ],
)
def test_such_a_word_is_a_noun_in_code_but_for_a_function(code: str, nouns: list[str]) -> None:
    assert found(code + "\n", path="some/code.py") == nouns


def test_a_finding_says_its_line() -> None:
    assert [line for line, _, _ in find_retired("a.py", "x = 1\n\n# of a\n# place\n", RETIRED, ())] == [4]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("docs/place.md", ["place"]),
        ("operator/src/room/rank.py", ["room"]),
        ("tests/test_kv_room.py", ["test_kv_room"]),
        ("docs/2026-first-pass.md", ["pass"]),
        ("docs/in-place.md", []),
        ("planning/placement.py", []),
    ],
)
def test_names_of_files_and_folders_count(path: str, names: list[str]) -> None:
    assert [name for name, _ in find_in_path(path, RETIRED, OURS)] == names


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("operator/src/heteroinfer_operator/reconcile/rollout.py", "group.members, status.members", []),
        ("operator/src/heteroinfer_operator/reconcile/another.py", "group.members", ["members"]),
        (
            "operator/src/heteroinfer_operator/reconcile/rollout.py",
            "self.members, rank.members",
            ["members"] * 2,
        ),
        ("operator/src/heteroinfer_operator/planning/topology.py", "group.members", ["members"]),
        ("operator/src/heteroinfer_operator/planning/topology.py", "members: list[str] = []", ["members"]),
        ("worker_image/src/heteroinfer_contract/plan.py", 'd["members"]', ["members"]),
        ("docs/operations.md", "`status.groups[].members`, `pods.members`", ["members"]),
        ("crds/heteroinference.yaml", "                    members:", []),
        ("examples/moe.yaml", "members:", ["members"]),
    ],
)
def test_the_field_of_the_wire_is_allowed_and_nothing_else(path: str, text: str, names: list[str]) -> None:
    assert found(text, OURS, path) == names


def test_the_files_of_that_field_are_named_one_by_one() -> None:
    of_the_field = [each for each in OURS if "members" in each.text.pattern]
    assert len(of_the_field) == 5
    assert not [glob for each in of_the_field for glob in each.files if "*" in glob]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("it takes place, taking place, has taken place, took place", []),
        ("in place of it, an in-place sum, in the first place", []),
        ("a place-holder, pass-through, pass_through", []),
        ("it takes its place; the first place", ["place", "place"]),
    ],
)
def test_idioms_are_allowed(text: str, names: list[str]) -> None:
    assert found(text, OURS) == names


def test_what_is_allowed_over_the_end_of_a_line_too() -> None:
    assert found("computed in\nplace of it", OURS) == []


def test_what_is_allowed_and_nobody_needs_is_found() -> None:
    allowed = [AllowedText(text=re.compile("OMP_PLACES"), files=("docs/*", "tests/*"))]
    assert list(find_unneeded({"docs/a.md": "OMP_PLACES", "tests/a.py": ""}, allowed)) == [
        ("OMP_PLACES", "tests/*")
    ]


def test_what_is_allowed_hides_nothing_beside_it() -> None:
    allowed = [AllowedText(text=re.compile(r"\bkv_room_bytes\b"), files=("some/*",))]
    assert found("kv_room_bytes and room", allowed) == ["room"]
    assert found(
        "kv_room_bytes", [AllowedText(text=re.compile(r"\bkv_room_bytes\b"), files=("other/*",))]
    ) == ["kv_room_bytes"]


def test_a_finding_says_what_to_use_and_where_another_meaning_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("the\nmember\n")
    assert main([str(page)]) == 1
    finding, ending = capsys.readouterr().out.splitlines()
    assert finding == f"{page}:2: member: for a rank, pod or process of a group: use rank, pod, or process"
    assert ending.startswith("1 retired (docs/glossary.md); a name of the wire, or of another meaning, goes")


def test_an_entry_has_its_reason() -> None:
    with pytest.raises(ValueError, match="has no reason"):
        read_allowed({"allowed": [{"text": "x"}]})
    assert ALLOWED.is_file()
