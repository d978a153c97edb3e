"""Divides intermediate columns or whole experts between feed-forward ranks. Stdlib only. Pure.

The worker cuts tensors by these shares, and the planner counts by them. Shares are whole units, so the
largest share exceeds the mean if the units cannot be divided equally.
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
"""If every rate is at least this part of the largest rate, all rates count as equal. Equal ranks then get the
same shares at each start, and so give the same answers. On an H200 host, two ranks with 7 cores each of one
NUMA node read at 0.88 to 0.98 of each other's rate (ten readings of one second, 2026-11-25)."""
_RATE_STEPS: Final = 100
"""Rates are rounded to this many steps of the largest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A rank's part of a layer: intermediate columns of each expert or of the MLP, or whole experts.

    Attributes:
        total: columns or experts of the layer.
        end: one past the rank's last column or expert.
    """

    total: int
    first: int
    end: int

    @property
    def count(self) -> int:
        """Number of columns or experts."""
        return self.end - self.first

    @property
    def once(self) -> bool:
        """Whether this rank adds terms that must be added only once, such as the down projection's bias."""
        return self.first == 0


def share_out(total: int, shares: Sequence[int], unit: int) -> list[Span]:
    """Returns each rank's columns: near its share, in whole units, at least one.

    Args:
        unit: columns that must stay together: a quantization group, a kernel's block.

    Raises:
        ContractError: there are fewer units than ranks, or `total` is not a multiple of the unit.
    """
    units = total // unit
    if total % unit and len(shares) > 1:
        raise ContractError(
            f"intermediate columns must be a multiple of {unit}, the weights' group, to divide them among "
            f"{len(shares)} feed-forward ranks (got {total}). Set feedForward.ranks: 1, with the cores and "
            "memory of all"
        )
    if units < len(shares) and len(shares) > 1:
        raise ContractError(
            f"feed-forward ranks must be at most {units}, the groups of {unit} in {total} intermediate "
            f"columns (got {len(shares)}). Lower feedForward.ranks, and give each rank more cores"
        )
    return _spans(total, shares, unit)


def share_experts(total: int, shares: Sequence[int]) -> list[Span]:
    """Returns each rank's experts: near its share, at least one.

    Raises:
        ContractError: there are fewer experts than ranks.
    """
    if total < len(shares):
        raise ContractError(
            f"feed-forward ranks must be at most {total}, the number of experts (got {len(shares)}). Lower "
            "feedForward.ranks, and give each rank more cores"
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
    """Returns shares in proportion to read rates, so that all ranks take equally long; at least 1 each."""
    most = max(rates)
    if min(rates) >= _ALIKE * most:
        return (1,) * len(rates)
    return tuple(max(round(_RATE_STEPS * rate / most), 1) for rate in rates)


def unit_of(quantization: object) -> int:
    """Returns the columns that must stay together, given a checkpoint's `quantization_config` (or None)."""
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
