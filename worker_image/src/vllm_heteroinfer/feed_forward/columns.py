"""Which part of each expert's or MLP's tensors is a feed-forward rank's: its intermediate columns. PURE.

Gate and up projections give the intermediate columns, down projections take them: a rank that has
columns [first, end) of both computes its part of the sum by itself. Formats differ in which dimension of a
tensor that is, and in how many columns one of its elements stands for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from heteroinfer_contract.errors import ContractError

_UP: Final = frozenset({"gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "input_linear"})
_DOWN: Final = frozenset({"down_proj", "w2", "output_linear"})
_OUT_IN: Final = frozenset(
    {"weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"}
)
"""Tensors whose dimensions are outputs, inputs."""
_IN_OUT: Final = frozenset({"qweight", "qzeros", "scales"})
"""Tensors of AWQ and GPTQ: inputs, outputs."""
_WHOLE: Final = frozenset({"weight_shape", "input_scale", "activation_scale"})
_HALVES: Final = frozenset({"gate_up_proj", "input_linear"})
"""Projections whose output is all gate columns, then all up columns."""
_STACKED: Final = {
    # Of gpt_oss, all experts in one tensor: dimension of the intermediate columns; gate and up alternate.
    "gate_up_proj_blocks": 1,
    "gate_up_proj_scales": 1,
    "gate_up_proj_bias": 1,
    "down_proj_blocks": 2,
    "down_proj_scales": 2,
}
KERNEL_BLOCK: Final = 32
"""Columns of a block of vLLM's CPU kernels (vllm/…/fused_moe/experts/cpu_moe.py@v0.32.0)."""
_ONCE: Final = frozenset({"down_proj_bias"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A rank's intermediate columns.

    Attributes:
        total: of a layer.
        first: its first one.
        end: one past its last one.
        once: whether this rank adds what must be added once, such as the down projection's bias.
    """

    total: int
    first: int
    end: int
    once: bool

    @property
    def width(self) -> int:
        """Returns how many columns it has."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a tensor a rank needs.

    Attributes:
        dim: dimension to narrow; None for the whole tensor.
        start: first index of it.
        length: indices of it.
        zero: whether its values count as zero on this rank.
        blocks: equal parts of the dimension, each of which is narrowed so; they stay in their order.
    """

    dim: int | None = None
    start: int = 0
    length: int = 0
    zero: bool = False
    blocks: int = 1


def share_out(total: int, shares: Sequence[int], unit: int) -> list[Columns]:
    """Returns each rank's columns: near its share, in whole units, at least one.

    Args:
        total: columns of a layer.
        shares: of the ranks, in relation to each other.
        unit: columns that must stay together: a quantization group, a kernel's block.

    Raises:
        ContractError: there are fewer units than ranks, or `total` is no multiple of the unit.
    """
    units = total // unit
    if total % unit and len(shares) > 1:
        raise ContractError(
            f"got {total} intermediate columns for {len(shares)} feed-forward ranks, expected a multiple of "
            f"{unit}, which the weights' format keeps together; use one feed-forward rank"
        )
    if units < len(shares) and len(shares) > 1:
        raise ContractError(
            f"got {len(shares)} feed-forward ranks for {total} intermediate columns in groups of {unit}, "
            f"expected at most {units}; use fewer ranks with more cores"
        )
    ends = [round(units * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    for i in range(len(ends)):  # at least one unit each, from the front and from the back
        ends[i] = max(ends[i], (ends[i - 1] if i else 0) + 1)
    for i in reversed(range(len(ends))):
        ends[i] = min(ends[i], units - (len(ends) - 1 - i))
    bounds = [0, *(end * unit for end in ends[:-1]), total]
    return [
        Columns(total=total, first=first, end=end, once=i == 0)
        for i, (first, end) in enumerate(pairwise(bounds))
    ]


def part_of(name: str, shape: Sequence[int], columns: Columns) -> Part:
    """Returns what of a checkpoint's tensor is this rank's.

    Args:
        name: of the tensor.
        shape: of the whole tensor.
        columns: of this rank.

    Raises:
        ContractError: the tensor is of a format that is not known here, or cannot be cut there.
    """
    *path, leaf = name.split(".")
    role = next((segment for segment in reversed(path) if segment in _UP | _DOWN), "")
    if columns.width == columns.total or (role and leaf in _WHOLE):
        return Part()
    if leaf in _ONCE or (role in _DOWN and leaf == "bias"):
        return Part(zero=not columns.once)
    if role == "gate_up_proj" and "experts" in path:
        role = ""  # halves in some formats, by turns in others (gpt_oss); the name does not say
    dim = _STACKED[leaf] if leaf in _STACKED else _dim(role in _DOWN, leaf, len(shape)) if role else None
    if dim is None:
        raise ContractError(
            f"{name}: got a tensor that cannot be split over feed-forward ranks, expected one of a bf16, FP8 "
            "block, AWQ, GPTQ, compressed-tensors int4 or MXFP4 checkpoint; use one feed-forward rank"
        )
    if dim < 0 or (role in _DOWN and leaf in {"scales", "weight_scale"} and shape[dim] == 1):
        return Part()  # a scale of each output holds for each rank's part of its sum
    return _narrow(name, shape, dim, columns, blocks=2 if role in _HALVES else 1)


_NEITHER: Final = -1


def _dim(down: bool, leaf: str, dims: int) -> int | None:
    """Returns the dimension of the intermediate columns, _NEITHER if there is none, None if it is unknown."""
    if leaf == "bias":
        return 0
    if leaf == "g_idx":  # GPTQ's group of each input
        return 0 if down else _NEITHER
    if leaf in _OUT_IN and dims > 1:
        return dims - 1 if down else dims - 2  # a first dimension of three is the experts
    if leaf in _IN_OUT:
        return 0 if down else 1
    return None


def _narrow(name: str, shape: Sequence[int], dim: int, columns: Columns, blocks: int) -> Part:
    size = shape[dim] // blocks
    start, end = size * columns.first, size * columns.end
    if start % columns.total or end % columns.total:
        raise ContractError(
            f"{name}: got {size} elements for {columns.total} columns, which cannot be cut at "
            f"{columns.first} and {columns.end}; use one feed-forward rank"
        )
    length = (end - start) // columns.total
    return Part(dim=dim, start=start // columns.total, length=length, blocks=blocks)


def unit_of(group: int) -> int:
    """Returns how many columns must stay together; `group` is the columns of one scale, 0 without scales."""
    return math.lcm(KERNEL_BLOCK, group or 1)
