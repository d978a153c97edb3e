"""Measures how fast each feed-forward rank of a stage reads memory while all ranks read. Imports torch.

The ranks publish their rates, which determine their shares of each layer. Ranks have equal numbers of cores,
but a plan cannot know on which NUMA node a rank runs, or how loaded this node is. The ranks measure before
all ranks agree on their settings. The rank with attention waits for this agreement, so it loads no weights
during the measurement.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from heteroinfer_contract.column_shares import shares_by_rate
from heteroinfer_contract.plan import Plan, RankAssignment
from vllm_heteroinfer.kernels.host_caches import MIN_SAMPLE_BYTES
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.kernels.memory_stream import PRODUCT_BYTES, memory_stream
from vllm_heteroinfer.kernels.rounds import median_s

if TYPE_CHECKING:
    from vllm_heteroinfer.group.deadline import Deadline
    from vllm_heteroinfer.group.rendezvous import GroupStore

_logger = logging.getLogger(__name__)

READING_S: Final = 1.0
"""Time for which all ranks read at the same time. Most short disturbances on a host are shorter."""


def publish_read_rate(plan: Plan, rank: RankAssignment, store: "GroupStore", deadline: "Deadline") -> None:
    """Measures this rank's read rate together with the stage's other feed-forward ranks, and publishes it.

    Every feed-forward rank must call this function. It does nothing if the plan sets the shares, or if the
    asking rank has only one feed-forward rank.

    Raises:
        ContractError: HETEROINFER_CPU_LINEAR is neither `auto` nor `onednn`.
        TimeoutError: another rank did not start by the deadline.
    """
    if not _shares_follow_rates(plan.feed_forward_ranks_of(plan.asking_rank(rank))):
        return
    # Only these ranks of the stage call store.put below, so waiting for another rank would never end.
    ranks = [
        each
        for each in plan.feed_forward_ranks(rank.stage)
        if _shares_follow_rates(plan.feed_forward_ranks_of(plan.asking_rank(each)))
    ]
    # The memory for this rank's weights is still free, because nothing is loaded yet.
    max_bytes = max(rank.weight_bytes, MIN_SAMPLE_BYTES)
    products = memory_stream(ours=is_wanted(os.environ), max_bytes=max_bytes)
    # Waits for all ranks, so that all measure at the same time.
    store.put(_store_key("reads", rank), "")
    for other in ranks:
        store.get(
            _store_key("reads", other),
            deadline,
            awaited=f'"ready to measure" message from rank {other.rank}',
            rank=other.rank,
        )
    with torch.inference_mode():
        round_s = median_s(products, min_s=READING_S, max_s=READING_S)
    store.put(_store_key("rate", rank), str(round(PRODUCT_BYTES * len(products) / round_s)))


def agreed_shares(
    plan: Plan, rank: RankAssignment, store: "GroupStore", deadline: "Deadline"
) -> tuple[int, ...]:
    """Returns the shares of all feed-forward ranks that have the same asking rank as `rank`, in their order.

    The plan may set these shares. Otherwise they follow the published read rates. All these ranks get the
    same result.

    Raises:
        TimeoutError: another rank did not publish its read rate by the deadline.
    """
    ranks = plan.feed_forward_ranks_of(plan.asking_rank(rank))
    if not _shares_follow_rates(ranks):
        return tuple(each.feed_forward.share or 1 for each in ranks if each.feed_forward is not None)
    rates = [
        int(
            store.get(
                _store_key("rate", each), deadline, awaited=f"read rate of rank {each.rank}", rank=each.rank
            )
        )
        for each in ranks
    ]
    shares = shares_by_rate(rates)
    if rank == ranks[0]:  # one rank logs the rates for all
        rates_text = ", ".join(
            f"rank {each.rank} {rate / 1e9:.1f}" for each, rate in zip(ranks, rates, strict=True)
        )
        _logger.info(
            "read rates of feed-forward ranks, measured at the same time, in GB/s: %s. Shares of layers: %s",
            rates_text,
            ":".join(map(str, shares)),
        )
    return shares


def _shares_follow_rates(ranks: Sequence[RankAssignment]) -> bool:
    """Returns whether shares follow the read rates: there are several ranks, and the plan sets no share."""
    shares = [each.feed_forward.share for each in ranks if each.feed_forward is not None]
    return len(shares) > 1 and not any(shares)


def _store_key(name: str, rank: RankAssignment) -> str:
    """Returns the key of a rank's value in the group's store."""
    return f"feed-forward/{name}/{rank.rank}"
