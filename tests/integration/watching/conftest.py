"""Provides one watched group for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import tools
from tests.cluster.running_cluster import ensure_tools, start_control_plane_only
from tests.integration.watching.stack import Stack, start_stack
from tests.integration.worker.conftest import make


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    ensure_tools(tools.SETS["all"])
    folder: Path = tmp_path_factory.mktemp("watching")
    model = make(folder / "model")
    with start_control_plane_only() as plane, start_stack(plane, model, folder) as started:
        yield started
