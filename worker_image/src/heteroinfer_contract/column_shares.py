"""How feed-forward ranks share the intermediate columns of experts and MLPs, or experts. Stdlib only. Pure.

The worker cuts tensors by it, and the planner counts by it: a rank's share is in whole units, so that the
largest is more than the mean where units do not go round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from heteroinfer_contract.errors import ContractError

KERNEL_BLOCK: Final = 32
"""Columns of a block of vLLM's CPU kernels (vllm/…/fused_moe/experts/cpu_moe.py@v0.32.0)."""
_ALIKE: Final = 0.8
"""Rates within that part of the largest are taken as equal, so that equal ranks round alike, and answer the
same, at each start. Two ranks of 7 cores each of one H200 host's one NUMA node read at 0.88 to 0.98 of each
other in ten readings of a second (2026-11-25)."""
_RATE_STEPS: Final = 100
"""That rates are rounded to, of the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A rank's part of a layer: intermediate columns of each expert or of the MLP, or whole experts.

    Attributes:
        total: columns or experts of the layer.
        end: one past its last one.
    """

    total: int
    first: int
    end: int

    @property
    def count(self) -> int:
        """Returns how many it has."""
        return self.end - self.first

    @property
    def once(self) -> bool:
        """Returns whether this rank adds what must be added once, such as the down projection's bias."""
        return self.first == 0


def share_out(total: int, shares: Sequence[int], unit: int) -> list[Span]:
    """Returns each rank's columns: near its share, in whole units, at least one.

    Args:
        unit: columns that must stay together: a quantization group, a kernel's block.

    Raises:
        ContractError: there are fewer units than ranks, or `total` is no multiple of the unit.
    """
    units = total // unit
    if total % unit and len(shares) > 1:
        raise ContractError(
            f"got {total} intermediate columns for {len(shares)} feed-forward ranks, expected a multiple of "
            f"{unit}, which the weights' format keeps together; set feedForward.ranks: 1, with the cores and "
            "memory of all"
        )
    if units < len(shares) and len(shares) > 1:
        raise ContractError(
            f"got {len(shares)} feed-forward ranks for {total} intermediate columns in groups of {unit}, "
            f"expected at most {units}; set feedForward.ranks lower, with more cores for each"
        )
    return _spans(total, shares, unit)


def share_experts(total: int, shares: Sequence[int]) -> list[Span]:
    """Returns each rank's experts: near its share, at least one.

    Raises:
        ContractError: there are fewer experts than ranks.
    """
    if total < len(shares):
        raise ContractError(
            f"got {len(shares)} feed-forward ranks for {total} experts, expected at most {total}; set "
            "feedForward.ranks lower, with more cores for each"
        )
    return _spans(total, shares, unit=1)


def _spans(total: int, shares: Sequence[int], unit: int) -> list[Span]:
    units = total // unit
    ends = [round(units * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    for i in range(len(ends)):  # at least one unit each, from the front and from the back
        ends[i] = max(ends[i], (ends[i - 1] if i else 0) + 1)
    for i in reversed(range(len(ends))):
        ends[i] = min(ends[i], units - (len(ends) - 1 - i))
    bounds = [0, *(end * unit for end in ends[:-1]), total]
    return [Span(total=total, first=first, end=end) for first, end in pairwise(bounds)]


def shares_by_rate(rates: Sequence[float]) -> tuple[int, ...]:
    """Returns the ranks' shares by how fast each reads, so that all take equally long; at least 1 each."""
    most = max(rates)
    if min(rates) >= _ALIKE * most:
        return (1,) * len(rates)
    return tuple(max(round(_RATE_STEPS * rate / most), 1) for rate in rates)


def unit_of(quantization: object) -> int:
    """Returns how many columns must stay together, by a checkpoint's `quantization_config`; or None."""
    return math.lcm(KERNEL_BLOCK, _group_of(quantization) or 1)


def _group_of(quantization: object) -> int:
    """Returns the columns of one scale; 0 without groups."""
    if not isinstance(quantization, Mapping):
        return 0
    sizes = [
        int(value)
        for key, value in quantization.items()
        if key in {"group_size", "q_group_size"} and isinstance(value, int) and value > 0
    ]
    blocks = quantization.get("weight_block_size") or quantization.get("block_structure")
    if isinstance(blocks, list | tuple):
        sizes += [int(block) for block in blocks]
    sizes += [_group_of(value) for value in quantization.values() if isinstance(value, Mapping)]
    return max(sizes, default=0)
