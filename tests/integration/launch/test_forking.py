"""Tests that a pod's first rank forks the others, and that failures name the failed process."""

import os
import signal
import time
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.launch.groups import TinyGroup, environ, tiny_group, wait_until

LIMIT_S = 2.0
GONE_S = 10.0
"""On a busy machine. A process that stays for good is found, too."""


def stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def test_forks_are_children_of_the_supervisor_in_sessions_of_their_own(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (2,)) as group:
        group.start()
        group.wait_ready()
        children = [group.child_pid(label, 0) for label in ("rank 0", "rank 1", "api")]
        for pid in children:
            _, parent, process_group, session = stat(pid)[:4]
            assert int(parent) == group.pods[0].process.pid
            assert int(process_group) == int(session) == pid
        # A forked process has the variables of the first rank's exec.
        assert f"{names.ENV_RANK}=0" in environ(children[1])
        assert len(group.marked()) == 1 + len(children)
        output = group.pods[0].log.read_text()
    assert "[rank 1] rank 1 is connected" in output


def test_a_fork_has_only_its_own_descriptors(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (2,)) as group:
        group.start()
        group.wait_ready()
        pids = {label: group.child_pid(label, 0) for label in ("rank 0", "rank 1", "api")}
        outputs = {label: os.readlink(f"/proc/{pid}/fd/1") for label, pid in pids.items()}
        assert len(set(outputs.values())) == 3
        for label, pid in pids.items():
            held = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
            assert held.isdisjoint(set(outputs.values()) - {outputs[label]})


def test_each_rank_starts_as_a_new_process_if_forks_are_disabled(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (2,), env={"TINY_NO_FORKS": "1"}) as group:
        group.start()
        group.wait_ready()
        assert f"{names.ENV_RANK}=1" in environ(group.rank_pid(1))


def test_first_rank_that_ends_before_it_forks_is_reported(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (2, 1), env={"TINY_IMPORT": "exit3"}) as group:
        group.start()
        codes = group.wait_exits(time.monotonic() + 20)
        assert group.marked() == []
    assert codes == [names.EXIT_RANK_FAILED, names.EXIT_PEER_FAILED]
    for pod in group.pods:
        failure = pod.failure()
        assert (failure.reason, failure.rank, failure.exit_code) == (FailureReason.RANK_EXITED, 0, 3)
        assert failure.last_log == "no module of that name"


def test_names_a_process_that_cannot_be_forked(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1, 2), env={"TINY_IMPORT": "refuse"}) as group:
        group.start()
        group.wait_exits(time.monotonic() + 20)
        assert group.marked() == []
    failure = group.pods[0].failure()
    assert "cannot be forked: Cannot allocate memory. Raise the pod's memory limit" in failure.message
    assert failure.reason in {FailureReason.RANK_EXITED, FailureReason.API_SERVER_EXITED}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_supervisor_ends_while_the_first_rank_imports(tmp_path: Path, number: int) -> None:
    with tiny_group(tmp_path, (2,), env={"TINY_IMPORT": "hang"}) as group:
        group.start()
        wait_until(lambda: imports(group), 20, group.logs)
        group.pods[0].process.send_signal(number)
        code = group.pods[0].process.wait(LIMIT_S)
        wait_until(lambda: group.marked() == [], LIMIT_S, group.logs)
    assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)


@pytest.mark.parametrize("delay_ms", range(0, 60, 10))
def test_supervisor_killed_during_forks_leaves_no_process(tmp_path: Path, delay_ms: int) -> None:
    with tiny_group(tmp_path, (4,)) as group:
        group.start()
        wait_until(lambda: imports(group), 20, group.logs)
        time.sleep(0.1 + delay_ms / 1000)  # the test chooses a random moment, and waits for nothing
        group.pods[0].process.kill()
        group.pods[0].process.wait(LIMIT_S)
        wait_until(lambda: group.marked() == [], GONE_S, group.logs)


def imports(group: TinyGroup) -> bool:
    return "started rank 0" in group.pods[0].log.read_text()
