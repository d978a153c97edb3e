"""The pages of the documents, and the code in them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GUIDE = [page for page in PAGES if page.is_relative_to(ROOT / "docs/user")]
"""The pages for users."""
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "decisions"]
"""Those that say what is, not what was."""
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.M | re.S)


def name_of(page: Path) -> str:
    """Returns the path of a file below the root."""
    return page.relative_to(ROOT).as_posix()


def code(text: str) -> Iterator[str]:
    """Yields each line of code of a text, in fences and in sentences, without its comment."""
    for fence, span in CODE.findall(text):
        for line in (fence or span).splitlines():
            yield line.partition(" #")[0]


def guide() -> str:
    """Returns the text of all pages for users."""
    return "\n".join(page.read_text() for page in GUIDE)


def without_what_was(page: str) -> str:
    """Returns a page without the columns of its tables that say "before" in their headings."""
    lines: list[str] = []
    dropped: set[int] = set()
    for line in page.splitlines():
        if not line.startswith("|"):
            dropped = set()
        elif lines and re.fullmatch(r"\|[-:| ]+\|", line):
            cells = enumerate(lines[-1].split("|"))
            dropped = {index for index, cell in cells if re.search(r"\bbefore\b", cell)}
        lines.append("|".join(cell for index, cell in enumerate(line.split("|")) if index not in dropped))
    return "\n".join(lines)
