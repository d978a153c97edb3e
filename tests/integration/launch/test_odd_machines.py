"""Supervisors on machines that are not as they should be: odd programs beside them, a full disk."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heteroinfer_contract import names
from tests.integration.launch.groups import tiny_group, wait_until
from vllm_heteroinfer.launch.child_process import ChildProcess, ProcessState, child_pids, is_stopped

NAME_OF_8_LETTERS = "процессы"
"""16 bytes, of which the kernel keeps 15 (prctl(2), PR_SET_NAME): no UTF-8."""
RENAMED = (
    "import ctypes, sys, time\nctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)\ntime.sleep(60)"
)


@contextmanager
def renamed_process() -> Iterator[int]:
    """Yields a process of such a name."""
    process = subprocess.Popen([sys.executable, "-c", RENAMED, NAME_OF_8_LETTERS])
    try:
        expected = NAME_OF_8_LETTERS.encode()[:15]
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_bytes().strip() == expected, 20)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_program_whose_name_the_kernel_cut_inside_of_a_letter() -> None:
    with renamed_process() as pid:
        assert pid in child_pids()
        assert not is_stopped(pid)


def test_a_rank_of_such_a_name() -> None:
    child = ChildProcess.start(
        label="rank 0", command=[sys.executable, "-c", RENAMED, NAME_OF_8_LETTERS], env=os.environ
    )
    try:
        expected = NAME_OF_8_LETTERS.encode()[:15]
        wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_bytes().strip() == expected, 20)
        assert child.observe().state is ProcessState.RUNNING
    finally:
        child.kill()
        wait_until(child.reaped, 20)
        child.output.join(5)


def test_a_full_disk_of_logs_holds_up_no_rank(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1,), do={0: "chat"}) as group:
        full = os.open("/dev/full", os.O_WRONLY)
        pod = group.start_pod(0, stdout=full)
        os.close(full)
        wait_until(pod.is_ready, 60, group.logs)
        # A pipe holds 64 KiB: more is written only while somebody reads it.
        wait_until(lambda: max(map(written_bytes, group.marked())) > 10 << 20, 30, group.logs)
        pod.process.terminate()
        assert group.wait_exits(time.monotonic() + 10) == [0]


def test_a_last_word_that_cannot_be_left_is_in_the_log(tmp_path: Path) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        names.ENV_TERMINATION_MESSAGE_PATH: str(tmp_path / "no folder" / "message"),
    }
    worker = [sys.executable, "-m", "vllm_heteroinfer.launch.entry"]
    ended = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == names.EXIT_USAGE, ended
    assert f"{names.ENV_PLAN} is not set" in ended.stdout
    assert "the termination message cannot be written" in ended.stdout
    assert "Traceback" not in ended.stderr


def written_bytes(pid: int) -> int:
    """Returns how much a process has written."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["wchar"])
