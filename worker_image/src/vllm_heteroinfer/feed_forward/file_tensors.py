"""Tensors of safetensors files that share the memory of the mapped file. Imports torch.

Views of such a tensor keep their place in the file: the address of the first element, shape and strides.
"""

import bisect
import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.recipe import contiguous_strides

MAX_HEADER_BYTES: Final = 100_000_000
"""Largest header, the limit of the safetensors library."""
_HEADER_LENGTH: Final = 8
"""Number of bytes before the header, which contain the header's length."""
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


class _HeaderEntry(NamedTuple):
    """A tensor in the header of a file.

    Attributes:
        start: offset of the tensor's first byte in the file.
    """

    name: str
    start: int
    dtype: torch.dtype
    shape: list[int]


class MappedFile:
    """A safetensors file that is mapped into memory. Linux reads each part of it at the first access.

    Attributes:
        digest: SHA-256 of the header.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and checks its header; raises ContractError if the file is not whole."""
        self.path = path
        self._map()
        header = self._read_header()
        self.digest = hashlib.sha256(header).hexdigest()
        self._entries = self._parse_header(header)
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def _map(self) -> None:
        """Maps the file. Notes its identity, so that `check_unchanged` can find a change."""
        path = self.path
        try:
            with path.open("rb") as file:
                self._identity = _identity_of(os.fstat(file.fileno()))
                # ACCESS_COPY: torch expects writable memory. Writes would not reach the file.
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ContractError(
                f"{path}: cannot be mapped ({_describe_open_error(error)}). Check that this user may read "
                "the file, or download the model again"
            ) from error
        self.num_bytes = len(self._memory)

    def _read_header(self) -> bytes:
        """Returns the bytes of the header, and sets where the data after the header begin."""
        length = int.from_bytes(self._memory[:_HEADER_LENGTH], "little")
        self._data_start = _HEADER_LENGTH + length
        if not 0 < length <= min(MAX_HEADER_BYTES, self.num_bytes - _HEADER_LENGTH):
            raise self._invalid(
                f"the header's length must fit the file's {self.num_bytes} bytes (got {length} bytes)"
            )
        return self._memory[_HEADER_LENGTH : self._data_start]

    def _parse_header(self, header: bytes) -> list[_HeaderEntry]:
        """Returns the tensors that the header lists, in the order of their bytes."""
        try:
            parsed_header = json.loads(header)
            entries = [
                self._parse_entry(name, entry)
                for name, entry in parsed_header.items()
                if name != "__metadata__"
            ]
        except ContractError:  # ContractError is a ValueError, so the next branch would hide its message
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._invalid(f"the header is damaged ({type(error).__name__}: {error})") from error
        return sorted(entries, key=lambda entry: entry.start)

    def _parse_entry(self, name: str, entry: Any) -> _HeaderEntry:
        """Reads the header's entry of a tensor, and checks that the file has the tensor's bytes."""
        shape, dtype, (start, end) = list(entry["shape"]), _TYPES.get(entry["dtype"]), entry["data_offsets"]
        if dtype is None:
            raise ContractError(
                f"{self.path}: feed-forward ranks cannot read tensor {name}, whose type is {entry['dtype']}. "
                "Use spec.parallelism.mode: Pipeline"
            )
        if any(type(number) is not int for number in (*shape, start, end)):
            raise TypeError(
                f"tensor {name}: shape and bytes must be integers (got {shape}, {start} to {end})"
            )
        size = math.prod(shape) * dtype.itemsize
        has_negative = any(number < 0 for number in (*shape, start))
        is_beyond_file = self._data_start + end > self.num_bytes
        if has_negative or end - start != size or is_beyond_file:
            raise self._invalid(
                f"tensor {name} ({entry['dtype']} {shape}) must have {size} bytes inside the file's "
                f"{self.num_bytes - self._data_start} data bytes (got bytes {start} to {end})"
            )
        return _HeaderEntry(name, self._data_start + start, dtype, shape)

    def _invalid(self, problem: str) -> ContractError:
        """Returns the error for a file that is not a whole safetensors file."""
        return ContractError(
            f"{self.path}: not a whole safetensors file: {problem}. Download the model again"
        )

    def check_unchanged(self) -> None:
        """Raises ContractError if the file was written to or replaced after this object mapped it."""
        try:
            unchanged = _identity_of(self.path.stat()) == self._identity
        except OSError:
            unchanged = False
        if not unchanged:
            raise ContractError(
                f"{self.path}: the file changed while this rank read it. Keep the model's files as they are "
                "until the group is ready"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name of each tensor, and the tensor, in the order of the file."""
        for name, start, dtype, shape in self._entries:
            yield name, self.view(start, dtype, shape, contiguous_strides(shape))

    def view(
        self, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Returns a tensor that shares the file's memory.

        Args:
            offset: byte of the file at which the first element begins.
            strides: distance of neighbours in each dimension, in elements.
        """
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        last_index = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        flat = torch.frombuffer(self._memory, dtype=dtype, count=last_index + 1, offset=offset)
        return flat.as_strided(tuple(shape), tuple(strides))


class MappedFiles:
    """All mapped files. Finds the file whose memory a tensor shares."""

    def __init__(self) -> None:
        self.files: list[MappedFile] = []
        self._addresses: list[tuple[int, int]] = []

    def add(self, path: Path) -> MappedFile:
        """Maps a file, if it is not mapped yet, and returns it."""
        for known in self.files:
            if known.path == path:
                return known
        file = MappedFile(path)
        bisect.insort(self._addresses, (file.address, len(self.files)))
        self.files.append(file)
        return file

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Returns the number of a tensor's file, and the tensor's first byte in the file.

        Returns None if the tensor shares no memory with a file.
        """
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        address = tensor.data_ptr()
        # Finds the last file that begins at or before this address. `bisect` compares (address, file number),
        # so a number above all file numbers includes a file that begins exactly at this address.
        above_all_numbers = len(self.files)
        index = bisect.bisect(self._addresses, (address, above_all_numbers)) - 1
        if index < 0:
            return None
        start, number = self._addresses[index]
        is_inside_file = address < start + self.files[number].num_bytes
        return (number, address - start) if is_inside_file else None


def _identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Returns numbers that identify a file's content: they change if the file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _describe_open_error(error: Exception) -> str:
    """Returns the reason why a file cannot be mapped, in words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "the file is empty"
