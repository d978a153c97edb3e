"""Tests the bridge between two and three real processes on CPUs, by shared memory and by gloo."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.bridge.bridge_ranks import Group, outcomes, running
from tests.integration.bridge.scenarios import (
    LARGE,
    check_differences,
    check_thousand_calls,
    differing_calls,
    every_operation,
)
from tests.integration.forked_script import run_script
from tests.integration.kernels.probe_answers import ask
from tests.integration.worker.groups import WORKER_PYTHON

pytestmark = pytest.mark.timeout(180)
LATE_S = 0.3
PATHS = {"shared_memory": True, "gloo": False}

GROUPS = [
    pytest.param(Group(devices=("cpu",) * ranks, share_host=share), id=f"{path}-{ranks}")
    for path, share in PATHS.items()
    for ranks in (2, 3)
]

WAITS = """
import json, os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from vllm_heteroinfer.distributed.bridge.bridge_link import ProcessGroupRanks
from vllm_heteroinfer.distributed.bridge.gloo import GlooLink
from vllm_heteroinfer.distributed.bridge.header import HEADER_BYTES

class Meter:
    waits_for = None

    def set_awaited_rank(self, rank):
        self.waits_for = rank

    def __getattr__(self, name):
        return lambda *_: None

rank = next((rank for rank in (1, 2) if os.fork() == 0), 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3,
                        timeout=timedelta(seconds=60))
meter = Meter()
ranks = ProcessGroupRanks(group="tp", ranks=(0, 1, 2), index=rank, listeners=())
link = GlooLink(dist.group.WORLD, ranks, torch.device("cpu"), timeout_s=30, meter=meter)
dist.barrier()
if rank == 2:
    time.sleep(2)
link.publish(b"h" * HEADER_BYTES, 4)
said = []
if rank == 0:
    threading.Timer(1, lambda: said.append(meter.waits_for)).start()
for _ in link.collect():
    pass
dist.barrier()
if rank == 0:
    print(json.dumps([*said, meter.waits_for]), flush=True)
os._exit(0)
"""


def test_a_rank_reports_the_rank_that_it_still_waits_for(tmp_path: Path) -> None:
    """Otherwise the leader would report this rank as the rank that hangs."""
    assert run_script(WORKER_PYTHON, WAITS, str(tmp_path / "store")).answer() == [2, None]


@pytest.mark.parametrize("group", GROUPS)
def test_every_operation_gives_the_result_of_torch(group: Group) -> None:
    world = len(group.devices)
    calls = every_operation(world)
    done = outcomes(group, "calls", calls=[call.to_json() for call in calls])
    assert [one["path"] for one in done] == ["shared_memory" if group.share_host else "gloo"] * world
    assert [one["done"] for one in done] == [len(calls)] * world


@pytest.mark.parametrize("group", GROUPS)
def test_tensors_larger_than_a_part_arrive_complete(group: Group) -> None:
    done = outcomes(group, "calls", calls=[call.to_json() for call in LARGE(len(group.devices))])
    assert len({one["digest"] for one in done}) == 1
    assert all(one["num_bytes"] > 100 << 20 for one in done)


@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_results_of_a_thousand_random_calls_are_equal_bit_by_bit(group: Group, seed: int) -> None:
    done = outcomes(group, "calls", seed=seed, count=1000)
    assert len(done) == len(group.devices)
    check_thousand_calls(done)


@pytest.mark.parametrize("group", GROUPS)
def test_both_ranks_report_that_their_calls_differ(group: Group) -> None:
    check_differences(outcomes(group, "differ", differences=differing_calls(len(group.devices))))


@pytest.mark.parametrize("group", GROUPS)
def test_a_killed_rank_is_reported_within_the_time_out(group: Group) -> None:
    group = replace(group, timeout_s=3.0)
    with running(group, "until_error", elements=1000) as ranks:
        for rank in ranks:
            while "ready" not in rank.next_event():
                pass
        ranks[-1].kill()
        for rank in ranks[:-1]:
            reported = rank.next_event()
            assert reported["error"] == "PeerLostError"
            # With three ranks, the first to report the difference ends, so the others may report that rank as
            # lost.
            assert reported["peer"] in range(len(ranks))
    assert ": did not provide " in reported["message"]


def test_an_error_names_the_killed_rank() -> None:
    group = Group(devices=("cpu", "cpu"), timeout_s=2.0)
    with running(group, "until_error", elements=1000) as ranks:
        for rank in ranks:
            while "ready" not in rank.next_event():
                pass
        ranks[1].kill()
        reported = ranks[0].next_event()
    assert (reported["error"], reported["peer"]) == ("PeerLostError", 1)


@pytest.mark.parametrize("group", GROUPS)
def test_the_other_ranks_fail_within_two_seconds_after_a_rank_closes_its_bridge(group: Group) -> None:
    reported = outcomes(group, "leave")
    assert [one.get("error") for one in reported[:-1]] == ["PeerLostError"] * (len(reported) - 1)
    assert all(one["seconds"] < 2 for one in reported[:-1])


def test_shared_memory_has_no_name_and_leaves_no_file() -> None:
    before = set(os.listdir("/dev/shm"))
    with running(Group(), "until_error", elements=100_000) as ranks:
        for rank in ranks:
            while "ready" not in rank.next_event():
                pass
        for rank in ranks:
            maps = Path(f"/proc/{rank.pid}/maps").read_text()
            ours = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "heteroinfer-bridge" in line}
            assert len(ours) == 1
            assert ours.pop().startswith("/memfd:heteroinfer-bridge-")
        for rank in ranks:
            rank.kill()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "heteroinfer" in name]


@pytest.mark.parametrize("group", GROUPS)
def test_announcements_arrive_in_order_and_do_not_block(group: Group) -> None:
    reported = outcomes(group, "announcements", count=200)
    assert reported[0]["listeners"] == list(range(1, len(group.devices)))
    assert [one["received"] for one in reported[1:]] == [200] * (len(group.devices) - 1)


@pytest.mark.parametrize("share_host", PATHS.values(), ids=PATHS)
def test_reports_a_rank_that_never_announces_its_call(share_host: bool) -> None:
    with running(Group(share_host=share_host), "silence") as (first, second):
        second.next_event()
        reported = second.next_event()
        first.release()
    assert (reported["error"], reported["peer"]) == ("PeerLostError", 0)
    assert 0.5 <= reported["seconds"] < 2


@pytest.mark.parametrize("group", GROUPS)
def test_tensors_arrive_between_two_ranks(group: Group) -> None:
    assert [one["done"] for one in outcomes(group, "mail")] == [True] * len(group.devices)


def own_pid_namespace() -> tuple[str, ...]:
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc")


def test_shared_memory_that_is_declared_but_not_there_is_refused_on_every_rank() -> None:
    reported = outcomes(Group(wrappers=((), own_pid_namespace())), "calls", seed=0, count=1)
    _check_refusals(reported)
    assert (
        "not the memory of the process group's first rank" in reported[0]["message"]
        or "No such file" in reported[0]["message"]
    )


def test_the_bridge_works_if_a_rank_has_a_dev_shm_of_its_own() -> None:
    wrapper = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"',
        "sh",
    )
    reported = outcomes(Group(wrappers=((), wrapper)), "calls", seed=0, count=1)
    assert [one["path"] for one in reported] == ["shared_memory"] * 2


def _check_refusals(reported: list[dict[str, Any]]) -> None:
    for one in reported:
        assert one["error"] == "ContractError"
        for word in ("cannot share memory, although the plan", "(rank 1: ", "Run them in one pod", "gloo"):
            assert word in one["message"]


def test_a_rank_waits_for_a_peer_only_after_its_device_has_written() -> None:
    """Like a GPU's stream, a rank waits for no peer until its own memory word is written, with a deadline."""
    reported = ask("tests.integration.bridge.late_words", "")
    before, after = reported["before"], reported["after"]
    assert before["got"] == after["got"] == [1]
    assert before["waited_s"] == 0.0
    assert before["peer_waited_s"] >= LATE_S / 2
    assert after["took_s"] >= 2 * LATE_S
    assert LATE_S / 2 <= after["waited_s"] <= after["took_s"] - LATE_S / 2
    assert reported["failed"] == "the device has failed"
    assert "device of rank 0 has not finished" in reported["stuck"]
