"""Checks whether a fetched model is complete in the cache. Reads the model's files; stdlib only."""

import os
import stat
from pathlib import Path

from heteroinfer_contract.errors import ContractError, ModelIncompleteError
from heteroinfer_contract.model_fetch import MARKER_FILE, CompleteModel, FetchedFile


def read_marker(directory: Path) -> CompleteModel | None:
    """Returns the marker of a model's folder; None if the marker is missing or unreadable.

    Never blocks: other writers of a shared cache may have put a FIFO in place of the marker.
    """
    try:
        with open(directory / MARKER_FILE, opener=_open_without_waiting) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return CompleteModel.from_json(file.read()) if is_file else None
    except (OSError, UnicodeDecodeError, ContractError):
        return None


def damaged_files(directory: Path, complete: CompleteModel) -> list[FetchedFile]:
    """Returns the files of a complete model that are missing or have another size."""
    return [file for file in complete.files if _size_or_minus_one(directory / file.path) != file.size_bytes]


def check_complete(directory: Path) -> None:
    """Checks by file sizes that a fetched model is still complete.

    Raises:
        ModelIncompleteError: the marker is unreadable, or a file is missing or differs in size.
    """
    complete = read_marker(directory)
    if complete is None:
        raise ModelIncompleteError(
            f"{directory}: the model is incomplete: {MARKER_FILE} is missing or unreadable (a user removed "
            "the model from the cache, or this is another volume). The operator downloads it again"
        )
    if damaged := damaged_files(directory, complete):
        raise ModelIncompleteError(
            f"{directory}: {len(damaged)} of {len(complete.files)} files are missing or truncated; the first "
            f"is {damaged[0].path}, which must have {damaged[0].size_bytes} bytes. The operator downloads "
            "them again"
        )


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _size_or_minus_one(path: Path) -> int:
    """Returns the size of a file; -1 if it cannot be read."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # a name that no file can have
        return -1
