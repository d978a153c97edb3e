"""The modules of the product, by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = (ROOT / "operator" / "src", ROOT / "worker_image" / "src")


def modules_below(sources: Iterable[Path]) -> dict[str, Path]:
    """Returns the file of each module, whether or not its folder is a package."""
    found = {}
    for source in sources:
        for file in source.rglob("*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def above(name: str) -> set[str]:
    """Returns a dotted name and all that it is in."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
