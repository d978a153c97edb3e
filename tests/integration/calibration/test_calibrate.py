"""`heteroinfer calibrate` for real: measured by the worker's Python, kept, and read by `heteroinfer plan`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heteroinfer_contract.calibration import ALL_NODES, Calibration, KernelPart
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from heteroinfer_contract.model import SchemeName
from tests.unit.cli.model_directory import write_model
from tests.unit.cli.test_plan import write

TIMEOUT_S = 200.0
"""The command ends by itself after a minute; imports on a busy machine are not in that."""

pytestmark = pytest.mark.timeout(300)


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "heteroinfer_operator.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_what_is_measured_is_what_plan_uses(tmp_path: Path) -> None:
    done = run("calibrate", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "heteroinfer" / "calibration.json"
    assert f"kept in {kept}" in done.stdout
    found = Calibration.from_json(kept.read_text())
    assert len(kept.read_bytes()) <= MAX_TERMINATION_MESSAGE_BYTES
    assert [each.threads for each in found.readings if each.node == ALL_NODES][-1] == found.hardware.cores
    assert found.hardware.cpu in Path("/proc/cpuinfo").read_text()
    # On a busy machine the time is over before all kernels were measured; then that is said.
    assert found.kernel(KernelPart.LINEAR, SchemeName.NONE, "bfloat16") is not None or found.skipped
    assert [hop.message_bytes for hop in found.hops] == [8 << 10, 64 << 10, 1 << 20] or found.skipped
    planned = run("plan", "-f", write(tmp_path, write_model(tmp_path / "model")), cache=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert f"role cpu: calibration {found.hash} " in planned.stdout


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    done = run("calibrate", "--worker-python", sys.executable, cache=tmp_path)
    assert done.returncode == 1
    assert "memory was not read" in done.stderr
    assert "No module named 'torch'" in done.stderr
    assert not (tmp_path / "heteroinfer").exists()
