"""Tests that the supervisor passes all output on, and that output neither delays nor fills it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.launch.groups import Pod, tiny_group, wait_until
from vllm_heteroinfer.launch.child_process import child_pids

LINES = 200_000
ROOT = Path(__file__).parents[3]


def memory_bytes(pid: int) -> int:
    """Returns the peak memory of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def written_bytes(supervisor: int) -> int:
    """Returns the bytes that the only rank of a supervisor has written."""
    (rank,) = child_pids(supervisor)
    fields = dict(line.split(": ") for line in Path(f"/proc/{rank}/io").read_text().splitlines())
    return int(fields["wchar"])


def chat_of(pod: Pod) -> list[str]:
    return [line for line in pod.log.read_text().splitlines() if line.startswith("[rank 1] line ")]


def test_no_output_line_is_lost_and_memory_stays_constant(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={1: "chat"}) as group:
        group.start()
        group.wait_ready()
        wait_until(lambda: "[rank 1] end of chat" in group.pods[1].log.read_text(), 60, group.logs)
        lines = chat_of(group.pods[1])
        assert memory_bytes(group.pods[1].process.pid) < 100 << 20
    assert [int(line.split()[3]) for line in lines] == list(range(LINES))


def test_a_stalled_reader_delays_the_rank_but_not_the_supervisor(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do={1: "chat"}) as group:
        group.start_pod(0)
        stalled = group.start_pod(1, stdout=subprocess.PIPE)
        group.wait_ready()
        # Four times the deadline for heartbeats.
        end = time.monotonic() + 6.0
        wait_until(lambda: time.monotonic() > end or not group.pods[0].is_ready(), 10)
        assert [pod.is_ready() for pod in group.pods] == [True, True], group.pods[0].log.read_text()
        assert memory_bytes(stalled.process.pid) < 100 << 20
        # The rank waits in the middle of its output.
        assert 100 * 60 < written_bytes(stalled.process.pid) < LINES * 60
        stalled.process.terminate()
        output, _ = stalled.process.communicate(timeout=20)
    numbers = [int(line.split()[3]) for line in output.splitlines() if line.startswith(b"[rank 1] line ")]
    # When the output is read again, the rank writes the rest before the test ends it.
    assert len(numbers) > 100
    assert numbers == list(range(len(numbers)))


LAST_LINES = """
import os, subprocess, sys, time
from vllm_heteroinfer.launch.output import OutputPump
_, unread = os.pipe()
out = os.dup(1)
os.dup2(unread, 1)  # nobody reads what the pumps write
chat = [sys.executable, "-c", "while True: print('x' * 60)"]
chats = [subprocess.Popen(chat, stdout=subprocess.PIPE) for _ in range(4)]
pumps = [OutputPump(each.stdout, prefix=f"[rank {n}] ") for n, each in enumerate(chats)]
while not all(pump.has_unread_output() and pump.last_line() for pump in pumps):
    time.sleep(0.01)
time.sleep(0.5)
began = time.monotonic()
for pump in pumps * 5:
    pump.last_line()
os.write(out, f"{time.monotonic() - began}".encode())
for each in chats:
    each.kill()
os._exit(0)
"""


def test_reports_the_last_line_of_a_process_immediately() -> None:
    """Earlier, 20 such processes took 2 s. In this time, the supervisor sent no heartbeats."""
    done = subprocess.run(
        [sys.executable, "-c", LAST_LINES], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert float(done.stdout) < 0.5


def test_200_starts_and_ends_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.launch.churn", "200", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT, env=env)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["codes"] == [0, 70]
    assert result["after"] == result["before"]
