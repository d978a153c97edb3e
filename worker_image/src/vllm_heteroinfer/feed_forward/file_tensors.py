"""Tensors of safetensors files that share the memory of the mapped file. Imports torch.

Views of such a tensor keep their place in the file: the address of the first element, shape and strides.
"""

import bisect
import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from vllm_heteroinfer.feed_forward.recipe import contiguous_strides

_HEADER_LENGTH: Final = 8
"""Bytes in front of the header; they contain its length."""
_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}


class MappedFile:
    """A safetensors file in memory that the kernel reads on demand.

    Attributes:
        digest: SHA-256 of the header.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file; raises OSError if that fails."""
        self.path = path
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(self._memory[:_HEADER_LENGTH], "little")
        header = self._memory[_HEADER_LENGTH : _HEADER_LENGTH + length]
        self.digest = hashlib.sha256(header).hexdigest()
        self._header: dict[str, Any] = json.loads(header)
        self._data = _HEADER_LENGTH + length
        self.num_bytes = len(self._memory)
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor in the order of the file."""
        entries = [(name, entry) for name, entry in self._header.items() if name != "__metadata__"]
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"][0]):
            shape, dtype = entry["shape"], _TYPES[entry["dtype"]]
            start = self._data + entry["data_offsets"][0]
            yield name, self.view(start, dtype, shape, contiguous_strides(shape))

    def view(
        self, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Returns a tensor over the file's memory.

        Args:
            offset: byte of the first element.
            strides: in elements.
        """
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        reach = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        flat = torch.frombuffer(self._memory, dtype=dtype, count=reach, offset=offset)
        return flat.as_strided(tuple(shape), tuple(strides))


class MappedFiles:
    """Several files, found by an address in their memory."""

    def __init__(self) -> None:
        self.files: list[MappedFile] = []
        self._addresses: list[tuple[int, int]] = []

    def add(self, path: Path) -> MappedFile:
        """Maps a file once and returns it."""
        for known in self.files:
            if known.path == path:
                return known
        file = MappedFile(path)
        bisect.insort(self._addresses, (file.address, len(self.files)))
        self.files.append(file)
        return file

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Returns the file's number and the byte of a tensor's first element; None if no file has it."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        address = tensor.data_ptr()
        at = bisect.bisect(self._addresses, (address, len(self.files))) - 1
        if at < 0:
            return None
        start, number = self._addresses[at]
        return (number, address - start) if address < start + self.files[number].num_bytes else None
