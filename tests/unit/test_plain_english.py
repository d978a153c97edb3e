"""Product code and docs get no harder to read (tests/plain_english.py)."""

import json
from pathlib import Path

import pytest

from tests import plain_english


def test_no_file_got_harder_to_read() -> None:
    recorded = json.loads(plain_english.RECORD.read_text())
    assert plain_english.worse(plain_english.counts(), recorded) == {}, (
        "write plainer English: `python -m tests.plain_english --hits FILE` lists the hits. "
        "If you moved or split a page, run `python -m tests.plain_english --record`"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Returns what is left of it,\n\n    Has it be told."""', 5),
        ('raise Error(f"the status says " f"{what.is} that nobody answers")  # meanwhile', 3),
        ('name = "what is said"', 0),
    ],
)
def test_strings_and_comments_of_code_are_counted(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "module.py").write_text(text)
    assert len(plain_english.hits(tmp_path / "module.py")) == count


def test_moved_files_keep_their_counts_and_no_total_rises() -> None:
    assert plain_english.record({"Makefile": 2, "new.md": 3}, {"Makefile": 4, "gone.md": 3}) == {
        "Makefile": 2,
        "new.md": 3,
    }
    for now in ({"Makefile": 5}, {"Makefile": 1, "new.md": 7}):
        with pytest.raises(SystemExit, match="plainer"):
            plain_english.record(now, {"Makefile": 4, "gone.md": 3})
