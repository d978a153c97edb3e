"""Which tests run in one process, and in which order, where several processes run them (pytest-xdist)."""

from pathlib import Path, PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SHARED = Path(__file__).parent / "watching"
"""Its files share what is longest to start: they are kept together, and come first."""


class Together(LoadFileScheduling):
    """Gives the tests of a file, or of the shared folder, to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return SHARED.name if PurePath(file).parent.name == SHARED.name else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """Is how xdist shares out the tests of this folder."""
    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has the longest first, which nothing would run beside at the end."""
    items.sort(key=lambda item: item.path.parent != SHARED)
