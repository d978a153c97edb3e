"""Tests a group that sleeps and wakes: freed memory, not Ready, the same tokens after waking.

Then it stops.
"""

import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.group_report import RankPhase
from tests.integration.worker.answers import ONE_THREAD, answer_all, rank_pids
from tests.integration.worker.conftest import Reference
from tests.integration.worker.drains import check_drain_timeout
from tests.integration.worker.groups import Group, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)

DRAIN_S = 1.5
ENV = {**ONE_THREAD, "VLLM_SERVER_DEV_MODE": "1", names.ENV_DRAIN_TIMEOUT: str(DRAIN_S)}
KV_BYTES = 64 << 20
"""Bytes of each rank's KV cache, as build_plan sets it."""


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    plan = build_plan(
        model, layers=[4, 4], pods=[1, 1], extra_args=("--enable-sleep-mode",), max_model_len=2048
    )
    assert {rank.kv_cache_bytes for rank in plan.ranks} == {KV_BYTES}
    with start_group(plan, tmp_path_factory.mktemp("group"), env=ENV) as group:
        group.wait_ready()
        yield group


def test_sleep_frees_memory_and_the_tokens_after_wake_are_equal(group: Group, reference: Reference) -> None:
    check_kv_headroom(group)
    fill_kv_cache(group)
    answer_all(group, reference)
    awake = [resident_bytes(pid) for pid in rank_pids(group)]

    group.post("/sleep?level=1", {})
    wait_until(lambda: phases(group) == {RankPhase.SLEEPING})
    asleep = [resident_bytes(pid) for pid in rank_pids(group)]
    for before, after in zip(awake, asleep, strict=True):
        assert before - after > 0.9 * KV_BYTES
    assert not ready(group, 0)
    wait_until(lambda: not ready(group, 1))
    status = group.status()
    assert not status.ready
    assert status.message == (
        "asleep: ranks 0, 1. To wake the group, send POST /wake_up to the API of the leader's pod"
    )

    group.post("/wake_up", {})
    wait_until(lambda: ready(group, 0) and ready(group, 1))
    assert phases(group) == {RankPhase.READY}
    answer_all(group, reference)
    refuse_level_2(group)
    answer_all(group, reference)


def test_a_group_with_a_running_request_ends_at_the_drain_timeout(group: Group, reference: Reference) -> None:
    """The last test of the group."""
    check_drain_timeout(group, next(iter(reference.values()))["prompt_token_ids"], DRAIN_S)


def check_kv_headroom(group: Group) -> None:
    """Checks that each rank reports its KV headroom, and the engine's log names the rank with the least."""
    statuses = group.status().ranks
    assert [status.kv_blocks for status in statuses] == [512, 512]
    assert all(status.kv_room_blocks > 512 and status.kv_room_bytes > KV_BYTES for status in statuses)
    tightest = min(statuses, key=lambda status: status.kv_room_blocks)
    role = group.plan.ranks[tightest.rank].role
    assert (
        f"KV cache: 512 blocks of 32 tokens on every rank. The plan limits this number. Rank {tightest.rank} "
        f"(role {role}, CPU) has space for the fewest blocks: {tightest.kv_room_blocks} in "
        in group.children[0].log.read_text()
    )


def fill_kv_cache(group: Group) -> None:
    """Writes every block once, because unused memory is not resident."""
    for first in range(40):
        prompt = [(first * 7 + i * 13) % 500 + 3 for i in range(460)]
        group.complete(prompt, max_tokens=4)


def refuse_level_2(group: Group) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        group.post("/sleep?level=2", {})
    assert refused.value.code == 400
    assert "sleep level must be 0 or 1 (got 2)" in refused.value.read().decode()
    assert ready(group, 0)


def phases(group: Group) -> set[RankPhase]:
    return {status.phase for status in group.status().ranks}


def ready(group: Group, pod: int) -> bool:
    return fetch(group.health_url(names.PATH_READYZ, pod)) is not None


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")
