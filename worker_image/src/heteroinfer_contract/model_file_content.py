"""Reads one file of a model: JSON, or a header of safetensors. Only regular files, up to a maximum size.

Stdlib only. `model_files` builds a profile from the contents.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

from heteroinfer_contract.errors import ContractError

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of safetensors itself: a file with a longer header is broken or hostile. Indexes are shorter."""
_LFS_POINTER: Final = b"version https://git-lfs"
"""Start of the small text that Git LFS stores in place of a large file."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LENGTH_BYTES: Final = 8


class ModelFilesError(ContractError):
    """A directory does not hold a readable model; the text names the problem and its fix."""


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header of a safetensors file, the header's end, and the file's size, in bytes.

    Raises:
        ModelFilesError: the file is unreadable, cut short, or not safetensors.
    """
    try:
        with _open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            front = file.read(len(_LFS_POINTER))
            length = int.from_bytes(front[:_LENGTH_BYTES], "little")
            end = _LENGTH_BYTES + length
            if front == _LFS_POINTER:
                raise _lfs_pointer(path)
            if len(front) < _LENGTH_BYTES or length > MAX_HEADER_BYTES or end > size:
                raise ModelFilesError(
                    f"{path}: the file is truncated or not in safetensors format (its header must have "
                    f"{length} bytes after the first 8; the whole file has {size}). Download it again"
                )
            file.seek(_LENGTH_BYTES)
            header = _parse_json(path, file.read(length))
    except OSError as error:
        raise not_readable(path, error) from error
    return header, end, size


def read_json(path: Path, max_bytes: int) -> Any:
    """Returns the value in a JSON file of at most `max_bytes`; raises ModelFilesError."""
    try:
        with _open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise ModelFilesError(
                    f"{path}: must be at most {max_bytes} bytes (got {size}). Download it again"
                )
            content = file.read(max_bytes)
    except OSError as error:
        raise not_readable(path, error) from error
    return _parse_json(path, content)


def not_readable(path: Path, error: OSError) -> ModelFilesError:
    """Returns the error for a model's file or directory that cannot be opened."""
    if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
        return dangling(path)
    fix = "Check the path and its volume"
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = "Make the model readable for all users (chmod -R a+rX)"
    return ModelFilesError(f"{path}: cannot be read by user {os.getuid()} ({error.strerror}). {fix}")


def dangling(link: Path) -> ModelFilesError:
    """Returns the error for a link whose target does not exist."""
    return ModelFilesError(
        f"{link}: is a link to {os.readlink(link)}, which does not exist here. Snapshot folders of a hub's "
        "cache contain only links to files elsewhere. Copy the folder with `cp -rL`, which follows links, "
        "and use the copy"
    )


def _open_regular_file(path: Path) -> BinaryIO:
    """Opens a regular file; raises OSError, and ModelFilesError for a FIFO or device, which has no end."""

    def open_regular(name: str, flags: int) -> int:
        """Opens a regular file; raises ModelFilesError for a FIFO, a socket or a device."""
        descriptor = os.open(name, flags | os.O_NONBLOCK)  # O_NONBLOCK: opening a FIFO must not block
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ModelFilesError(f"{path}: must be a regular file. Download the model again")
        return descriptor

    return open(path, "rb", opener=open_regular)


def _parse_json(path: Path, content: bytes) -> Any:
    """Parses the content of a JSON file; raises ModelFilesError."""
    if content.startswith(_LFS_POINTER):
        raise _lfs_pointer(path)
    if content.startswith(_BYTE_ORDER_MARK):  # json.loads accepts it, but transformers does not
        raise ModelFilesError(
            f"{path}: begins with a byte order mark, which ranks cannot read. Save it as UTF-8 without mark "
            rf"(sed -i '1s/^\xEF\xBB\xBF//' {path.name})"
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: is not valid JSON: {error}. Download it again") from error


def _lfs_pointer(path: Path) -> ModelFilesError:
    """Returns the error for a file that is only a pointer of Git LFS."""
    return ModelFilesError(
        f"{path}: is a Git LFS pointer, not the file itself. Run `git lfs pull` in the model's "
        "folder, or download the model again"
    )
