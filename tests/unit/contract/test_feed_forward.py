"""The checks of plans with feed-forward ranks, and the unchanged text of plans without them."""

from dataclasses import replace

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import (
    BY_RATE,
    Device,
    EngineSettings,
    FeedForwardShare,
    Mode,
    Plan,
    RankAssignment,
)

ENGINE = EngineSettings(
    model="/model",
    served_name="m",
    dtype="bfloat16",
    max_model_len=512,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    block_size=32,
)


def _rank(rank: int, **changes: object) -> RankAssignment:
    values: dict[str, object] = {
        "rank": rank,
        "local_rank": rank,
        "pod": 0,
        "role": "gpu",
        "device": Device.GPU,
        "stage": 0,
        "tensor_rank": 0,
        "first_layer": 0,
        "end_layer": 6,
        "kv_cache_bytes": 1 << 20,
    }
    return RankAssignment(**{**values, **changes})  # type: ignore[arg-type]


def _lane(rank: int, lane: int, layers: tuple[int, ...] = (1, 4), share: int = 1) -> RankAssignment:
    return _rank(
        rank,
        device=Device.CPU,
        tensor_rank=lane,
        first_layer=layers[0],
        end_layer=layers[-1] + 1,
        kv_cache_bytes=0,
        feed_forward=FeedForwardShare(layers=layers, share=share),
    )


WHOLE = FeedForwardShare(layers=(1, 4), share=1, by_experts=True)


def _plan(*ranks: RankAssignment, mode: Mode = Mode.FEED_FORWARD) -> Plan:
    return Plan(mode=mode, tensor_parallel_size=1, pipeline_parallel_size=1, ranks=ranks, engine=ENGINE)


def test_stage_and_feed_forward_ranks_are_distinguished() -> None:
    plan = _plan(_rank(0), _lane(1, 0), _lane(2, 1, share=3))
    assert [rank.rank for rank in plan.stage_ranks] == [0]
    assert [rank.rank for rank in plan.feed_forward_ranks(0)] == [1, 2]
    assert plan.world_size == 3
    assert plan.layers_by_stage == (6,)
    assert [rank.num_layers for rank in plan.ranks] == [6, 2, 2]
    assert plan.stage(0) == (plan.ranks[0],)
    assert not plan.is_mixed(0)
    assert plan.pods[0].device is Device.GPU
    assert Plan.from_json(plan.to_json()) == plan


def _shared_stage(*lanes: RankAssignment) -> Plan:
    """Returns a plan in which two GPUs share the layers."""
    return Plan(
        mode=Mode.FEED_FORWARD,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        ranks=(_rank(0), _rank(1, tensor_rank=1), *lanes),
        engine=ENGINE,
    )


def test_each_rank_with_attention_has_equally_many_feed_forward_ranks() -> None:
    plan = _shared_stage(*(_lane(2 + lane, lane) for lane in range(4)))
    servers = [[each.rank for each in plan.feed_forward_ranks_of(rank)] for rank in plan.stage_ranks]
    assert servers == [[2, 3], [4, 5]]
    assert [plan.asking_rank(rank).rank for rank in plan.ranks[2:]] == [0, 0, 1, 1]
    assert (plan.schedules_ahead, plan.batches_at_once) == (False, 1)
    with pytest.raises(ContractError, match=r"must be a multiple of 2, .* \(got 3\)"):
        _shared_stage(*(_lane(2 + lane, lane) for lane in range(3)))


def test_a_plan_without_feed_forward_ranks_has_the_text_of_older_versions() -> None:
    plan = _plan(_rank(0), mode=Mode.PIPELINE)
    assert "feed_forward" not in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("ranks", "mode", "words"),
    [
        ((_rank(0),), Mode.FEED_FORWARD, "got 0 in mode FeedForward"),
        ((_rank(0), _lane(1, 0)), Mode.PIPELINE, "in no other mode"),
        ((_rank(0), _lane(1, 1)), Mode.FEED_FORWARD, "tensor_rank 1"),
        ((_rank(0), replace(_lane(1, 0), device=Device.GPU)), Mode.FEED_FORWARD, "got GPU"),
        ((_rank(0), replace(_lane(1, 0), stage=1)), Mode.FEED_FORWARD, r"stages \(got 1\)"),
        (
            (_rank(0), _lane(1, 0, layers=(4, 6))),
            Mode.FEED_FORWARD,
            r"layers must be from .* \(got \[4, 6\]\)",
        ),
        ((_rank(0), replace(_lane(1, 0), end_layer=6)), Mode.FEED_FORWARD, r"\(got 1 and 6\)"),
        ((_rank(0), _lane(1, 0, share=-1)), Mode.FEED_FORWARD, "got -1, and"),
        ((_rank(0), _lane(1, 0), _lane(2, 1, share=BY_RATE)), Mode.FEED_FORWARD, r"got 0, and 1 on rank 1"),
        ((_rank(0), _lane(1, 0, share=BY_RATE), _lane(2, 1)), Mode.FEED_FORWARD, r"got 1, and 0 on rank 1"),
        (
            (_rank(0), _lane(1, 0), _lane(2, 1, layers=(1, 5))),
            Mode.FEED_FORWARD,
            "layers and by_experts must be the same .* on rank 1",
        ),
        (
            (_rank(0), _lane(1, 0), replace(_lane(2, 1), feed_forward=WHOLE)),
            Mode.FEED_FORWARD,
            "layers and by_experts must be the same",
        ),
        (
            (replace(_lane(0, 0), first_layer=0, end_layer=6), _rank(1)),
            Mode.FEED_FORWARD,
            "Plan",
        ),
    ],
)
def test_inconsistent_feed_forward_plans_are_refused_with_a_reason(
    ranks: tuple[RankAssignment, ...], mode: Mode, words: str
) -> None:
    with pytest.raises(ContractError, match=words):
        _plan(*ranks, mode=mode)


def _two_stages(*lanes: RankAssignment) -> Plan:
    second = _rank(1, stage=1, pod=1, local_rank=0, first_layer=6, end_layer=12)
    ranks = (_rank(0), second, *lanes)
    return replace(
        _plan(_rank(0), mode=Mode.PIPELINE), mode=Mode.FEED_FORWARD, pipeline_parallel_size=2, ranks=ranks
    )


def test_feed_forward_ranks_may_have_pods_of_their_own() -> None:
    near = _lane(1, 0)
    far = replace(_lane(2, 1), pod=1, local_rank=0)
    plan = _plan(_rank(0), near, far, replace(_lane(3, 2), pod=1, local_rank=1))
    assert [[rank.rank for rank in pod.ranks] for pod in plan.pods] == [[0, 1], [2, 3]]
    assert plan.pods[1].device is Device.CPU
    assert Plan.from_json(plan.to_json()) == plan


def test_a_pod_of_feed_forward_ranks_serves_one_stage_and_has_no_other_rank() -> None:
    of_second = replace(_lane(3, 0, layers=(7, 8)), stage=1, pod=2, local_rank=1)
    alone = replace(_lane(2, 0), pod=2, local_rank=0)
    assert _two_stages(alone, replace(of_second, pod=3, local_rank=0)).world_size == 4
    with pytest.raises(
        ContractError,
        match=r"in a pod of only feed-forward ranks of this stage, with tensor_rank 0 \(got CPU, pod 2",
    ):
        _two_stages(alone, of_second)
    with pytest.raises(ContractError, match="got CPU, pod 1, tensor_rank 0"):
        _two_stages(replace(alone, pod=1, local_rank=1))
