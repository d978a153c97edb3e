"""Finds a feed-forward rank's columns of each tensor of an MLP. PURE.

Gate and up projections output the intermediate columns, and down projections read them. A rank with
columns [first, end) of both therefore computes its part of the sum alone. Formats differ in the dimension
that holds the columns, and in the number of columns per element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract.column_shares import Span
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a tensor.

    Attributes:
        dim: dimension to narrow; None for the whole tensor.
        zero: whether this rank uses zeros in place of the values.
        blocks: number of equal blocks of the dimension; each is narrowed in the same way, in order.
    """

    dim: int | None = None
    start: int = 0
    length: int = 0
    zero: bool = False
    blocks: int = 1


def part_of(name: str, shape: Sequence[int], columns: Span) -> Part:
    """Finds this rank's part of a checkpoint's tensor.

    Raises:
        ContractError: the tensor's format is unknown, or the tensor cannot be cut at the rank's columns.
    """
    *path, leaf = name.split(".")
    role = next((segment for segment in reversed(path) if segment in _UP | _DOWN), "")
    if columns.count == columns.total or (role and leaf in _WHOLE):
        return Part()
    if role in _DOWN and leaf == "bias":
        return Part(zero=not columns.once)
    dim = _column_dimension(role in _DOWN, leaf, len(shape)) if role else None
    if dim is None:
        raise ContractError(
            f"{name}: this tensor cannot be split over feed-forward ranks. Use feedForward.ranks: 1, or a "
            "bf16, FP8 block, AWQ, GPTQ, compressed-tensors int4 or MXFP4 checkpoint"
        )
    if dim < 0 or (role in _DOWN and leaf in {"scales", "weight_scale"} and shape[dim] == 1):
        return Part()  # a scale per output applies to each rank's part of the sum
    return _column_range(name, shape, dim, columns, blocks=2 if role in _HALVES else 1)


_NEITHER: Final = -1


def _column_dimension(down: bool, leaf: str, dims: int) -> int | None:
    """Finds the dimension of the intermediate columns: _NEITHER if it has none, None if unknown."""
    if leaf == "bias":
        return 0
    if leaf == "g_idx":  # GPTQ's group of each input
        return 0 if down else _NEITHER
    if leaf in _OUT_IN and dims > 1:
        return dims - 1 if down else dims - 2  # a first dimension of three is the experts
    if leaf in _IN_OUT:
        return 0 if down else 1
    return None


def _column_range(name: str, shape: Sequence[int], dim: int, columns: Span, blocks: int) -> Part:
    size = shape[dim] // blocks
    start, end = size * columns.first, size * columns.end
    if start % columns.total or end % columns.total:
        raise ContractError(
            f"{name}: got {size} elements for {columns.total} columns, which cannot be cut at "
            f"{columns.first} and {columns.end}; use one feed-forward rank"
        )
    length = (end - start) // columns.total
    return Part(dim=dim, start=start // columns.total, length=length, blocks=blocks)
