"""Unpacks experts that a GPU has copied from ranks, with the kernel of unpack.cu. Imports torch."""

import ctypes
from pathlib import Path
from typing import Any, Final

import torch

from vllm_heteroinfer.feed_forward.cuda_exchange import Kernels
from vllm_heteroinfer.feed_forward.offered_weights import OfferedMatrix
from vllm_heteroinfer.feed_forward.slab import DTYPES
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, Code, code_places, packed_layout
from vllm_heteroinfer.kernels.library import load

SOURCE: Final = Path(__file__).parent / "unpack.cu"
_UNITS: Final = 4
"""Number of units that one thread block writes: kUnits in unpack.cu."""


class UnpackParams(ctypes.Structure):
    """The same fields as `Params` in unpack.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "blocks", "out", "places")),
        *(
            (name, ctypes.c_uint64)
            for name in ("expert_bytes", "block_bytes", "blocks_stride", "expert_stride", "row_stride")
        ),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "units",
                "header",
                "unit_bytes",
                "scales",
                "scale_bytes",
                "zeros",
                "group",
                "code",
                "scale",
                "has_zeros",
                "gate_rows",
                "block_rows",
                "block_columns",
                "dtype",
            )
        ),
    )


def describe_matrix(matrix: OfferedMatrix, *, gated: bool) -> dict[str, int]:
    """Returns the kernel's parameters that depend only on a packed matrix.

    Args:
        gated: whether the matrix is w13, which has gates and ups.
    """
    assert matrix.format is not None
    layout = packed_layout(load(), matrix.format, matrix.columns, matrix.inputs)
    header = layout.header if matrix.has_headers else 0
    units = -(-matrix.inputs // SHARED_COLUMNS)
    scale_rows, scale_columns = matrix.scale_shape or (0, 0)
    return {
        "expert_bytes": matrix.expert_bytes,
        "block_bytes": header + units * layout.unit_bytes,
        "blocks_stride": scale_rows * scale_columns,
        "units": units,
        "header": header,
        "unit_bytes": layout.unit_bytes,
        "scales": layout.scales,
        "scale_bytes": layout.scale_bytes,
        "zeros": layout.zeros,
        "group": matrix.group,
        "code": matrix.code,
        "scale": matrix.scale,
        "has_zeros": int(matrix.zeros),
        "block_rows": scale_rows // 2 if gated else scale_rows,  # rows for the gates, or for the ups
        "block_columns": scale_columns,
    }


class Unpacker:
    """Unpacks matrices on the current device."""

    def __init__(self, device: torch.device) -> None:
        """Compiles the kernel; raises CudaError if that fails."""
        self._device = device
        self._kernels = Kernels(device, SOURCE)
        self._kernel = self._kernels.function("ff_unpack")
        self._places: dict[int, torch.Tensor] = {}
        self._described: dict[tuple[OfferedMatrix, bool], dict[str, int]] = {}

    def unpack(
        self,
        matrix: OfferedMatrix,
        codes: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor,
        *,
        gated: bool,
    ) -> None:
        """Makes the current stream unpack a matrix of a rank's experts into `out`.

        Args:
            codes: [experts * expert_bytes] uint8, in a slot.
            scales: the experts' block scales as bytes in the slot; empty if the matrix has none.
            out: [experts, parts, columns, inputs], with 2 parts (gates, ups) for w13 and 1 part for w2. It is
                a view of matrices with the columns or inputs of all ranks.
            gated: whether the matrix is w13.
        """
        if matrix.format is None:  # not packed, so the bytes are the weights
            out.copy_(codes.view(out.dtype).view(out.shape))
            return
        params = UnpackParams(
            packed=codes.data_ptr(),
            blocks=scales.data_ptr() if scales.numel() else None,
            out=out.data_ptr(),
            places=self._places_of(matrix.format.code).data_ptr(),
            expert_stride=out.stride(0),
            row_stride=out.stride(2),
            gate_rows=out.stride(1) // out.stride(2) if gated else 0,  # rows between a gate and its up
            dtype=DTYPES[str(out.dtype).removeprefix("torch.")],
            **self._describe(matrix, gated=gated),
        )
        grid = (-(-params.units // _UNITS), matrix.columns // SHARED_COLUMNS, len(out))
        arguments: Any = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._kernels.launch(self._kernel, grid, arguments, torch.cuda.current_stream().cuda_stream)

    def _places_of(self, code: Code) -> torch.Tensor:
        """Returns a tensor on the device with the place of each weight's code in a unit of packed weights."""
        if code not in self._places:
            self._places[code] = code_places(load(), code).to(self._device)
        return self._places[code]

    def _describe(self, matrix: OfferedMatrix, *, gated: bool) -> dict[str, int]:
        """Returns the parameters of `describe_matrix`. Computes them once for each kind of matrix."""
        kind = (matrix.kind, gated)
        if kind not in self._described:
            self._described[kind] = describe_matrix(matrix, gated=gated)
        return self._described[kind]
