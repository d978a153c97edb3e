"""Tests that only those failed tests run again during which the machine stood still."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import standstill

ROOT = Path(__file__).parents[3]


def test_counts_only_the_stalls_during_the_test() -> None:
    lines = "10.0 10.5\n20.0 21.0\n"
    assert standstill.stood_still_s(lines, 10.25, 20.5) == pytest.approx(0.75)
    assert standstill.stood_still_s(lines, 11.0, 19.0) == 0.0
    assert standstill.stood_still_s("", 0.0, 1.0) == 0.0
    of_two_cpus = "20.0 21.0\n20.5 20.75\n10.0 10.5\n20.5 22.0\n"
    assert standstill.stood_still_s(of_two_cpus, 10.25, 21.5) == pytest.approx(0.25 + 1.5)


@pytest.mark.parametrize(
    ("stands_still", "fails_again", "code", "runs"),
    [(True, False, 0, 2), (True, True, 1, 2), (False, False, 1, 1)],
)
def test_failed_tests_run_again_if_the_machine_stalled(
    tmp_path: Path, stands_still: bool, fails_again: bool, code: int, runs: int
) -> None:
    (tmp_path / "test_it.py").write_text(
        f"""
import os, signal, time
from pathlib import Path

def test_it():
    runs = Path({str(tmp_path / "runs")!r})
    with runs.open("a") as file:
        file.write("run ")
    first = runs.read_text() == "run "
    if {stands_still} and first:
        watcher = max(  # of one CPU
            int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline")
            if os.environ["{standstill.ENV_FILE}"].encode() in p.read_bytes()
        )
        while not Path(os.environ["{standstill.ENV_FILE}"] + ".turns").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(watcher, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(watcher, signal.SIGCONT)
        time.sleep(0.2)
    assert not first and not {fails_again}
"""
    )
    done = subprocess.run(
        [ROOT / ".ci/tests", sys.executable, "-c", ROOT / "pyproject.toml", tmp_path / "test_it.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "runs").read_text().count("run") == runs
