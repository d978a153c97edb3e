"""Finds failed tests that ran while this machine stood still.

Such failures prove nothing, so the tests run again.

`.ci/tests` loads this module as a plugin of pytest. For each CPU, a process asks for a turn each TURN_S, and
writes a byte in it, as programs write their logs. A late turn shows that others on that CPU were late, too:
the host or the scheduler gave the CPU away for seconds, or the disk accepted no bytes. A test that fails
without a late turn has failed, and so has a test that fails again.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.parent_death import die_with_parent

TURN_S = 0.05
LATE_S = 0.2
"""A turn that is later than this, in seconds, is a standstill."""
EXCUSED_S = 0.5
"""Sum of standstills, in seconds, that excuses a failed test."""
RUN_AGAIN = 75
"""Exit status of a run in which every failure is excused (EX_TEMPFAIL)."""
ENV_FILE = "HETEROINFER_STANDSTILLS"


def watch(file: Path) -> None:
    """Writes a line `BEGIN END` for each standstill of a CPU, in monotonic time. Never returns."""
    own, *others = os.sched_getaffinity(0)
    first = os.getpid()
    for cpu in others:  # One process for each CPU, so that a standstill of one CPU does not delay the others.
        if os.fork() == 0:
            die_with_parent(first)
            own = cpu
            break
    os.sched_setaffinity(0, {own})
    with file.with_suffix(".turns").open("wb", buffering=0) as turns, file.open("a") as found:
        before_s = time.monotonic()
        while True:
            time.sleep(TURN_S)
            turns.seek(0)
            turns.write(b".")
            now_s = time.monotonic()
            if now_s - before_s - TURN_S > LATE_S:
                found.write(f"{before_s + TURN_S} {now_s}\n")
                found.flush()
            before_s = now_s


def stood_still_s(lines: str, begin_s: float, end_s: float) -> float:
    """Returns the seconds between two times in which at least one CPU stood still."""
    still_s, until_s = 0.0, begin_s
    for begin, end in sorted(tuple(map(float, line.split())) for line in lines.splitlines()):
        still_s += max(0.0, min(end_s, end) - max(until_s, begin))
        until_s = max(until_s, end)
    return still_s


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-again", type=Path, help="file that lists the tests to run again")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the watch in the first process of a run, also for the processes of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Watcher(config.getoption("--run-again")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records for each failed part of a test the seconds of standstill since the test began."""
    report = yield
    began_s = item.stash.setdefault(_BEGAN, time.monotonic() - call.duration)
    if report.failed:
        lines = Path(os.environ[ENV_FILE]).read_text()
        still_s = stood_still_s(lines, began_s, time.monotonic())
        # This property reaches the first process. A test's id does not contain the path above the root.
        test = "::".join([str(item.path), *item.nodeid.split("::")[1:]])
        report.user_properties.append((_FAILED, (test, still_s)))
        report.sections.append(("the machine", f"stood still for {still_s:.2f} s while this test ran"))
    return report


_BEGAN = pytest.StashKey[float]()
_FAILED = "failed while the machine stood still"


class _Watcher:
    def __init__(self, list_file: Path) -> None:
        self._list_file = list_file
        self._failed: dict[str, float] = {}
        self._others_failed = False
        self._folder = tempfile.TemporaryDirectory(prefix="standstill-")
        file = Path(self._folder.name) / "standstills"
        file.touch()
        os.environ[ENV_FILE] = str(file)
        self._process = subprocess.Popen([sys.executable, "-m", __name__, str(file), str(os.getpid())])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # Without the property, the process that ran the test has died. A standstill does not excuse that.
            known: dict[str, Any] = dict(report.user_properties)
            test, still_s = known.get(_FAILED, (report.nodeid, 0.0))
            self._failed[test] = min(still_s, self._failed.get(test, still_s))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._others_failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        excused = all(still_s > EXCUSED_S for still_s in self._failed.values())
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and excused and not self._others_failed:
            self._list_file.write_text("".join(f"{test}\n" for test in self._failed))
            session.exitstatus = RUN_AGAIN

    def pytest_unconfigure(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    watch(Path(sys.argv[1]))
