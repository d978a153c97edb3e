"""Tests `heteroinfer-worker inspect` as a pod runs it: output, exit code, termination message."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.model_profile import ModelProfile
from tests.unit.contract.test_model_files import CONFIG, write_model

NUM_LAYERS = 128
"""More layers than the largest dense models have (126)."""
MAX_MEMORY_BYTES = 2 << 30


def inspect(model: Path, message: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_heteroinfer.launch.cli", "inspect", "--model", str(model)]
    command += ["--termination-message-path", str(message)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_the_profile_is_printed_and_written_as_the_termination_message(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.w": [1 << 12] for i in range(NUM_LAYERS)}
    model = write_model(tmp_path / "m", config={**CONFIG, "num_hidden_layers": NUM_LAYERS}, tensors=tensors)
    done = inspect(model, tmp_path / "message")
    assert done.returncode == 0, done.stderr
    assert ModelProfile.from_json(done.stdout) == read_profile(model)
    text = (tmp_path / "message").read_text()
    assert text == done.stdout.strip()
    assert len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES


def test_refuses_an_absurd_number_of_layers_without_allocating(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", config={**CONFIG, "num_hidden_layers": 10_000_000_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))
    try:
        done = inspect(model, tmp_path / "message")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert done.returncode == names.EXIT_USAGE
    assert "num_hidden_layers must be at most" in done.stderr


def test_does_not_wait_for_a_pipe_without_a_writer(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    done = inspect(model, tmp_path / "message")
    assert done.returncode == names.EXIT_USAGE
    assert "model.safetensors: must be a regular file" in done.stderr


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such directory"), (".", "not a model")])
def test_reports_a_failure_without_a_traceback(tmp_path: Path, name: str, words: str) -> None:
    done = inspect(tmp_path / name, tmp_path / "message")
    assert done.returncode == names.EXIT_USAGE
    assert words in done.stderr
    failure = Failure.from_json((tmp_path / "message").read_text())
    assert failure is not None
    assert failure.reason is FailureReason.MODEL_NOT_READABLE
    assert words in failure.message
