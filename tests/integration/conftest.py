"""Decides which tests run in one process, and in which order, if pytest-xdist uses several processes."""

from pathlib import Path, PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SHARED = Path(__file__).parent / "watching"
"""The tests of this folder share a fixture that starts slowly. So they run in one process, and first."""


class Together(LoadFileScheduling):
    """Gives all tests of a file, or of the shared folder, to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return SHARED.name if PurePath(file).parent.name == SHARED.name else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """Replaces the scheduler of pytest-xdist for the tests of this folder."""
    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the longest tests to the front, so that they do not run alone at the end."""
    items.sort(key=lambda item: item.path.parent != SHARED)
