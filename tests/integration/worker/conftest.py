"""Makes the model of the worker groups and its expected tokens, with the worker's own Python."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON

Reference = dict[str, dict[str, list[int]]]


def make(directory: Path, *options: str) -> Path:
    """Writes a small model into `directory`, and returns `directory`."""
    command = [str(WORKER_PYTHON), "-m", "tests.models", str(directory), *options]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """Returns the greedy tokens of transformers in float32, by prompt."""
    return refer(model)


def refer(model: Path) -> Reference:
    """Returns the greedy tokens of transformers in float32, by prompt."""
    command = [str(WORKER_PYTHON), "-m", "tests.models", "reference", str(model)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.PIPE)
    answers: Reference = json.loads(done.stdout)
    return answers
