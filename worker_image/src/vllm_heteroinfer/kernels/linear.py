"""The bf16 linear layer as a torch op, `heteroinfer::linear`. Imports torch, not vLLM."""

from pathlib import Path

import torch

from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.library import KernelLibrary, KernelsUnavailableError, load

__all__ = ["KernelsUnavailableError", "linear", "pack", "packed_shape", "prepare"]

_BLOCK_COLUMNS = 32
"""Columns of a block in the packed layout."""
_UNIT_PAIRS = 16
"""Pairs of inputs of a unit. In the packed layout, the inputs are padded to whole units."""
_schema = torch.library.Library("heteroinfer", "FRAGMENT")
_prepared: list[KernelLibrary] = []


def prepare(path: Path | None = None) -> KernelLibrary:
    """Loads the kernels and registers the op, so that callers can use `pack` and `linear`.

    Args:
        path: file of the library. Only the first call uses it.

    Raises:
        KernelsUnavailableError: this process cannot use the kernels.
    """
    library = _prepared[0] if _prepared else load(path)
    if not library.paths:
        raise KernelsUnavailableError("this CPU lacks AVX512F, which the kernels need")
    if not _prepared:
        _schema.define("linear(Tensor x, Tensor packed, Tensor? bias, int columns) -> Tensor")
        _schema.impl("linear", _call_kernel, "CPU")
        torch.library.register_fake("heteroinfer::linear", _fake_linear, lib=_schema)
        _prepared.append(library)
    return library


def find() -> KernelLibrary | None:
    """Loads the kernels and registers the op. Returns None if this process cannot use the kernels.

    Does not log the reason, because `LinearLayers` (linear_layers.py) does.
    """
    try:
        return prepare()
    except KernelsUnavailableError:
        return None


def packed_shape(columns: int, inputs: int) -> tuple[int, int, int, int]:
    """Returns the shape of a packed weight: blocks of columns, pairs of inputs, 32 columns, 2 inputs."""
    pairs = -(-inputs // (2 * _UNIT_PAIRS)) * _UNIT_PAIRS
    return (-(-columns // _BLOCK_COLUMNS), pairs, _BLOCK_COLUMNS, 2)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight into the layout that the op reads.

    Args:
        weight: [n, k] (n columns, k inputs), bf16, on the CPU, rows contiguous.

    Returns:
        [ceil(n / 32), ceil(k / 32) * 16, 32, 2], bf16: blocks of columns, pairs of inputs, 32 columns, 2
        inputs. Columns and inputs beyond n and k are zeros.

    Raises:
        ValueError: the shape, dtype or device differs.
    """
    if weight.ndim != 2 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        raise ValueError(
            "a linear weight must be [n, k] bf16 on the CPU "
            f"(got {tuple(weight.shape)} {weight.dtype} on {weight.device})"
        )
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    columns, inputs = weight.shape
    packed = weight_memory.empty(packed_shape(columns, inputs), torch.bfloat16)
    _prepared[0].calls.heteroinfer_pack(
        packed.data_ptr(), weight.data_ptr(), weight.stride(0), columns, inputs
    )
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Returns x times a packed weight, plus bias: [..., columns], bf16, sums in float32.

    On CPUs with AVX512-BF16 or AMX, denormal numbers (below 2**-126 in size) count as zero, also in products
    and sums. So infinity times a denormal number is NaN. On CPUs with AVX-512F only, denormal numbers keep
    their values (source/linear.h).

    Args:
        x: [..., k], bf16, cpu.
        packed: result of `pack` for a weight [columns, k].
        bias: [columns], bf16, cpu; or None.

    Raises:
        RuntimeError: a dtype differs, or k does not fit the packed weight.
    """
    if torch.compiler.is_compiling():
        product: torch.Tensor = torch.ops.heteroinfer.linear(x, packed, bias, columns)
        return product
    # The direct call bypasses torch's dispatcher, which would take as long as the product of a small layer.
    return _call_kernel(x, packed, bias, columns)


def _call_kernel(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, columns: int
) -> torch.Tensor:
    """Implements the op: checks the arguments, and calls the library."""
    inputs = x.shape[-1]
    _check_arguments(x, packed, bias, columns)
    rows = x if x.ndim == 2 else x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty((*x.shape[:-1], columns))
    _prepared[0].calls.heteroinfer_linear(
        out.data_ptr(),
        columns,
        rows.data_ptr(),
        rows.stride(0),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows.shape[0],
        columns,
        inputs,
    )
    return out


def _check_arguments(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, columns: int) -> None:
    """Raises RuntimeError for a wrong dtype or shape, because the kernel gets only addresses."""
    blocks, pairs = packed.shape[0], packed.shape[1]
    inputs = x.shape[-1]
    if x.dtype != torch.bfloat16 or packed.dtype != torch.bfloat16 or not packed.is_contiguous():
        raise RuntimeError(
            "heteroinfer::linear: x and the packed weight must be bf16, the weight contiguous "
            f"(got x {x.dtype}, weight {packed.dtype})"
        )
    # The packed weight has as many inputs as x, padded to a whole unit.
    inputs_fit = 0 < inputs <= 2 * pairs < inputs + 2 * _UNIT_PAIRS
    columns_fit = 0 < columns <= blocks * _BLOCK_COLUMNS
    if not (inputs_fit and columns_fit):
        raise RuntimeError(
            f"heteroinfer::linear: x and columns must fit the packed weight (got x {tuple(x.shape)}, "
            f"{columns} columns, weight {tuple(packed.shape)})"
        )
    if bias is not None and (
        bias.dtype != torch.bfloat16 or bias.numel() != columns or not bias.is_contiguous()
    ):
        raise RuntimeError(
            f"heteroinfer::linear: bias must be [{columns}] bf16, contiguous "
            f"(got {tuple(bias.shape)} {bias.dtype})"
        )


def _fake_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, columns: int
) -> torch.Tensor:
    """Returns an uninitialized result of the op's shape, for torch's tracing."""
    return x.new_empty((*x.shape[:-1], columns))
