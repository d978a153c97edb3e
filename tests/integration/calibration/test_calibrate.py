"""Tests `heteroinfer calibrate` with a real worker: it stores rates, and `heteroinfer plan` uses them."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heteroinfer_contract.calibration import ALL_NODES, Calibration, KernelPart
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from heteroinfer_contract.model import SchemeName
from tests.integration.launch.groups import environ, wait_until
from tests.unit.cli.model_directory import write_model
from tests.unit.cli.test_plan import write
from vllm_heteroinfer.calibration.command import Measurement, measure

MARK = "CALIBRATION_MARK"

TIMEOUT_S = 200.0
"""The command ends by itself after a minute. On a busy machine, imports take more time."""

pytestmark = pytest.mark.timeout(300)


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "heteroinfer_operator.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_plan_uses_the_measured_rates(tmp_path: Path) -> None:
    done = run("calibrate", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "heteroinfer" / "calibration.json"
    assert f"wrote {kept}" in done.stdout
    found = Calibration.from_json(kept.read_text())
    assert len(kept.read_bytes()) <= MAX_TERMINATION_MESSAGE_BYTES
    assert [each.threads for each in found.readings if each.node == ALL_NODES][-1] == found.hardware.cores
    assert found.hardware.cpu in Path("/proc/cpuinfo").read_text()
    # On a busy machine, the time may end before all kernels were measured. The output then reports this.
    assert found.fastest_kernel(KernelPart.LINEAR, SchemeName.NONE, "bfloat16") is not None or found.skipped
    assert [hop.message_bytes for hop in found.hops] == [8 << 10, 64 << 10, 1 << 20] or found.skipped
    planned = run("plan", "--explain", "-f", write(tmp_path, write_model(tmp_path / "model")), cache=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert f"role cpu: calibration {found.hash} " in planned.stdout


def test_a_python_without_torch_is_reported(tmp_path: Path) -> None:
    done = run("calibrate", "--worker-python", sys.executable, cache=tmp_path)
    assert done.returncode == 1
    assert "the memory speed was not measured" in done.stderr
    assert "No module named 'torch'" in done.stderr
    assert not (tmp_path / "heteroinfer").exists()


DAEMON = """
import os, time
print('{"kind": "readings", "threads": 1, "node": -1, "bytes_per_s": 1e9}', flush=True)
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""
FLOOD = """
import sys
while True:
    sys.stderr.write("x" * 1_000_000)
"""


@pytest.mark.parametrize(("script", "readings", "max_s"), [(DAEMON, 1, 4.0), (FLOOD, 0, 8.0)])
def test_an_open_output_pipe_does_not_delay_the_calibration(
    tmp_path: Path, script: str, readings: int, max_s: float
) -> None:
    package = tmp_path / "vllm_heteroinfer" / "calibration"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "odd.py").write_text(script)
    before_kib, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    odd = Measurement(
        what="odd", commands=(("odd",),), env={"PYTHONPATH": str(tmp_path), MARK: str(tmp_path)}
    )
    try:
        found = measure([odd], 4.0)
        assert time.monotonic() - began < max_s
        assert len(found.lists["readings"]) == readings
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100_000
    finally:
        end_marked(tmp_path)  # this process adopts no orphans


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_calibration_leaves_no_process(tmp_path: Path, number: int) -> None:
    """The measuring process imports a replacement of torch that takes a minute."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(60)\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary), MARK: str(tmp_path)}
    command = [sys.executable, "-m", "vllm_heteroinfer.launch.entry", "calibrate"]
    try:
        calibrating = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        wait_until(lambda: any(b"memory_reading" in command_line(pid) for pid in marked(tmp_path)), 30)
        calibrating.send_signal(number)
        assert calibrating.wait(10) == (128 + number if number == signal.SIGTERM else -number)
        wait_until(lambda: marked(tmp_path) == [], 5)
        assert number == signal.SIGKILL or list(temporary.iterdir()) == []
    finally:
        end_marked(tmp_path)


def marked(mark: Path) -> list[int]:
    """Returns the processes that carry a test's mark."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if f"{MARK}={mark}" in environ(pid)]


def command_line(pid: int) -> bytes:
    """Returns the command of a process, or nothing for a dead process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def end_marked(mark: Path) -> None:
    """Ends the processes that carry a test's mark."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
