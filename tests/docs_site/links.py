"""A hook of mkdocs: adds pages from outside of docs/, and adapts links that lead there.

The same pages are read on the site and in the repository. A link from docs/ to a file of the repository works
in the repository only, so the site shows the file's path instead.
"""

import os.path
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[2]
ADDED: Final = {
    "CONTRIBUTING.md": "contributor/contributing.md",
    "SECURITY.md": "security.md",
    "charts/heteroinfer/README.md": "user/reference/values.md",
}
"""Pages of the repository, and where they are on the site."""
_LINK: Final = re.compile(r"(?<!!)\[([^]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside of docs/."""
    for source, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Returns the page with links that work on the site."""
    here = page.file.src_uri
    source = {added: source for source, added in ADDED.items()}.get(here, f"docs/{here}")

    def adapted(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        if "://" in path:
            return link[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if (ROOT / target).is_dir() and (ROOT / target / "README.md").exists():
            target += "/README.md"
        if not (ROOT / target).exists() or not (target in ADDED or target.startswith("docs/")):
            return link[0] if not (ROOT / target).exists() else f"{text} (`{target}`)"
        there = ADDED.get(target) or target.removeprefix("docs/")
        return f"[{text}]({os.path.relpath(there, os.path.dirname(here) or '.')}{anchor})"

    return _LINK.sub(adapted, markdown)
