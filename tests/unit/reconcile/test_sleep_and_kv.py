"""Reports of a leader about its group: sleep, and the rank that limits the KV cache."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.model import AttentionKind, LayerKind
from heteroinfer_contract.plan import Device, Mode, eager_reason
from heteroinfer_operator.reconcile.status_summary import build_plan_status
from tests.unit.launch.test_environment import PLAN
from tests.unit.reconcile.world import PROFILE, World, cpu_pair


@pytest.fixture
def world() -> World:
    world = World(spec=cpu_pair())
    world.serve()
    world.reap()
    world.settle()
    return world


def report(world: World, *ranks: dict[str, Any], epoch: int = 1) -> None:
    plan_hash = world.status["groups"][0]["planHash"]
    world.reports[0] = GroupReport(
        group_uid="uid-demo/0",
        epoch=epoch,
        plan_hash=plan_hash,
        ready=all(rank.get("phase", RankPhase.READY) is RankPhase.READY for rank in ranks),
        message="",
        ranks=tuple(
            RankStatus(**{"rank": i, "pod": i, "phase": RankPhase.READY, **rank})
            for i, rank in enumerate(ranks)
        ),
    )


def set_ready(world: World, ready: bool) -> None:
    world.pods = {name: replace(pod, ready=ready) for name, pod in world.pods.items()}


def go_to_sleep(world: World) -> None:
    report(world, {"phase": RankPhase.SLEEPING}, {"phase": RankPhase.SLEEPING})
    set_ready(world, False)
    world.settle()


def test_a_sleeping_group_is_not_ready_and_reports_how_to_wake_it(world: World) -> None:
    go_to_sleep(world)
    assert world.condition("Ready") == ("False", "Sleeping")
    assert world.condition("Progressing") == ("False", "Settled")
    assert world.condition("Failed") == ("False", "NotFailed")
    (group,) = world.status["groups"]
    assert group["phase"] == "Sleeping"
    assert group["message"] == (
        "asleep. To wake the group, send POST /wake_up to the API of pod demo-0-1-0 (kubectl port-forward)"
    )
    assert world.status["readyReplicas"] == 0
    assert world.status["summary"]["groups"] == "0/1"


def test_a_sleeping_group_is_never_failed_or_restarted(world: World) -> None:
    go_to_sleep(world)
    for _ in range(5):
        world.advance_time(3600)
        world.step()
        assert world.writes == []
    assert world.workers() == ["demo-0-1-0", "demo-0-1-1"]
    assert world.status["groups"][0]["restarts"] == 0
    assert "failures" not in world.status["groups"][0] or world.status["groups"][0]["failures"] == []


def test_one_slow_answer_does_not_end_sleep(world: World) -> None:
    go_to_sleep(world)
    del world.reports[0]
    world.step()
    assert world.writes == []
    set_ready(world, True)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_woken_group_serves_again(world: World) -> None:
    go_to_sleep(world)
    report(world, {}, {})
    set_ready(world, True)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["groups"][0]["phase"] == "Ready"


def test_a_group_sleeps_while_some_ranks_sleep(world: World) -> None:
    report(world, {"phase": RankPhase.SLEEPING}, {})
    set_ready(world, False)
    world.settle()
    assert world.condition("Ready") == ("False", "Sleeping")


def test_a_report_of_an_older_epoch_is_ignored(world: World) -> None:
    report(world, {"phase": RankPhase.SLEEPING}, {"phase": RankPhase.SLEEPING}, epoch=7)
    set_ready(world, False)
    world.settle()
    assert world.condition("Ready") == ("False", "Connecting")


def test_a_rank_that_dies_while_asleep_ends_the_epoch(world: World) -> None:
    go_to_sleep(world)
    world.end_pod("demo-0-1-1")
    world.step()
    assert world.condition("Ready")[1] == "PodFailed"
    assert world.status["groups"][0]["restarts"] == 1


def test_a_sleeping_group_does_not_report_an_old_failure(world: World) -> None:
    world.end_pod("demo-0-1-1")
    world.settle()
    world.reap()
    world.advance_time(600)
    world.settle()
    world.all_ready()
    world.settle()
    report(world, {"phase": RankPhase.SLEEPING}, {"phase": RankPhase.SLEEPING}, epoch=2)
    set_ready(world, False)
    world.settle()
    assert world.condition("Ready") == ("False", "Sleeping")


def kv(blocks: int, room_blocks: int, headroom_bytes: int) -> dict[str, Any]:
    return {"kv_blocks": blocks, "kv_room_blocks": room_blocks, "kv_room_bytes": headroom_bytes}


def test_the_status_names_the_rank_that_limits_the_kv_cache(world: World) -> None:
    report(world, kv(512, 900, 2**50), kv(512, 700, 2**50))
    world.settle()
    assert world.status["groups"][0]["kv"] == {
        "blocks": 512,
        "blockTokens": 32,
        "tokens": 512 * 32,
        "limitingRank": 1,
        "limitingRole": "second",
        "limitedBy": "Plan",
        "roomBlocks": 700,
    }
    newer = dict(world.status["groups"][0]["kvCache"])
    assert newer.pop("limitingRankBlocks") == 700
    assert newer == {
        name: value for name, value in world.status["groups"][0]["kv"].items() if name != "roomBlocks"
    }
    for _ in range(3):
        world.advance_time(600)
        world.step()
        assert world.writes == []
    del world.reports[0]  # one missing answer of the leader changes nothing
    world.step()
    assert world.writes == []


def test_the_status_has_the_locked_memory_and_the_transports_of_each_rank(world: World) -> None:
    memory = {"locked_memory_bytes": 4096, "locked_memory_limit_bytes": 65536}
    report(world, {**memory, "transports": ("ranks:nccl_p2p", "stages:gloo")}, {"locked_memory_bytes": 0})
    world.settle()
    first, second = world.status["groups"][0]["members"]
    assert (first["lockedMemoryBytes"], first["lockedMemoryLimitBytes"]) == (4096, 65536)
    assert first["transports"] == ["ranks:nccl_p2p", "stages:gloo"]
    assert (second["lockedMemoryBytes"], second.get("lockedMemoryLimitBytes")) == (0, None)
    assert second.get("transports", []) == []
    report(world, {**memory, "locked_memory_bytes": 8192}, {})  # no steps: not worth a write
    for _ in range(3):
        world.advance_time(600)
        world.step()
        assert world.writes == []


def test_ranks_of_earlier_workers_have_no_locked_memory(world: World) -> None:
    report(world, {}, {})
    world.settle()
    assert "lockedMemoryBytes" not in world.status["groups"][0]["members"][0]


def test_kv_tokens_of_a_windowed_model_count_full_length_sequences() -> None:
    kinds = (
        LayerKind(kv_heads=4, kv_width=64),
        LayerKind(kv_heads=4, kv_width=64, attention=AttentionKind.WINDOW, window=128),
    )
    profile = replace(PROFILE, kinds=kinds, kind_of_layer=(0, 1) * 4, max_position_embeddings=8192)
    world = World(spec=cpu_pair(engine={"maxModelLen": 8192}))
    world.settle()
    world.answer_inspection(profile.to_json())
    world.settle()
    world.all_ready()
    world.settle()
    report(world, kv(512, 900, 2**50), kv(512, 700, 2**50))
    world.settle()
    status = world.status["groups"][0]["kv"]
    # 256 blocks for full attention; 132 and one for the window of 127 tokens and two batches of 2048.
    assert (status["blocks"], status["blockTokens"]) == (512, 32)
    assert status["tokens"] == 511 * 8192 // (256 + 133)


def test_a_rank_with_less_kv_memory_than_planned_is_reported(world: World) -> None:
    report(world, kv(80, 80, 2**20), kv(80, 700, 2**50))
    world.settle()
    status = world.status["groups"][0]["kv"]
    assert (status["limitingRank"], status["limitedBy"], status["roomBlocks"]) == (0, "Memory", 80)


def test_the_status_drops_the_kv_cache_after_the_epoch_ends(world: World) -> None:
    report(world, kv(512, 900, 2**50), kv(512, 700, 2**50))
    world.settle()
    world.end_pod("demo-0-1-1")
    world.step()
    assert not {"kv", "kvCache"} & world.status["groups"][0].keys()


def test_no_kv_cache_is_reported_before_every_rank_has_one(world: World) -> None:
    report(world, kv(512, 900, 2**50), {})
    world.settle()
    assert "kv" not in world.status["groups"][0]


def test_the_status_reports_why_gpu_ranks_run_eagerly() -> None:
    assert build_plan_status(PLAN).eager_reason is None
    pair = [
        replace(
            PLAN.ranks[i],
            pod=i,
            local_rank=0,
            stage=0,
            tensor_rank=i,
            first_layer=0,
            end_layer=3,
            device=device,
        )
        for i, device in enumerate((Device.GPU, Device.CPU))
    ]
    mixed = replace(
        PLAN, mode=Mode.TENSOR, tensor_parallel_size=2, pipeline_parallel_size=1, ranks=tuple(pair)
    )
    assert build_plan_status(mixed).eager_reason == eager_reason(mixed)
    assert "CUDA graph" in build_plan_status(mixed).dump()["eagerReason"]
