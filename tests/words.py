"""Refuses words that docs/glossary.md retired, in names, paths, docs and messages; allowed: words.toml.

    python -m tests.words [FILE...]     # default: every text file that git tracks

Prints `file:line: word: use ... instead` for each, and what words.toml allows without need; exits 1 if
there is any. Standard library only.
"""

import fnmatch
import io
import keyword
import re
import subprocess
import sys
import tokenize
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
ALLOWED: Final = ROOT / "tests" / "words.toml"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_JOINED: Final = "kv|cpu|gpu|rank|pod|group|node|stage|role|epoch|list|map|set|count|name|id|index|hash"
"""What makes one word of two with a retired one, as in `memberlist` and `kvroom`."""
_LINE: Final = re.compile(
    r"^((?:[\s#>*+|-]|//|\d+\. )*(?:[rbf]{0,2}[\"'](?:\"\")?)?)(.*?)[\s\"'\\]*$", re.IGNORECASE
)
"""A line's marks, as of a comment or a list, and its words; quotes around these belong to neither."""
_PREPOSITIONS: Final = "in|into|at|from|of|on|for|by|with|without|per|after|before|between|during|until"
_DETERMINERS: Final = (
    f"{_PREPOSITIONS}|the|its|their|his|her|our|my|your|whose|no|any|some|other|such|next|last|first|own|same"
    r"|free|full|right|is|are|was|were|has|have|had|[\w.`]+'s|[\w`]+s'"
)
_OF_ONE: Final = (
    r"an?|this|each|every|one|another|second|third|what|(?<![,;] )which"
    rf"|(?:{_PREPOSITIONS}) (?:that|either|neither)"
)
_OF_MANY: Final = (
    r"both|all|these|those|most|more|fewer|several|many|few|enough|two|three|four|five|six|seven|eight|nine|ten"
    r"|[0-9,]*[0-9]|\{[^{}]*\}"
)
_OWNERS: Final = "(?:rank|pod|group|node|stage|role|epoch|operator|reconcile|leader|supervisor)"
_BETWEEN: Final = (
    "full|whole|single|own|free|right|wrong|last|first|next|second|third|new|old|other|same|such|only|better|best"
    "|very|exact|former|current|previous|quick|good|empty|more|further|late|later|early|earlier|short|long|slow|fast|silent|two|three|[0-9]+"
)


def _before(determiners: str) -> re.Pattern[str]:
    named = rf"(?:^|[^\w])(?:{determiners})(?: (?:{_BETWEEN})){{0,2}} "
    return re.compile(rf"(?:{named}|[\w`]-|\w\.|\{{|\[(?=[\"']))[`*_\"'“]*$", re.I)


_CLOSED: Final = r"[`*_\"'”]*"
_AFTER: Final = (
    rf"=|[`\"']:|\.\w|-\w|{_CLOSED} of\b|{_CLOSED} (?:#|no\. ?)?[0-9]+(?=[^\w\s.]|\.?\s*$|\. )"
    rf"|{_CLOSED} (?:took|ended|began|started|per)\b"
)
_NOUN: Final = (
    _before(f"{_DETERMINERS}|{_OF_ONE}|(?:{_DETERMINERS}|{_OF_ONE}) {_OWNERS}|reconcile"),
    re.compile(rf"{_AFTER}|{_CLOSED} (?:takes|ends|begins|starts)\b"),
)
_NOUNS: Final = (
    _before(f"{_DETERMINERS}|{_OF_MANY}|(?:{_OF_MANY}) {_OWNERS}|reconcile"),
    re.compile(rf"{_AFTER}|{_CLOSED} (?:are|were|have|take|end|begin|start)\b"),
)
"""What makes a word a noun, before or after it: in the singular, and in the plural (`all pass` is a verb).

Or a name in code that is no Python: of an attribute, a key, a variable.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredWord:
    """A word not to use.

    Attributes:
        meaning: what it must not mean.
        instead: what to use.
        noun_only: whether it is a verb as well, which stays.
        plural: whether it is not the first of its row; then no base form of a verb.
    """

    meaning: str
    instead: str
    noun_only: bool
    plural: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedText:
    """Text in which a retired word may stand.

    Attributes:
        text: what it looks like.
        files: where, as globs.
    """

    text: re.Pattern[str]
    files: tuple[str, ...]

    def holds_in(self, path: str) -> bool:
        """Returns whether a file is one of them."""
        return any(fnmatch.fnmatch(path, glob) for glob in self.files)


def read_retired(glossary: str) -> dict[str, RetiredWord]:
    """Returns the retired words of the glossary's last table, in lower case."""
    found: dict[str, RetiredWord] = {}
    for line in glossary.partition("## Retired words")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] not in ("retired", "---"):
            for i, name in enumerate(cells[0].split(",")):
                found[name.strip()] = RetiredWord(
                    meaning=cells[1], instead=cells[2], noun_only="(noun)" in cells[1], plural=i > 0
                )
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
    verb too counts as a part of a longer name, with an article or the like before it, and as a
    name in Python but of a function.
    """
    if not any(_retired_part(name, retired) for name in set(_NAME.findall(text))):
        return
    here = [each for each in allowed if each.holds_in(path)]
    marks, words = zip(*map(_split, _without(text, here).split("\n")), strict=True)
    starts = list(accumulate((len(line) + 1 for line in words), initial=0))
    joined = _without(" ".join(words), here)
    found = [
        (match, entry) for match in _NAME.finditer(joined) if (entry := _retired_part(match[0], retired))
    ]
    is_python = path.endswith(".py") and any(entry.noun_only for _, entry in found)
    in_code = _nouns_of_code(text, retired) if is_python else {}
    for match, entry in found:
        line = bisect_right(starts, match.start()) - 1
        at = line + 1, len(marks[line]) + match.start() - starts[line]
        is_key = match.start() == starts[line] and joined.startswith(":", match.end())
        if (
            not entry.noun_only
            or match[0].strip("_").lower() not in retired
            or in_code.get(at, is_key or _is_noun(joined, match, entry))
        ):
            yield line + 1, match[0], entry


def find_in_path(
    path: str, retired: Mapping[str, RetiredWord], allowed: Sequence[AllowedText]
) -> Iterator[tuple[str, RetiredWord]]:
    """Yields name and entry of each retired word in the names of a file and its folders; none is a verb."""
    for name in _NAME.findall(_without(path, [each for each in allowed if each.holds_in(path)])):
        entry = _retired_part(name, retired)
        if entry is not None:
            yield name, entry


def _retired_part(name: str, retired: Mapping[str, RetiredWord]) -> RetiredWord | None:
    parts = [part.lower() for part in _PART.findall(name)]
    ends = [re.sub(rf"^(?:{_JOINED})|(?:{_JOINED})s?$", "", part) for part in parts]
    return next(filter(None, (retired.get(part) for part in (*parts, *ends))), None)


def _split(line: str) -> tuple[str, str]:
    match = _LINE.match(line)
    return (match[1], match[2]) if match else ("", line)


def _without(text: str, allowed: Iterable[AllowedText]) -> str:
    for each in allowed:
        text = each.text.sub(lambda match: " " * len(match[0]), text)
    return text


def _is_noun(text: str, match: re.Match[str], entry: RetiredWord) -> bool:
    """Returns whether a word of a sentence is a noun, or names something in code that is no Python."""
    before, after = _NOUNS if entry.plural else _NOUN
    called = text[match.end() : match.end() + 1] == "("
    left = text[max(match.start() - 80, 0) : match.start()]
    return (not called and before.search(left) is not None) or after.match(text, match.end()) is not None


def _nouns_of_code(text: str, retired: Mapping[str, RetiredWord]) -> dict[tuple[int, int], bool]:
    """Returns, by line and column, whether a name of Python is a noun: all but functions named by a verb."""
    found: dict[tuple[int, int], bool] = {}
    before, tokens = "", list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, after in pairwise(tokens):
        name = token.string.strip("_")
        if token.type == tokenize.NAME and (entry := retired.get(name.lower())):
            is_function = before == "def" or (after.string == "(" and before != "class")
            is_verb = is_function and name.islower() and not entry.plural
            line, column = token.start
            found[line, column + token.string.index(name)] = not (is_verb or keyword.iskeyword(token.string))
        before = token.string
    return found


def find_unneeded(texts: Mapping[str, str], allowed: Sequence[AllowedText]) -> Iterator[tuple[str, str]]:
    """Yields text and glob of each allowance that no file needs, given the texts of all by their paths."""
    for each in allowed:
        for glob in each.files:
            if not any(
                fnmatch.fnmatch(path, glob) and each.text.search(text) for path, text in texts.items()
            ):
                yield each.text.pattern, glob


def tracked_files() -> list[str]:
    """Returns the paths that git tracks, below the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


def read_texts(paths: Sequence[str], skipped: Sequence[str]) -> dict[str, str]:
    """Returns the texts of files by their paths, without those skipped; what is no text has none."""
    texts: dict[str, str] = {}
    for path in paths:
        if any(fnmatch.fnmatch(path, glob) for glob in skipped):
            continue
        try:
            texts[path] = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            texts[path] = ""
        except (FileNotFoundError, IsADirectoryError):
            continue  # gone from the working tree
    return texts


def describe(entry: RetiredWord) -> str:
    """Returns what to use for a retired word, and for which meaning of it."""
    return f"for {entry.meaning.removesuffix(' (noun)')}: use {entry.instead}"


def main(paths: Sequence[str]) -> int:
    """Returns how many retired words there are, at most 1."""
    data = tomllib.loads(ALLOWED.read_text(encoding="utf-8"))
    retired, allowed = read_retired(GLOSSARY.read_text(encoding="utf-8")), read_allowed(data)
    texts = read_texts(paths or tracked_files(), data["skipped"])
    found = [
        f"{where}: {name}: {describe(entry)}"
        for path, text in texts.items()
        for where, name, entry in (
            *((path, name, entry) for name, entry in find_in_path(path, retired, allowed)),
            *((f"{path}:{n}", name, entry) for n, name, entry in find_retired(path, text, retired, allowed)),
        )
    ]
    if found:
        found.append(
            f"{len(found)} retired (docs/glossary.md); a name of the wire, or of another meaning,"
            " goes into tests/words.toml, with its files and its reason"
        )
    if not paths:
        found += [
            f"{ALLOWED.name}: nothing in {glob} needs {text}" for text, glob in find_unneeded(texts, allowed)
        ]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
