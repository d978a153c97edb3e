"""Plans of feed-forward groups, written by hand."""

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
    by_experts: bool = False,
    device: Device = Device.CPU,
    ring_bytes: int = 0,
    **engine: Any,
) -> Plan:
    """Returns a plan of a rank with attention, and a feed-forward rank for each share, in its pod or others.

    Args:
        model: folder of the model.
        num_layers: of the model.
        remote: layers whose feed-forward parts the feed-forward ranks compute.
        shares: of the feed-forward ranks.
        pods: of the feed-forward ranks, ascending; that of the rank with attention, 0, by default.
        by_experts: whether these have whole experts.
        device: of the rank with attention.
        ring_bytes: of the GPU's memory, for experts that it computes itself.
        **engine: fields of EngineSettings to change.
    """
    plan = build_plan(model, layers=[num_layers], pods=[1], devices=[device], **engine)
    layers = tuple(remote)
    pod_of = tuple(pods) or (0,) * len(shares)
    before = (0, *pod_of)
    lanes = tuple(
        RankAssignment(
            rank=1 + lane,
            local_rank=before[: 1 + lane].count(pod),
            pod=pod,
            role=f"role-{pod}",
            device=Device.CPU,
            stage=0,
            tensor_rank=lane,
            first_layer=layers[0],
            end_layer=layers[-1] + 1,
            kv_cache_bytes=0,
            feed_forward=FeedForwardShare(layers=layers, share=share, by_experts=by_experts),
        )
        for lane, (share, pod) in enumerate(zip(shares, pod_of, strict=True))
    )
    asking = tuple(replace(rank, ring_bytes=ring_bytes) for rank in plan.ranks)
    return replace(plan, mode=Mode.FEED_FORWARD, ranks=(*asking, *lanes))
