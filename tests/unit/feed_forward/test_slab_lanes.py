"""The rank behind each lane of the slabs of a group."""

from dataclasses import replace

from heteroinfer_contract.plan import (
    Device,
    EngineSettings,
    FeedForwardShare,
    Mode,
    Plan,
    RankAssignment,
)
from vllm_heteroinfer.feed_forward.slab_lanes import asking_lanes, pod_lanes, relayed_lanes

ASKING = RankAssignment(
    rank=0,
    local_rank=0,
    pod=0,
    role="gpu",
    device=Device.GPU,
    stage=0,
    tensor_rank=0,
    first_layer=0,
    end_layer=4,
    kv_cache_bytes=1,
)


def plan(*pods: int) -> Plan:
    """Returns a plan with a feed-forward rank in each of these pods."""
    share = FeedForwardShare(layers=(0, 1, 2, 3))
    lanes = [
        replace(
            ASKING,
            rank=1 + lane,
            local_rank=(0, *pods)[: 1 + lane].count(pod),
            pod=pod,
            device=Device.CPU,
            tensor_rank=lane,
            kv_cache_bytes=0,
            feed_forward=share,
        )
        for lane, pod in enumerate(pods)
    ]
    engine = EngineSettings(
        model="m",
        served_name="m",
        dtype="bfloat16",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
    )
    return Plan(
        mode=Mode.FEED_FORWARD,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        ranks=(ASKING, *lanes),
        engine=engine,
    )


def numbers(ranks: tuple[RankAssignment, ...]) -> list[int]:
    return [rank.rank for rank in ranks]


def test_ranks_of_the_same_pod_come_first_and_another_pod_has_one_lane() -> None:
    own = plan(1, 1, 0, 2)
    lanes = asking_lanes(own, ASKING)
    assert numbers(lanes) == [3, 1, 4]
    assert [(lane, rank.rank) for lane, rank in relayed_lanes(lanes, ASKING)] == [(1, 1), (2, 4)]
    assert numbers(pod_lanes(own, own.ranks[2])) == [1, 2]
    assert numbers(pod_lanes(own, own.ranks[4])) == [4]


def test_each_of_two_asking_ranks_has_a_slab_of_its_own() -> None:
    one = plan(0, 0)
    second = replace(ASKING, rank=1, local_rank=1, tensor_rank=1)
    lanes = [replace(rank, rank=rank.rank + 1, local_rank=rank.local_rank + 1) for rank in one.ranks[1:]]
    two = replace(one, tensor_parallel_size=2, ranks=(ASKING, second, *lanes))
    assert [numbers(asking_lanes(two, asking)) for asking in two.stage_ranks] == [[2], [3]]
    assert [numbers(pod_lanes(two, lane)) for lane in two.ranks[2:]] == [[2], [3]]


def test_ranks_of_one_pod_need_no_relay() -> None:
    own = plan(0, 0)
    assert numbers(asking_lanes(own, ASKING)) == [1, 2]
    assert relayed_lanes(asking_lanes(own, ASKING), ASKING) == ()
