"""Counts patterns of hard English in product code and docs, file by file.

    python -m tests.plain_english [--hits FILE...] [--record]

A pattern is a hint, not a judge, so each file may have 3 hits per 1,000 words. plain_english.json lists the
files that have more. A count may only fall: --record stores lower counts and drops files that became plain.
A new file can be stored if the total does not rise, so that a page can move or be split.
"""

import argparse
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
HITS_PER_1000_WORDS = 3
CODE = ("operator/src/**/*.py", "worker_image/src/**/*.py", "charts/**/*.py")
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.*", "charts/heteroinfer/*.yaml", "charts/heteroinfer/rules/*")
OTHERS = ("charts/heteroinfer/templates/**/*.*", "Makefile")
_BE = r"\b(?:is|are|was|were|be|been)"
PATTERNS = {
    "what-clause": r"\b[Ww]hat (?:is|are|was|were|has|have|had|it|they|an?|the|goes|comes|there|runs"
    r"|ran|no|never|nobody|serves|needs|makes|users?|pods?|ranks?|others?|that|one|each|every)\b",
    "who-clause": r"\b[Ww]ho(?:ever)? (?:is|was|has|may|can|asks?|reads?|chooses|creates|wants?"
    r"|waits?|writes|judges|looks|that)\b",
    "of it, of them, of which": r"\bof (?:it|them|these|those|which|theirs|ours)\b",
    "begins with Of": r"(?m)(?:^ *|(?<=[.:;] ))Of (?:an?|the|all|each|its|th\w+|it|which|one)\b",
    "weak passive": rf"{_BE} (?:made|taken|said|asked|given|held|kept|told|meant|had|let|put|got|seen)\b",
    "things that say or tell": r"\b(?:says?|tells?|said|told)\b",
    "is no X": rf"(?<!here ){_BE} no (?!longer|more)\w",
    "nobody, whoever": r"\b(?:nobody|somebody|whoever|anybody)\b",
    "lives on, goes with": r"\b(?:(?:live|serve|get|run)s? on\b(?! (?:a|the|one|each|its|GPU|CPU|node)\b)"
    r"|stands? (?:still|in)\b|stood still|comes? of it|goes with|lies? beside|let go\b)",
    "anew, alike": r"\b(?:anew|afresh|meanwhile|alike|for ever|likewise|otherwise than|all the same)\b",
    "so many": r"\b(?:so many|so much|as few)\b",
    "a layer less": r"\ban? \w+ (?:less|more)\b(?! (?:than|often|likely))",
    "so does, nor is": r"\b(?:[Ss]o|[Nn]or) (?:does|is|are|do|has|have|did|was|were)\b",
    "shall, need not": r"\b(?:shall|need not)\b",
    "causative Has": r"(?m)^ *Has\b",
    "chain of semicolons": r";[^;\n]*;",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields each text for people with its line: strings of five words, comments, and lines of a page."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    line, strings = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.STRING:
            line, strings = line or token.start[0], strings + token.string.lstrip("rbf").strip("\"'")
        elif token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type != tokenize.NL:
            if len(strings.split()) >= 5:
                yield line, re.sub(r"\{[^{}]*\}", "{}", strings)
            line, strings = 0, ""


def hits(path: Path) -> list[tuple[int, str, str]]:
    """Returns each hit as its line, its pattern and the text."""
    return [
        (line, label, " ".join(text.split()))
        for line, text in texts(path)
        for label, pattern in PATTERNS.items()
        for _ in re.findall(pattern, text)
    ]


def counts(root: Path = ROOT) -> dict[str, int]:
    """Returns the number of hits of each file that has more than its length allows."""
    found = {}
    for path in sorted(
        {path for pattern in (*CODE, *PAGES, *OTHERS) for path in root.glob(pattern) if path.is_file()}
    ):
        words = sum(len(text.split()) for _, text in texts(path))
        if (count := len(hits(path))) > max(1, words * HITS_PER_1000_WORDS / 1000):
            found[path.relative_to(root).as_posix()] = count
    return found


def worse(now: Mapping[str, int], recorded: Mapping[str, int]) -> dict[str, str]:
    """Returns the files that have more hits than recorded."""
    return {
        name: f"{count} hits, {recorded.get(name, 'not')} recorded"
        for name, count in now.items()
        if count > recorded.get(name, 0)
    }


def record(now: Mapping[str, int], recorded: Mapping[str, int]) -> dict[str, int]:
    """Returns the record to store. Raises SystemExit if a file, or the total with new files, got worse."""
    risen = sum(now.values()) > sum(recorded.values())
    compared = {name: count for name, count in now.items() if risen or name in recorded}
    if wrong := worse(compared, recorded):
        raise SystemExit(f"write these files in plainer English. List the hits with --hits FILE: {wrong}")
    return dict(now)


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts patterns of hard English.")
    parser.add_argument("--hits", nargs="+", type=Path, metavar="FILE", help="list the hits in these files")
    parser.add_argument("--record", action="store_true", help="store lower counts")
    options = parser.parse_args()
    for path in options.hits or []:
        for line, label, text in hits(path):
            print(f"{path}:{line}: [{label}] {text[:150]}")
    if options.record:
        RECORD.write_text(json.dumps(record(counts(), json.loads(RECORD.read_text())), indent=2) + "\n")


if __name__ == "__main__":
    main()
