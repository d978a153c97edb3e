"""Tests that pytest collects the tests for GPU machines, with their own settings, also without a GPU."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_every_file_of_gpu_tests_is_collected() -> None:
    files = {path.name for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--devices-as-cpu", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files
    assert {name for name in files if f"{name}::" in done.stdout} == files, done.stdout
