"""Headers that identify a rank's current collective. Pure.

A header precedes every part of a tensor. The ranks of a process group compare headers byte by byte, so
a header contains only fields that must be the same on all ranks.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum

HEADER_BYTES = 128
"""Size of a header; a multiple of a cache line, so that two headers never share a cache line."""
_MAX_DIMS = 8
_LAYOUT = struct.Struct(f"=BBhiqqQqQ{_MAX_DIMS}q")
"""Operation, dtype, root, number of dims, step, count, history, part, checksum of sizes, shape."""
assert _LAYOUT.size <= HEADER_BYTES

_DTYPES = (
    "torch.bool",
    "torch.uint8",
    "torch.int8",
    "torch.int16",
    "torch.int32",
    "torch.int64",
    "torch.float16",
    "torch.bfloat16",
    "torch.float32",
    "torch.float64",
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Operation(IntEnum):
    """A collective's number in the header."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    ALL_GATHERV = 3
    REDUCE_SCATTER = 4
    REDUCE_SCATTERV = 5
    GATHER = 6
    BROADCAST = 7
    SEND = 8


def pack_header(  # noqa: PLR0913 - the fields of a header
    operation: Operation,
    *,
    shape: Sequence[int],
    dtype: str,
    root: int = -1,
    step: int,
    count: int,
    history: int,
    sizes: Sequence[int] | None = None,
) -> bytes:
    """Packs the header of part 0 of a call's tensor, HEADER_BYTES long.

    Args:
        shape: shape of each rank's tensor, at most 8 dims; -1 for a dim that differs between ranks.
        dtype: dtype of the tensor in torch's notation, such as `torch.bfloat16`.
        root: rank in the process group that sends or gathers; -1 if none.
        step: the step from `Bridge.begin_step`.
        count: number of collectives since the step began, including this collective.
        history: the checksum from `Bridge.set_history`, 64 bits.
        sizes: size of each rank's tensor along the dim that differs.

    Raises:
        ValueError: the bridge does not support the dtype or the number of dims.
    """
    dims = len(shape)
    code = _CODES.get(dtype)
    if code is None or dims > _MAX_DIMS:
        raise ValueError(
            f"{operation.name.lower()}: tensor must have at most {_MAX_DIMS} dims and one of the dtypes "
            f"{', '.join(_DTYPES)} (got {dtype} with {dims} dims). Pass a view with other dims or dtype"
        )
    digest = 0 if sizes is None else zlib.crc32(struct.pack(f"={len(sizes)}q", *sizes))
    part = 0
    padded_shape = (*shape, *[0] * (_MAX_DIMS - dims))
    header = _LAYOUT.pack(operation, code, root, dims, step, count, history, part, digest, *padded_shape)
    return header.ljust(HEADER_BYTES, b"\0")


_COUNTS_OFFSET = struct.calcsize("=BBhi")
_COUNTS = struct.Struct("=qqQ")


class HeaderTemplate:
    """Builds headers of calls that differ only in step, count and history."""

    def __init__(self, operation: Operation, *, shape: Sequence[int], dtype: str) -> None:
        """Packs the fixed fields. See `pack_header` for arguments and errors."""
        whole = pack_header(operation, shape=shape, dtype=dtype, step=0, count=0, history=0)
        self._head, self._tail = whole[:_COUNTS_OFFSET], whole[_COUNTS_OFFSET + _COUNTS.size :]

    def fill(self, step: int, count: int, history: int) -> bytes:
        """Builds the header of one call."""
        return self._head + _COUNTS.pack(step, count, history) + self._tail


_PART_OFFSET = struct.calcsize("=BBhiqqQ")
_PART = struct.Struct("=q")


def header_of_part(header: bytes, part: int) -> bytes:
    """Builds the header of another part of the same call."""
    if part == 0:
        return header
    return header[:_PART_OFFSET] + _PART.pack(part) + header[_PART_OFFSET + _PART.size :]


def describe(header: bytes) -> str:
    """Describes a header for a message, such as `all_reduce #7 of step 12 [16, 4096] bfloat16`."""
    operation, code, root, dims, step, count, history, part, sizes, *shape = _LAYOUT.unpack_from(header)
    try:
        name, dtype = Operation(operation).name.lower(), _DTYPES[code].removeprefix("torch.")
    except (ValueError, IndexError):
        return f"an unknown call (not a header of this version: {header[:16].hex()})"
    text = f"{name} #{count} of step {step} {shape[:dims]} {dtype}"
    if root >= 0:
        text += f" root {root}"
    if part:
        text += f" part {part}"
    if sizes:
        text += f" sizes {sizes:08x}"
    return text + f" history {history:016x}"


def num_parts(num_elements: int, part_elements: int) -> int:
    """Returns the number of parts of a tensor; an empty tensor has one part, so that headers are compared."""
    return max(1, math.ceil(num_elements / part_elements))
