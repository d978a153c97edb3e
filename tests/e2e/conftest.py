"""Defines the fixtures of all end-to-end tests."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.folders import REPOSITORY


@pytest.fixture(scope="session")
def model() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Returns a folder for a volume with the model in `small`, and the model's expected tokens."""
    python = REPOSITORY / ".venv-worker/bin/python"
    # Not in pytest's own folder, which another session on this machine would delete.
    volume = Path(tempfile.mkdtemp(prefix="heteroinfer-models-"))
    volume.chmod(0o755)  # workers are not root
    folder = volume / "small"

    def run(*arguments: str) -> str:
        command = [str(python), "-m", "tests.models", *arguments]
        return subprocess.run(
            command, cwd=REPOSITORY, check=True, text=True, stdout=subprocess.PIPE, timeout=300
        ).stdout

    try:
        run(str(folder))
        yield volume, json.loads(run("reference", str(folder)))
    finally:
        shutil.rmtree(volume)
