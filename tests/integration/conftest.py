"""Which tests run in one process, and in which order, where several processes run them (pytest-xdist)."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED = {HERE / "watching"}
"""Folders whose files share what is longest to start: they are kept together, and come first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file, or of a folder that shares more, in one process (`--dist loadgroup`)."""
    for item in items:
        together = item.path.parent if item.path.parent in SHARED else item.path
        item.add_marker(pytest.mark.xdist_group(str(together.relative_to(HERE.parent))))
    items.sort(key=lambda item: item.path.parent not in SHARED)
