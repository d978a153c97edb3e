"""Linear layers whose weights stay in their checkpoint's format. Imports torch, not vLLM.

A weight is a code of 4, 8 or 16 bits times a scale. `pack` keeps codes, scales and zero points as wide as
they are. The kernels decode the codes exactly and sum in float32 (source/coded.h).
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

import torch

from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.library import KernelLibrary, KernelsUnavailableError, load

SHARED_COLUMNS: Final = 32
"""Columns of a block in the packed format. A scale of several columns covers a multiple of 32 columns."""
ELEMENTS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The library's number for each type of inputs and outputs."""
_CODES_PER_BYTE: Final = 2
"""Codes of 4 bits in a byte."""
_AXES: Final = 2
"""Axes of the input that the library reads: rows and inputs."""
_schema = torch.library.Library("heteroinfer", "FRAGMENT")
_registered: list[KernelLibrary] = []


class Code(IntEnum):
    """Type of a weight before its scale."""

    BF16 = 0
    F16 = 1
    FP8 = 2
    """e4m3fn."""
    INT8 = 3
    INT4 = 4
    """Two's complement, two in a byte, the first in the low half."""
    FP4 = 5
    """e2m1, two in a byte, the first in the low half."""


class Scale(IntEnum):
    """Which weights share a scale, and the scale's type. A scale multiplies codes."""

    NONE = 0
    BLOCK_F32 = 1
    """One scale for each group of inputs of 32 columns, or of a multiple of 32 columns."""
    COLUMN_F32 = 2
    COLUMN_BF16 = 3
    COLUMN_F16 = 4
    COLUMN_E8M0 = 5
    COLUMN_E4M3 = 6
    """One scale for each group of inputs of a column, times a float32 factor of the column."""


_SCALE_TYPES: Final = {
    Scale.BLOCK_F32: torch.float32,
    Scale.COLUMN_F32: torch.float32,
    Scale.COLUMN_BF16: torch.bfloat16,
    Scale.COLUMN_F16: torch.float16,
    Scale.COLUMN_E8M0: torch.uint8,
    Scale.COLUMN_E4M3: torch.uint8,
}
_CODE_TYPES: Final = {Code.BF16: torch.bfloat16, Code.F16: torch.float16}


class NativeFormat(ctypes.Structure):
    """`Format` of source/coded.h."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("code", "scale", "group", "zeros"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The types of a weight's codes and scales.

    Attributes:
        group: inputs that share a scale: 16, or a multiple of 32; 0 if all inputs of a column share it.
        zeros: whether each group has a zero point, which is subtracted from its codes.
    """

    code: Code
    scale: Scale = Scale.NONE
    group: int = 0
    zeros: bool = False

    def to_native(self) -> NativeFormat:
        """Returns the format as the library's functions take it."""
        return NativeFormat(self.code, self.scale, self.group, self.zeros)

    def to_numbers(self) -> list[int]:
        """Returns the format as an op of torch takes it."""
        return [self.code, self.scale, self.group, self.zeros]

    def groups(self, inputs: int) -> int:
        """Returns the number of groups in `inputs`."""
        return -(-inputs // self.group) if self.group else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A weight [columns, inputs] as a checkpoint stores it.

    Attributes:
        codes: uint8 [columns, inputs], or [columns, inputs / 2] of codes of 4 bits; bf16 or float16 [columns,
            inputs] of codes of 16 bits. Rows are contiguous.
        scales: [columns, groups] of the format's type; [columns / 32, groups] if columns share them.
        zeros: int8 [columns, groups].
        factors: float32 [columns], which multiply scales in e4m3.
    """

    format: Format
    columns: int
    inputs: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if a shape or dtype differs from the format's."""
        form, groups = self.format, self.format.groups(self.inputs)
        column_blocks = -(-self.columns // SHARED_COLUMNS)
        has_4_bits = form.code in {Code.INT4, Code.FP4}
        width = -(-self.inputs // _CODES_PER_BYTE) if has_4_bits else self.inputs
        scale_rows = column_blocks if form.scale == Scale.BLOCK_F32 else self.columns
        expected = {
            "codes": ((self.columns, width), _CODE_TYPES.get(form.code, torch.uint8)),
            "scales": ((scale_rows, groups), _SCALE_TYPES[form.scale]) if form.scale else None,
            "zeros": ((self.columns, groups), torch.int8) if form.zeros else None,
            "factors": ((self.columns,), torch.float32) if form.scale == Scale.COLUMN_E4M3 else None,
        }
        for name, required in expected.items():
            tensor = getattr(self, name)
            shape_and_type = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            # Rows of codes may have any distance from each other. All other tensors must be contiguous.
            is_contiguous = tensor is None or (
                tensor.stride(1) == 1 if name == "codes" else tensor.is_contiguous()
            )
            if shape_and_type != required or not is_contiguous:
                raise ValueError(
                    f"coded weight: shape and dtype of {name} must be {required}, and rows contiguous (got "
                    f"{shape_and_type})"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [columns, inputs] as the kernels read it."""

    format: Format
    columns: int
    inputs: int
    packed: torch.Tensor


def packed_bytes(library: KernelLibrary, form: Format, columns: int, inputs: int) -> int:
    """Returns the size of a packed weight in bytes; raises ValueError if no kernel supports the format."""
    native = form.to_native()
    size = int(library.calls.heteroinfer_coded_bytes(ctypes.addressof(native), columns, inputs))
    if not size:
        raise ValueError(
            f"coded weight: no kernel supports this format with these sizes (got {form}, {columns} columns, "
            f"{inputs} inputs)"
        )
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Sizes and offsets of a packed weight, in bytes.

    A block has SHARED_COLUMNS columns. A unit has the same number of inputs for these columns.

    Attributes:
        header: size of a block's header, which is before its units.
        scales: offset of the first group's scales in a block.
        scale_bytes: size of the scales of a group.
        zeros: offset of the first group's zero points in a block.
    """

    block_bytes: int
    unit_bytes: int
    header: int
    scales: int
    scale_bytes: int
    zeros: int


def packed_layout(library: KernelLibrary, form: Format, columns: int, inputs: int) -> PackedLayout:
    """Returns the layout of a packed weight."""
    native, layout = form.to_native(), (ctypes.c_long * len(PackedLayout.__slots__))()
    library.calls.heteroinfer_coded_layout(
        ctypes.addressof(native), columns, inputs, ctypes.addressof(layout)
    )
    # The library writes the fields in the order of `PackedLayout`.
    return PackedLayout(**dict(zip(PackedLayout.__slots__, layout, strict=True)))


def code_places(library: KernelLibrary, code: Code) -> torch.Tensor:
    """Returns the place of each code in a unit, counted in half bytes: int32 [columns, inputs]."""
    places = torch.empty((SHARED_COLUMNS, SHARED_COLUMNS), dtype=torch.int32)
    library.calls.heteroinfer_coded_places(code, places.data_ptr())
    return places


def pack(library: KernelLibrary, weight: Coded, out: torch.Tensor | None = None) -> PackedWeight:
    """Packs a weight into `out` (uint8, of `packed_bytes`) or into new memory."""
    size = packed_bytes(library, weight.format, weight.columns, weight.inputs)
    if out is None:
        out = weight_memory.empty((size,), torch.uint8)
    if out.numel() != size or out.dtype != torch.uint8 or not out.is_contiguous():
        raise ValueError(
            f"coded weight: out must be a contiguous uint8 tensor of {size} bytes (got {tuple(out.shape)} "
            f"{out.dtype}, strides {out.stride()})"
        )
    native, codes = weight.format.to_native(), weight.codes
    library.calls.heteroinfer_ask_for_huge_pages(out.data_ptr(), out.nbytes)
    library.calls.heteroinfer_coded_pack(
        out.data_ptr(),
        ctypes.addressof(native),
        codes.data_ptr(),
        codes.stride(0) * codes.element_size(),
        _address_of(weight.scales),
        _address_of(weight.zeros),
        _address_of(weight.factors),
        weight.columns,
        weight.inputs,
    )
    return PackedWeight(format=weight.format, columns=weight.columns, inputs=weight.inputs, packed=out)


def _address_of(tensor: torch.Tensor | None) -> int | None:
    """Returns the address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x times a weight, plus bias: [..., columns] of x's dtype, sums in float32.

    Args:
        x: [..., inputs], bf16, float16 or float32, on the CPU.
        bias: [columns] of the same dtype.

    Raises:
        RuntimeError: a shape or dtype differs.
    """
    numbers = weight.format.to_numbers()
    return linear_by_numbers(x, weight.packed, bias, numbers, weight.columns, weight.inputs)


def linear_by_numbers(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    format_numbers: list[int],
    columns: int,
    inputs: int,
) -> torch.Tensor:
    """Computes `linear` with the format as integers (`Format.to_numbers`).

    A torch op accepts integers but no `Format`. While torch.compile traces, this function calls the op, so
    that the op is in the graph. Otherwise it calls the library directly, which is faster than torch's
    dispatcher.
    """
    if torch.compiler.is_compiling():
        result: torch.Tensor = torch.ops.heteroinfer.coded_linear(
            x, packed, bias, format_numbers, columns, inputs
        )
        return result
    return _call_kernel(x, packed, bias, format_numbers, columns, inputs)


def register(path: Path | None = None) -> KernelLibrary:
    """Loads the kernels and registers the op, so that callers can use `linear`.

    Args:
        path: file of the library. Only the first call uses it.

    Raises:
        KernelsUnavailableError: this process cannot use the kernels.
    """
    if not _registered:
        library = load(path)
        if not library.coded_paths:
            raise KernelsUnavailableError("this CPU lacks AVX2, FMA or F16C, which the kernels need")
        _schema.define(
            "coded_linear(Tensor x, Tensor packed, Tensor? bias, int[] format, int columns, int inputs)"
            " -> Tensor"
        )
        _schema.impl("coded_linear", _call_kernel, "CPU")
        torch.library.register_fake("heteroinfer::coded_linear", _fake_linear, lib=_schema)
        _registered.append(library)
    return _registered[0]


def _call_kernel(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    format_numbers: list[int],
    columns: int,
    inputs: int,
) -> torch.Tensor:
    """Implements the op: checks the arguments, and calls the library."""
    rows = x if x.ndim == _AXES else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    is_valid_bias = bias is None or (
        bias.dtype == x.dtype and bias.shape == (columns,) and bias.is_contiguous()
    )
    if x.dtype not in ELEMENTS or x.shape[-1] != inputs or x.device.type != "cpu" or not is_valid_bias:
        raise RuntimeError(
            f"heteroinfer::coded_linear: x must be a CPU tensor [..., {inputs}] with dtype "
            f"{' or '.join(map(str, ELEMENTS))}, and bias None or a contiguous [{columns}] with the dtype "
            f"of x (got x {tuple(x.shape)} {x.dtype} on {x.device}, bias "
            f"{None if bias is None else (tuple(bias.shape), bias.dtype, bias.stride())})"
        )
    out = x.new_empty((*x.shape[:-1], columns))
    native = NativeFormat(*format_numbers)
    _registered[0].calls.heteroinfer_coded_linear(
        out.data_ptr(),
        columns,
        rows.data_ptr(),
        rows.stride(0),
        ELEMENTS[x.dtype],
        packed.data_ptr(),
        ctypes.addressof(native),
        None if bias is None else bias.data_ptr(),
        rows.shape[0],
        columns,
        inputs,
    )
    return out


def _fake_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    format_numbers: list[int],
    columns: int,
    inputs: int,
) -> torch.Tensor:
    """Returns an uninitialized result of the op's shape, for torch's tracing."""
    return x.new_empty((*x.shape[:-1], columns))
