"""Routed experts whose weights stay in their checkpoint's format. Imports torch, not vLLM.

The kernels read each chosen expert once, on every instruction set of `kernels/coded.py`. w13 is vLLM's name
for an expert's gates and ups, and w2 for its projection back to the hidden size.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf
from typing import Final

import torch

from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.coded import (
    ELEMENTS,
    SHARED_COLUMNS,
    Coded,
    Format,
    NativeFormat,
    Scale,
    pack,
    packed_bytes,
)
from vllm_heteroinfer.kernels.library import KernelLibrary

MAX_CHOICES: Final = 256
"""Maximum number of experts for each row."""


class ActivationKind(IntEnum):
    """Function of the gate."""

    SWISH = 0
    """g * sigmoid(alpha * g); SiLU with alpha 1."""
    GELU = 1
    GELU_TANH = 2
    RELU2 = 3
    """ReLU squared."""
    SWISH_LIMITED = 4
    """min(g * sigmoid(alpha * g), limit). Other kinds limit g instead of their result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """How the columns of w13 become the inputs of w2.

    An input of w2 is kind(gate) * (up + offset). If the activation is not gated, an input of w2 is
    kind(column).

    Attributes:
        alpha: factor in the sigmoid of SWISH and SWISH_LIMITED.
        limit: gates are at most `limit`, and ups between -limit and limit. SWISH_LIMITED limits the values of
            its function instead of the gates.
    """

    kind: ActivationKind = ActivationKind.SWISH
    gated: bool = True
    alpha: float = 1.0
    limit: float = inf
    offset: float = 0.0


class _NativeActivation(ctypes.Structure):
    """`Activation` of source/coded.h."""

    _fields_ = (
        ("kind", ctypes.c_long),
        ("gated", ctypes.c_long),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "offset")),
    )


class _NativeCodedExperts(ctypes.Structure):
    """`Layer` of source/coded_experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w13", "w2")),
        ("format13", NativeFormat),
        ("format2", NativeFormat),
        *((name, ctypes.c_void_p) for name in ("bias13", "bias2")),
        *((name, ctypes.c_long) for name in ("experts", "hidden", "inner", "element")),
        ("activation", _NativeActivation),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPart:
    """The packed w13 or w2 of all experts.

    Attributes:
        packed: uint8 [experts, bytes].
        columns: number of columns. The columns of w13 are gates and ups.
    """

    format: Format
    columns: int
    inputs: int
    packed: torch.Tensor


def allocate_part(
    library: KernelLibrary, form: Format, experts: int, columns: int, inputs: int
) -> PackedPart:
    """Returns uninitialized memory for the packed weights of all experts; `pack_expert_into` fills it."""
    size = packed_bytes(library, form, columns, inputs)
    packed = weight_memory.empty((experts, size), torch.uint8)
    return PackedPart(format=form, columns=columns, inputs=inputs, packed=packed)


def pack_expert_into(
    library: KernelLibrary, part: PackedPart, expert: int, weight: Coded, *, gated: bool
) -> None:
    """Packs the weight of one expert.

    Args:
        gated: whether this is w13 with gates in the first half of its columns and ups in the second.

    Raises:
        ValueError: the weight has another format or size, or its columns are not a multiple of 64.
    """
    if (weight.format, weight.columns, weight.inputs) != (part.format, part.columns, part.inputs):
        raise ValueError(
            f"coded weight of expert {expert}: must be {part.format} of {part.columns} x {part.inputs}, as "
            f"for the layer's other experts (got {weight.format} of {weight.columns} x {weight.inputs})"
        )
    pack(library, interleave_gates_and_ups(weight) if gated else weight, part.packed[expert])


def interleave_gates_and_ups(weight: Coded) -> Coded:
    """Returns w13 with alternating blocks of 32 gates and 32 ups, the order that the kernels read.

    Raises:
        ValueError: the columns are not a multiple of 64.
    """
    if weight.columns % (2 * SHARED_COLUMNS):
        raise ValueError(f"coded weight: w13 must have a multiple of 64 columns (got {weight.columns})")

    def interleave(tensor: torch.Tensor | None, block: int) -> torch.Tensor | None:
        """Interleaves the gates and the ups of a tensor in blocks; None for None."""
        return None if tensor is None else interleave_halves(tensor, block)

    # With BLOCK_F32, one row of scales belongs to a whole block of columns.
    scale_block = 1 if weight.format.scale == Scale.BLOCK_F32 else SHARED_COLUMNS
    return replace(
        weight,
        codes=interleave_halves(weight.codes, SHARED_COLUMNS),
        scales=interleave(weight.scales, scale_block),
        zeros=interleave(weight.zeros, SHARED_COLUMNS),
        factors=interleave(weight.factors, SHARED_COLUMNS),
    )


def interleave_halves(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Reorders rows from all gates, then all ups, to alternating blocks of `block` gates and `block` ups."""
    return rows.view(2, -1, block, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape).contiguous()


def _check_parts(w13: PackedPart, w2: PackedPart, dtype: torch.dtype, *, gated: bool) -> None:
    """Raises ValueError if w13 and w2 do not belong together, or no kernel supports sizes or `dtype`."""
    inner, hidden = w2.inputs, w2.columns
    w13_sizes = (len(w13.packed), w13.columns, w13.inputs)
    expected_sizes = (len(w2.packed), inner * (2 if gated else 1), hidden)
    if w13_sizes != expected_sizes:
        raise ValueError(
            "coded experts: experts, columns and inputs of w13 must fit w2: "
            f"{expected_sizes} (got {w13_sizes})"
        )
    if hidden % SHARED_COLUMNS or inner % SHARED_COLUMNS:
        raise ValueError(
            f"coded experts: hidden and inner size must be multiples of {SHARED_COLUMNS} (got {hidden} "
            f"and {inner})"
        )
    if dtype not in ELEMENTS:
        raise ValueError(f"coded experts: dtype must be one of {', '.join(map(str, ELEMENTS))} (got {dtype})")


class CodedExperts:
    """A layer's routed experts, packed and computed in their checkpoint's format."""

    def __init__(
        self,
        library: KernelLibrary,
        w13: PackedPart,
        w2: PackedPart,
        activation: Activation,
        *,
        dtype: torch.dtype,
        biases: Sequence[torch.Tensor | None] = (None, None),
    ) -> None:
        """Checks the parts, and builds the struct that the kernel reads by raw pointers.

        Args:
            dtype: type of inputs and outputs.
            biases: [experts, columns] of w13 (gates, then ups) and of w2.

        Raises:
            ValueError: the parts do not belong together, or a size is not a multiple of 32.
        """
        experts, inner, hidden = len(w13.packed), w2.inputs, w2.columns
        _check_parts(w13, w2, dtype, gated=activation.gated)
        self._dtype, self._hidden = dtype, hidden
        w13_biases, w2_biases = biases
        if w13_biases is not None:  # in the order of the packed columns
            interleaved = [
                interleave_halves(bias, SHARED_COLUMNS) if activation.gated else bias for bias in w13_biases
            ]
            w13_biases = torch.stack(interleaved).float().contiguous()
        w2_biases = None if w2_biases is None else w2_biases.float().contiguous()
        self._referenced = (w13, w2, w13_biases, w2_biases)  # the kernel has only the addresses of their data
        self._layer = _NativeCodedExperts(
            w13.packed.data_ptr(),
            w2.packed.data_ptr(),
            w13.format.to_native(),
            w2.format.to_native(),
            None if w13_biases is None else w13_biases.data_ptr(),
            None if w2_biases is None else w2_biases.data_ptr(),
            experts,
            hidden,
            inner,
            ELEMENTS[dtype],
            _NativeActivation(
                activation.kind, activation.gated, activation.alpha, activation.limit, activation.offset
            ),
        )
        self._call = library.calls.heteroinfer_coded_experts
        self._layer_address = ctypes.addressof(self._layer)

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Writes each row's weighted sum of its experts into y.

        Args:
            y: [rows, hidden], rows contiguous; must not share memory with x.
            x: [rows, hidden], rows contiguous.
            weights: [rows, topk], float32, contiguous.
            ids: [rows, topk], int32, contiguous; an id that is not an expert adds nothing.

        Raises:
            ValueError: a shape or dtype differs.
        """
        rows, topk = ids.shape
        fits = (
            x.shape == y.shape == (rows, self._hidden)
            and x.dtype == y.dtype == self._dtype
            and x.stride(1) == y.stride(1) == 1
            and weights.shape == ids.shape
            and topk <= MAX_CHOICES
            and (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
            and weights.is_contiguous()
            and ids.is_contiguous()
        )
        if not fits:
            raise ValueError(
                f"coded experts: x and y must be [{rows}, {self._hidden}] {self._dtype} with contiguous "
                "rows. weights (float32) and ids (int32) must be contiguous and have one shape, "
                f"[{rows}, at most {MAX_CHOICES}] "
                f"(got x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}, "
                f"weights {tuple(weights.shape)} {weights.dtype}, ids {tuple(ids.shape)} {ids.dtype}; "
                f"strides {x.stride()}, {y.stride()}, {weights.stride()}, {ids.stride()})"
            )
        self._call(
            self._layer_address,
            y.data_ptr(),
            y.stride(0),
            x.data_ptr(),
            x.stride(0),
            weights.data_ptr(),
            ids.data_ptr(),
            rows,
            topk,
        )
