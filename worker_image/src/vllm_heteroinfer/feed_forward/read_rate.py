"""How fast each feed-forward rank of a stage reads memory while all of them do, published to the others.

Their shares follow from it: ranks have equally many cores, but no plan knows which NUMA node each gets, or
what else reads from it. Measured before ranks agree on their settings, so that the rank with attention,
which waits for that, does not load meanwhile. Imports torch.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from heteroinfer_contract.column_shares import shares_by_rate
from heteroinfer_contract.plan import Plan, RankAssignment
from vllm_heteroinfer.kernels.host_caches import LEAST_BYTES
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.kernels.memory_stream import PRODUCT_BYTES, memory_stream
from vllm_heteroinfer.kernels.rounds import median_s

if TYPE_CHECKING:
    from vllm_heteroinfer.group.deadline import Deadline
    from vllm_heteroinfer.group.rendezvous import GroupStore

_logger = logging.getLogger(__name__)

READING_S: Final = 1.0
"""Of all ranks at once: longer than most of what else a host does for a moment."""


def publish(plan: Plan, rank: RankAssignment, store: "GroupStore", deadline: "Deadline") -> None:
    """Reads with all feed-forward ranks of the stage, and tells them how fast.

    Called by all of them; nothing where the plan says their shares.

    Raises:
        ContractError: HETEROINFER_CPU_LINEAR is neither `auto` nor `onednn`.
        TimeoutError: another one was not there by the deadline.
    """
    lanes = plan.feed_forward_ranks(rank.stage)
    if not _is_by_rate(lanes):
        return
    # What its weights will take it has, and nothing is loaded yet.
    most_bytes = max(rank.weight_bytes, LEAST_BYTES)
    products = memory_stream(ours=is_wanted(os.environ), most_bytes=most_bytes)
    store.put(_key("reads", rank), "")
    for lane in lanes:
        store.get(_key("reads", lane), deadline, what=f"start of reading of rank {lane.rank}", rank=lane.rank)
    with torch.inference_mode():
        round_s = median_s(products, least_s=READING_S, most_s=READING_S)
    store.put(_key("rate", rank), str(round(PRODUCT_BYTES * len(products) / round_s)))


def agreed_shares(
    plan: Plan, rank: RankAssignment, store: "GroupStore", deadline: "Deadline"
) -> tuple[int, ...]:
    """Returns the shares of all feed-forward ranks of a rank's stage, the same in each of them.

    Raises:
        TimeoutError: another one did not `publish` by the deadline.
    """
    lanes = plan.feed_forward_ranks(rank.stage)
    if not _is_by_rate(lanes):
        return tuple(lane.feed_forward.share or 1 for lane in lanes if lane.feed_forward is not None)
    rates = [
        int(store.get(_key("rate", lane), deadline, what=f"read rate of rank {lane.rank}", rank=lane.rank))
        for lane in lanes
    ]
    shares = shares_by_rate(rates)
    if rank == lanes[0]:
        words = ", ".join(
            f"rank {lane.rank} {rate / 1e9:.1f}" for lane, rate in zip(lanes, rates, strict=True)
        )
        _logger.info(
            "feed-forward ranks read at once, in GB/s: %s; shares %s", words, ":".join(map(str, shares))
        )
    return shares


def _is_by_rate(lanes: Sequence[RankAssignment]) -> bool:
    shares = [lane.feed_forward.share for lane in lanes if lane.feed_forward is not None]
    return len(shares) > 1 and not any(shares)


def _key(what: str, rank: RankAssignment) -> str:
    return f"feed-forward/{what}/{rank.rank}"
