"""`heteroinfer calibrate` for real: measured by the worker's Python, kept, and read by `heteroinfer plan`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heteroinfer_contract.calibration import ALL_NODES, Calibration, HopPath, KernelPart
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from heteroinfer_contract.model import SchemeName
from heteroinfer_operator.local.worker_python import find_worker_python
from tests.unit.cli.model_directory import write_model
from tests.unit.cli.test_plan import write

TIMEOUT_S = 400.0
"""The command ends by itself after a minute; imports on a busy machine are not in that."""

pytestmark = pytest.mark.timeout(500)


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "heteroinfer_operator.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_each_part_of_this_machine_is_measured_and_named(tmp_path: Path) -> None:
    """With time enough for a busy machine: what is not measured then cannot be."""
    python, message = find_worker_python(None), tmp_path / "message"
    command = [str(python), "-m", "vllm_heteroinfer.launch.cli", "calibrate", "--limit", "360"]
    command += ["--termination-message-path", str(message)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert message.read_text() == done.stdout.strip()
    assert len(message.read_bytes()) <= MAX_TERMINATION_MESSAGE_BYTES
    found = Calibration.from_json(done.stdout)
    cores = found.hardware.cores
    assert [each.threads for each in found.readings if each.node == ALL_NODES][-1] == cores
    assert found.hardware.cpu in Path("/proc/cpuinfo").read_text()
    assert found.operations_per_s > 0
    hops = [hop.message_bytes for hop in found.hops if hop.path is HopPath.GLOO]
    assert hops == [8 << 10, 64 << 10, 1 << 20]
    missing = "; ".join(f"{each.what}: {each.why}" for each in found.skipped)
    for part, scheme in (
        (KernelPart.LINEAR, SchemeName.NONE),
        (KernelPart.LINEAR, SchemeName.AWQ),
        (KernelPart.LINEAR, SchemeName.INT8),
        (KernelPart.EXPERTS, SchemeName.NONE),
        *([(KernelPart.EXPERTS, SchemeName.FP8_BLOCK)] if found.has_amx else []),
    ):
        assert found.kernel(part, scheme, "bfloat16") is not None, missing


def test_what_is_measured_is_what_plan_uses(tmp_path: Path) -> None:
    done = run("calibrate", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "heteroinfer" / "calibration.json"
    found = Calibration.from_json(kept.read_text())
    assert f"kept in {kept}" in done.stdout
    planned = run("plan", "-f", write(tmp_path, write_model(tmp_path / "model")), cache=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert f"role cpu: calibration {found.hash} " in planned.stdout


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    done = run("calibrate", "--worker-python", sys.executable, cache=tmp_path)
    assert done.returncode == 1
    assert "memory was not read" in done.stderr
    assert "No module named 'torch'" in done.stderr
    assert not (tmp_path / "heteroinfer").exists()
