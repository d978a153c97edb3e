"""Refuses words that docs/glossary.md retired, in names, docs, comments and messages; allowed: words.toml.

    python -m tests.words [FILE...]     # default: every text file that git tracks

Prints `file:line: word: use ... instead` for each, and exits 1 if there is one. Standard library only.
"""

import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
ALLOWED: Final = ROOT / "tests" / "words.toml"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NOUN: Final = re.compile(
    r"\b(?:an?|the|this|each|every|one|no|any|another|last|first|next|second|third|full|same|whole|own|its|their|"
    r"his|our|free|right|per|of|two|three|four|five|[0-9]+|several|many|few|[\w.`]+'s)"
    r"(?: (?:full|whole|single|own|free|right|last|first))? $",
    re.IGNORECASE,
)
"""Before a word, on its line, what makes it a noun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredWord:
    """A word not to use.

    Attributes:
        instead: what to use.
        noun_only: whether it is a verb as well, which stays.
    """

    instead: str
    noun_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedText:
    """Text in which a retired word may stand.

    Attributes:
        text: what it looks like.
        files: where, as globs.
    """

    text: re.Pattern[str]
    files: tuple[str, ...]


def read_retired(glossary: str) -> dict[str, RetiredWord]:
    """Returns the retired words of the glossary's last table, in lower case."""
    found: dict[str, RetiredWord] = {}
    for line in glossary.partition("## Retired words")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] not in ("retired", "---"):
            word = RetiredWord(instead=cells[2], noun_only="(noun)" in cells[1])
            found |= {name.strip(): word for name in cells[0].split(",")}
    return found


def read_allowed(data: Mapping[str, Any]) -> list[AllowedText]:
    """Returns what words.toml allows; raises ValueError for an entry without a reason."""
    for entry in data["allowed"]:
        if not entry.get("reason"):
            raise ValueError(f"{ALLOWED.name}: {entry} has no reason; say why the word may stand there")
    return [
        AllowedText(text=re.compile(entry["text"]), files=tuple(entry.get("files", ["*"])))
        for entry in data["allowed"]
    ]


def find_retired(
    path: str, text: str, retired: Mapping[str, RetiredWord], allowed: Sequence[AllowedText]
) -> Iterator[tuple[int, str, RetiredWord]]:
    """Yields line, name and entry of each retired word in a file.

    A name counts by its parts: `kv_room`, `kvRoom` and `KV_ROOM` fit in them. A word that is a
    verb too counts as a part of a longer name, or with an article or the like before it.
    """
    here = [each.text for each in allowed if any(fnmatch.fnmatch(path, glob) for glob in each.files)]
    for number, line in enumerate(text.splitlines(), 1):
        left = line
        for pattern in here:
            left = pattern.sub(lambda match: " " * len(match[0]), left)
        for match in _NAME.finditer(left):
            parts = [part.lower() for part in _PART.findall(match[0])]
            for part in parts:
                entry = retired.get(part)
                if entry is None:
                    continue
                if entry.noun_only and len(parts) == 1 and not _NOUN.search(left[: match.start()]):
                    continue
                yield number, match[0], entry
                break


def tracked_files() -> list[str]:
    """Returns the paths that git tracks, below the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def main(paths: Sequence[str]) -> int:
    """Returns how many retired words there are, at most 1."""
    data = tomllib.loads(ALLOWED.read_text(encoding="utf-8"))
    retired, allowed = read_retired(GLOSSARY.read_text(encoding="utf-8")), read_allowed(data)
    count = 0
    for path in paths or tracked_files():
        if any(fnmatch.fnmatch(path, glob) for glob in data["skipped"]):
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # a picture, an archive, or gone from the working tree
        for number, name, entry in find_retired(path, text, retired, allowed):
            sys.stdout.write(f"{path}:{number}: {name}: use {entry.instead} (docs/glossary.md)\n")
            count += 1
    if count:
        sys.stdout.write(
            f"{count} retired words; a name of the wire goes into tests/words.toml, with its reason\n"
        )
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
