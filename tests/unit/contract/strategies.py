"""Strategies that draw random plans, launches and reports of the contract."""

from dataclasses import replace

from hypothesis import strategies as st

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import MAX_BLOCKS, GroupReport, RankPhase, RankStatus
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import (
    BY_RATE,
    MAX_WORLD_SIZE,
    Device,
    EngineSettings,
    FeedForwardShare,
    Mode,
    Plan,
    RankAssignment,
)
from heteroinfer_contract.pod_launch import CpuBinding, PodAddress, PodLaunch

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(0, 1 << 50)
positive = st.integers(1, 1 << 20)
seconds = st.floats(0, 1e9, allow_nan=False)
ports = st.integers(1, 65535)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draws a plan of any topology: stages with equally many ranks, which are cut into pods at random."""
    tensor = draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    world = tensor * len(layers)
    cuts = sorted(draw(st.sets(st.integers(1, world - 1)))) if world > 1 else []
    starts = [0, *cuts]
    devices = draw(st.lists(st.sampled_from(Device), min_size=len(starts), max_size=len(starts)))
    ranks = []
    for rank in range(world):
        pod = sum(start <= rank for start in starts) - 1
        stage, tensor_rank = divmod(rank, tensor)
        ranks.append(
            RankAssignment(
                rank=rank,
                local_rank=rank - starts[pod],
                pod=pod,
                role=f"role-{pod}",
                device=devices[pod],
                stage=stage,
                tensor_rank=tensor_rank,
                first_layer=sum(layers[:stage]),
                end_layer=sum(layers[: stage + 1]),
                kv_cache_bytes=draw(counts),
                weight_bytes=draw(counts),
                predicted_step_s=draw(seconds),
            )
        )
    mode = draw(st.sampled_from(Mode))
    if mode is Mode.FEED_FORWARD:
        ranks += _feed_forward_ranks(draw, ranks, layers, tensor)
    return Plan(
        mode=mode,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=len(layers),
        ranks=tuple(ranks),
        engine=draw(engines),
    )


def _feed_forward_ranks(
    draw: st.DrawFn, ranks: list[RankAssignment], layers: list[int], tensor: int
) -> list[RankAssignment]:
    """Draws feed-forward ranks for at least one of the stages."""
    own: list[RankAssignment] = []
    for stage in sorted(draw(st.sets(st.integers(0, len(layers) - 1), min_size=1))):
        first = sum(layers[:stage])
        remote = sorted(draw(st.sets(st.integers(first, first + layers[stage] - 1), min_size=1)))
        pod = next(rank.pod for rank in ranks if rank.stage == stage)
        shares = draw(st.sampled_from([st.just(BY_RATE), positive]))
        by_experts = draw(st.booleans())
        own += [
            RankAssignment(
                rank=len(ranks) + len(own) + number,
                local_rank=sum(rank.pod == pod for rank in [*ranks, *own]) + number,
                pod=pod,
                role=f"role-{pod}",
                device=Device.CPU,
                stage=stage,
                tensor_rank=number,
                first_layer=remote[0],
                end_layer=remote[-1] + 1,
                kv_cache_bytes=0,
                weight_bytes=draw(counts),
                feed_forward=FeedForwardShare(
                    layers=tuple(remote), share=draw(shares), by_experts=by_experts
                ),
            )
            for number in range(tensor * draw(st.integers(1, 3)))
        ]
    return own


engines = st.builds(
    EngineSettings,
    model=texts,
    served_name=texts,
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    max_model_len=positive,
    max_num_batched_tokens=positive,
    max_num_seqs=positive,
    block_size=positive,
    seed=counts,
    eager_gpu=st.booleans(),
    eager_cpu=st.booleans(),
    batches_in_flight=positive,
    extra_args=st.lists(texts, max_size=4).map(tuple),
)
addresses = st.builds(
    PodAddress,
    host=texts,
    api_port=ports,
    health_port=ports,
    control_port=ports,
    rendezvous_port=ports,
    executor_port=ports,
    metrics_port=ports,
)
# An environment variable cannot contain a NUL character.
env_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
launches = st.builds(
    PodLaunch,
    group=env_texts,
    group_uid=env_texts,
    epoch=positive,
    pod_index=st.integers(0, 8),
    addresses=st.lists(addresses, min_size=1, max_size=5).map(tuple),
    startup_timeout_s=seconds,
    heartbeat_timeout_s=seconds,
    network_interface=env_texts,
    cpu_binding=st.sampled_from(CpuBinding),
)
failures = st.builds(
    Failure,
    reason=st.sampled_from(FailureReason),
    message=st.text(max_size=9000),
    pod=st.none() | st.integers(0, MAX_WORLD_SIZE - 1),
    rank=st.none() | st.integers(0, MAX_WORLD_SIZE - 1),
    exit_code=st.none() | st.integers(-64, 255),
    last_log=st.text(max_size=9000),
    time=seconds,
)
rank_statuses = st.builds(
    RankStatus,
    rank=counts,
    pod=counts,
    phase=st.sampled_from(RankPhase),
    loaded_bytes=counts,
    total_bytes=counts,
    steps=counts,
    step_s=seconds,
    compute_s=seconds,
    wait_s=seconds,
    transfer_s=seconds,
    heartbeat_age_s=seconds,
    kv_blocks=st.integers(0, MAX_BLOCKS),
    kv_room_blocks=counts,
    kv_room_bytes=counts,
    locked_memory_bytes=st.none() | counts,
    locked_memory_limit_bytes=st.none() | counts,
    transports=st.lists(st.sampled_from(["ranks:nccl_p2p", "stages:gloo"]), max_size=2).map(tuple),
    gpu_experts_from=st.none() | counts,
)
group_reports = st.builds(
    GroupReport,
    group_uid=texts,
    epoch=positive,
    plan_hash=texts,
    ready=st.booleans(),
    message=texts,
    ranks=st.lists(rank_statuses, max_size=5).map(
        lambda ranks: tuple(replace(status, rank=rank) for rank, status in enumerate(ranks))
    ),
)
_sizes = st.builds(
    ModelProfile,
    architecture=texts,
    dtype=texts,
    num_layers=st.just(1),
    hidden_size=positive,
    num_attention_heads=positive,
    num_kv_heads=positive,
    head_dim=positive,
    vocab_size=positive,
    max_position_embeddings=positive,
    layer_bytes=st.lists(counts, min_size=1, max_size=20).map(tuple),
    embedding_bytes=counts,
    head_bytes=counts,
    tied_head=st.booleans(),
    other_bytes=counts,
    quantization=texts,
)
profiles = _sizes.map(lambda profile: replace(profile, num_layers=len(profile.layer_bytes)))
