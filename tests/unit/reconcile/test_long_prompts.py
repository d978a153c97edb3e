"""The GPU's part in long prompts: groups report the measurement of their present epoch."""

import pytest

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from tests.unit.planning.test_ring_choice import qwen
from tests.unit.reconcile.test_mode import nodes
from tests.unit.reconcile.world import World

FEED_FORWARD = {"cpu": "14", "memory": "64Gi", "layers": 24}


@pytest.fixture
def world() -> World:
    """A group that serves with a ring for experts."""
    role = {"name": "gpu", "device": "GPU", "deviceMemory": "80Gi", "feedForward": FEED_FORWARD}
    spec = {
        "model": {"uri": "file:///models/mixture"},
        "engine": {"maxModelLen": 8192},
        "parallelism": {"mode": "FeedForward"},
        "roles": [role],
    }
    found = World(spec=spec, nodes=nodes(80, cpus=64))
    found.settle()
    found.answer_inspection(qwen().to_json())
    found.settle()
    found.all_ready()
    found.settle()
    assert "the GPU computes a part" in found.status["plans"][0]["longPrompts"]
    return found


def report(world: World, *first_rows: int | None) -> str | None:
    """Has the leader report from how many rows on each rank's GPU computes experts; returns the status."""
    group = world.status["groups"][0]
    ranks = (
        RankStatus(rank=rank, pod=0, phase=RankPhase.READY, gpu_experts_from=rows)
        for rank, rows in enumerate(first_rows)
    )
    world.reports[0] = GroupReport(
        group_uid="uid-demo/0",
        epoch=group["epoch"],
        plan_hash=group["planHash"],
        ready=True,
        message="",
        ranks=tuple(ranks),
    )
    world.settle()
    found: str | None = world.status["groups"][0].get("longPrompts")
    return found


def test_a_group_reports_from_how_many_tokens_on_its_gpu_computes_experts(world: World) -> None:
    assert report(world, None, None) is None, "older workers report nothing"
    expected = "in steps of 257 tokens or more, the GPU computes a part of the experts, as measured"
    assert report(world, 257, None) == expected
    del world.reports[0]
    world.step()
    assert world.writes == []
    assert world.condition("Ready")[0] == "True"


def test_a_group_whose_gpu_cannot_copy_experts_serves_and_reports_it(world: World) -> None:
    expected = "CPUs compute all experts in all steps, as measured. The log of rank 0 has the reason"
    assert report(world, 0, None) == expected
    assert world.condition("Ready") == ("True", "Serving")
    assert "the GPU computes a part" in world.status["plans"][0]["longPrompts"], "the prediction stays"


def test_the_status_drops_the_measured_long_prompts_after_the_epoch_ends(world: World) -> None:
    assert report(world, 257, None)
    world.end_pod(world.workers()[0])
    world.step()
    assert "longPrompts" not in world.status["groups"][0]
