"""Which part of each expert's or MLP's tensors is a feed-forward rank's: its columns, or experts. PURE.

Gate and up projections give the intermediate columns, down projections take them: a rank that has
columns [first, end) of both computes its part of the sum by itself. Formats differ in which dimension of a
tensor that is, and in how many columns one of its elements stands for. Whole experts are tensors of their
own, or a first dimension.
"""

import re
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
_STACKED: Final = {
    # Of gpt_oss, all experts in one tensor: dimension of the intermediate columns; gate and up alternate.
    "gate_up_proj_blocks": 1,
    "gate_up_proj_scales": 1,
    "gate_up_proj_bias": 1,
    "down_proj_blocks": 2,
    "down_proj_scales": 2,
}
_ONCE: Final = frozenset({"down_proj_bias"})
_NUMBER: Final = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a tensor a rank needs.

    Attributes:
        dim: dimension to narrow; None for the whole tensor.
        zero: whether its values count as zero on this rank.
        blocks: equal parts of the dimension, each of which is narrowed so; they stay in their order.
    """

    dim: int | None = None
    start: int = 0
    length: int = 0
    zero: bool = False
    blocks: int = 1


def part_of(name: str, shape: Sequence[int], columns: Span) -> Part:
    """Returns what of a checkpoint's tensor is this rank's.

    Raises:
        ContractError: the tensor is of a format that is not known here, or cannot be cut there.
    """
    *path, leaf = name.split(".")
    role = next((segment for segment in reversed(path) if segment in _UP | _DOWN), "")
    if columns.count == columns.total or (role and leaf in _WHOLE):
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


def experts_of(name: str, shape: Sequence[int], own: Span) -> tuple[str, Part] | None:
    """Returns the name that a tensor of routed experts has on this rank, and what of it is this rank's.

    Experts count from 0 on each rank, as if the model had no others.

    Returns:
        None for an expert of another rank.

    Raises:
        ContractError: the tensor is of all experts, and its first dimension is not theirs.
    """
    number = _NUMBER.search(name)
    if number is not None:
        local = int(number[0]) - own.first
        renamed = f"{name[: number.start()]}{local}{name[number.end() :]}"
        return (renamed, Part()) if 0 <= local < own.count else None
    if not shape or shape[0] != own.total:
        raise ContractError(
            f"{name}: got a tensor {tuple(shape)} that cannot be split over feed-forward ranks, expected one "
            f"of {own.total} experts first; use one feed-forward rank"
        )
    return name, Part(dim=0, start=own.first, length=own.count)


def kind_of(name: str) -> tuple[str, int] | None:
    """Returns the name of a numbered expert's tensor without the number, and the number; None for others.

    None of scales of activations too, which checkpoints lack of experts that their calibration did not reach.
    """
    number = _NUMBER.search(name)
    if number is None or name.rpartition(".")[2] in _WHOLE:
        return None
    return f"{name[: number.start()]}*{name[number.end() :]}", int(number[0])


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


def _narrow(name: str, shape: Sequence[int], dim: int, columns: Span, blocks: int) -> Part:
    size = shape[dim] // blocks
    start, end = size * columns.first, size * columns.end
    if start % columns.total or end % columns.total:
        raise ContractError(
            f"{name}: got {size} elements for {columns.total} columns, which cannot be cut at "
            f"{columns.first} and {columns.end}; use one feed-forward rank"
        )
    length = (end - start) // columns.total
    return Part(dim=dim, start=start // columns.total, length=length, blocks=blocks)
