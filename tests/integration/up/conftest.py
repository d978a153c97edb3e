"""Makes the model that `heteroinfer up` serves in tests, with the worker's Python."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.running_up import REPOSITORY

WORKER_PYTHON = REPOSITORY / ".venv-worker/bin/python"
MAKE_TIMEOUT_S = 300.0


def _tests_models(*arguments: str) -> str:
    return subprocess.run(
        [WORKER_PYTHON, "-m", "tests.models", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=MAKE_TIMEOUT_S,
        check=True,
    ).stdout


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a small model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    _tests_models(str(folder))
    return folder


@pytest.fixture(scope="session")
def references(model_dir: Path) -> dict[str, Any]:
    """Returns the model's greedy tokens in transformers, by prompt."""
    answers: dict[str, Any] = json.loads(_tests_models("reference", str(model_dir)))
    return answers


@pytest.fixture
def port() -> str:
    """Returns a free port for the OpenAI API."""
    return str(free_port())
