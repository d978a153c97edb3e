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
    def adds_bias(self) -> bool:
        """Whether this rank adds the terms that only one rank may add, such as the down projection's bias."""
        return self.first == 0


def share_columns(total: int, shares: Sequence[int], unit: int) -> list[Span]:
    """Divides intermediate columns among ranks by their shares, in whole units. Returns a span per rank.

    Each rank gets at least one unit.

    Args:
        shares: shares of the ranks, relative to each other.
        unit: columns that must stay together: a quantization group, a kernel's block.

    Raises:
        ContractError: there are several ranks, and fewer units than ranks or a part of a unit is left.
    """
    units = total // unit
    if total % unit and len(shares) > 1:
        raise ContractError(
            f"{len(shares)} feed-forward ranks cannot share {total} intermediate columns: {unit} columns "
            f"must stay together, and {total} is not divisible by {unit}. Use one feed-forward rank with the "
            f"cores and the memory of all {len(shares)} ranks"
        )
    if units < len(shares) and len(shares) > 1:
        raise ContractError(
            f"{len(shares)} feed-forward ranks cannot share {total} intermediate columns: each rank needs at "
            f"least {unit} columns, which must stay together. Use at most {units} ranks, with more cores each"
        )
    return _adjacent_spans(total, shares, unit)


def share_experts(total: int, shares: Sequence[int]) -> list[Span]:
    """Divides experts among ranks by their shares. Returns a span per rank.

    Each rank gets at least one expert.

    Raises:
        ContractError: there are fewer experts than ranks.
    """
    if total < len(shares):
        raise ContractError(
            f"{len(shares)} feed-forward ranks cannot share {total} experts: each rank needs at least one "
            f"expert. Use at most {total} ranks, with more cores each"
        )
    return _adjacent_spans(total, shares, unit=1)


def _adjacent_spans(total: int, shares: Sequence[int], unit: int) -> list[Span]:
    """Cuts 0..total into one span per rank, near its share; only the last may end inside a unit."""
    units = total // unit
    ends = [round(units * sum(shares[: index + 1]) / sum(shares)) for index in range(len(shares))]
    # Each span needs at least one unit: the first loop moves ends up for this, the second moves them down.
    for index in range(len(ends)):
        ends[index] = max(ends[index], (ends[index - 1] if index else 0) + 1)
    for index in reversed(range(len(ends))):
        ends[index] = min(ends[index], units - (len(ends) - 1 - index))
    bounds = [0, *(end * unit for end in ends[:-1]), total]
    return [Span(total=total, first=first, end=end) for first, end in pairwise(bounds)]


def shares_by_rate(rates: Sequence[float]) -> tuple[int, ...]:
    """Returns shares in proportion to the rates, at least 1 each. Similar rates get equal shares.

    Then all ranks take about the same time.

    Args:
        rates: speed of each rank, in any unit.
    """
    most = max(rates)
    if min(rates) >= _ALIKE * most:
        return (1,) * len(rates)
    return tuple(max(round(_RATE_STEPS * rate / most), 1) for rate in rates)


def column_unit_of(quantization: object) -> int:
    """Returns the columns that must stay together, given a checkpoint's `quantization_config` (or None)."""
    return math.lcm(KERNEL_BLOCK, _largest_group(quantization) or 1)


def _largest_group(quantization: object) -> int:
    """Returns the largest number of columns that share a scale; 0 without groups.

    Args:
        quantization: a `quantization_config`; parts of it, such as `config_groups`, count too.
    """
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
    sizes += [_largest_group(value) for value in quantization.values() if isinstance(value, Mapping)]
    return max(sizes, default=0)
