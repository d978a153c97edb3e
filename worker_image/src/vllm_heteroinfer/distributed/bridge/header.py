"""What a rank says of the collective it is at; pure.

A header goes ahead of every part of a tensor. Ranks of a process group compare them byte for
byte, so each field is one in which they must agree.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum

HEADER_BYTES = 128
"""Bytes kept for a header; a multiple of a cache line, so that no two share one."""
_MAX_DIMS = 8
_LAYOUT = struct.Struct(f"=BBhiqqQqQ{_MAX_DIMS}q")
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
    """Which collective."""

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
    """Returns the header of a call, HEADER_BYTES long; part 0 of its tensor.

    Args:
        shape: of the tensor that each rank gives, -1 where they may differ; at most 8 dims.
        dtype: of the tensor, as torch writes it: `torch.bfloat16`.
        root: rank in the process group that sends or gathers, where there is one.
        step: as `Bridge.begin_step` was given it.
        count: collectives since then, this one included.
        history: as `Bridge.set_history` was given it, 64 bits.
        sizes: of the ranks along the dim that differs.

    Raises:
        ValueError: a dtype or number of dims that the bridge does not carry.
    """
    dims = len(shape)
    code = _CODES.get(dtype)
    if code is None or dims > _MAX_DIMS:
        raise ValueError(
            f"{operation.name.lower()}: got {dtype} with {dims} dims, expected one of "
            f"{', '.join(_DTYPES)} with at most {_MAX_DIMS}; view it as one of them"
        )
    digest = 0 if sizes is None else zlib.crc32(struct.pack(f"={len(sizes)}q", *sizes))
    fields = (operation, code, root, dims, step, count, history, 0, digest)
    return _LAYOUT.pack(*fields, *shape, *(0,) * (_MAX_DIMS - dims)).ljust(HEADER_BYTES, b"\0")


_COUNTS_OFFSET = struct.calcsize("=BBhi")
_COUNTS = struct.Struct("=qqQ")


class HeaderTemplate:
    """Headers of calls that differ in step, count and history only."""

    def __init__(self, operation: Operation, *, shape: Sequence[int], dtype: str) -> None:
        """Takes what `pack_header` takes, and raises as it does."""
        whole = pack_header(operation, shape=shape, dtype=dtype, step=0, count=0, history=0)
        self._head, self._tail = whole[:_COUNTS_OFFSET], whole[_COUNTS_OFFSET + _COUNTS.size :]

    def fill(self, step: int, count: int, history: int) -> bytes:
        """Returns the header of one call."""
        return self._head + _COUNTS.pack(step, count, history) + self._tail


_PART_OFFSET = struct.calcsize("=BBhiqqQ")
_PART = struct.Struct("=q")


def header_of_part(header: bytes, part: int) -> bytes:
    """Returns the header of another part of the same call."""
    if part == 0:
        return header
    return header[:_PART_OFFSET] + _PART.pack(part) + header[_PART_OFFSET + _PART.size :]


def describe(header: bytes) -> str:
    """Returns a header in words, as `all_reduce #7 of step 12 [16, 4096] bfloat16`."""
    operation, code, root, dims, step, count, history, part, sizes, *shape = _LAYOUT.unpack_from(header)
    try:
        name, dtype = Operation(operation).name.lower(), _DTYPES[code].removeprefix("torch.")
    except (ValueError, IndexError):
        return f"something that is no header of this version ({header[:16].hex()})"
    words = f"{name} #{count} of step {step} {shape[:dims]} {dtype}"
    if root >= 0:
        words += f" root {root}"
    if part:
        words += f" part {part}"
    if sizes:
        words += f" sizes {sizes:08x}"
    return words + f" history {history:016x}"


def num_parts(num_elements: int, part_elements: int) -> int:
    """Returns how many parts a tensor takes; an empty one takes one, so that it is compared too."""
    return max(1, math.ceil(num_elements / part_elements))
