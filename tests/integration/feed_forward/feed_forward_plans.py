"""Builds plans of feed-forward groups."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heteroinfer_contract.plan import BY_RATE, Device, FeedForwardShare, Mode, Plan, RankAssignment
from tests.integration.worker.groups import build_plan


def feed_forward_plan(
    model: Path,
    *,
    num_layers: int,
    remote: Sequence[int],
    shares: Sequence[int] = (BY_RATE,),
    pods: Sequence[int] = (),
    tensor: int = 1,
    stages: Sequence[int] = (),
    by_experts: bool = False,
    device: Device = Device.CPU,
    ring_bytes: int = 0,
    **engine: Any,
) -> Plan:
    """Builds a plan of ranks with attention and their feed-forward ranks, in the same pod or in others.

    Args:
        model: folder of the model.
        num_layers: number of layers of the model.
        remote: layers whose experts or MLPs the feed-forward ranks compute.
        shares: share of each feed-forward rank of a stage.
        pods: pod of each of these ranks, ascending. Default: pod 0, as for the ranks with attention.
        tensor: number of ranks with attention of each stage.
        stages: number of layers of each stage; one stage by default.
        by_experts: whether each feed-forward rank has whole experts, instead of columns of all experts.
        device: device of the ranks with attention.
        ring_bytes: part of the GPU's memory for experts that the GPU computes itself.
        **engine: fields of EngineSettings to change.
    """
    stages = stages or (num_layers,)
    asking_ranks = tensor * len(stages)
    plan = build_plan(model, layers=stages, pods=[asking_ranks], tensor=tensor, devices=[device], **engine)
    pod_of = tuple(pods) or (0,) * len(shares)
    lanes: list[RankAssignment] = []
    for stage, served in enumerate(plan.ranks[::tensor]):
        layers = tuple(layer for layer in remote if served.first_layer <= layer < served.end_layer)
        for number, (share, pod) in enumerate(zip(shares, pod_of, strict=True)):
            earlier = sum(lane.pod == pod for lane in lanes)
            lanes.append(
                RankAssignment(
                    rank=asking_ranks + len(lanes),
                    local_rank=earlier if pod else asking_ranks + earlier,
                    pod=pod,
                    role=f"role-{pod}",
                    device=Device.CPU,
                    stage=stage,
                    tensor_rank=number,
                    first_layer=layers[0],
                    end_layer=layers[-1] + 1,
                    kv_cache_bytes=0,
                    feed_forward=FeedForwardShare(layers=layers, share=share, by_experts=by_experts),
                )
            )
    asking = tuple(replace(rank, ring_bytes=ring_bytes) for rank in plan.ranks)
    return replace(plan, mode=Mode.FEED_FORWARD, ranks=(*asking, *lanes))
