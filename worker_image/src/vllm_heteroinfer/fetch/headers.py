"""Reads a hub's model without its weights: config.json and the headers of its safetensors files."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model.config import CONFIG_FILE
from heteroinfer_contract.model.weights import INDEX_FILE
from heteroinfer_contract.model_fetch import FetchedFile
from heteroinfer_contract.model_file_content import MAX_HEADER_BYTES
from heteroinfer_contract.model_files import QUANTIZATION_FILE, read_profile
from heteroinfer_contract.model_profile import ModelProfile
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.hub_reader import HubReader
from vllm_heteroinfer.fetch.selection import describing_files, parse_index, weight_files

LIMIT_S: Final = 300.0
"""Time limit for all reads of one model, a few MB, even if a hub sends one byte at a time."""
_LENGTH_BYTES = 8
"""Bytes at the start of a safetensors file that contain the length of its header."""
_REPEAT_INTERVAL_S: Final = 1.0
"""Time between further alarms after the limit, for code that catches the first error and tries again."""


def read_hub_profile(hub: HubReader, folder: Path) -> ModelProfile:
    """Reads the sizes of a hub's model.

    Args:
        folder: an empty folder. Gets the small files, and sparse files that have the header and the size of
            each weight file but holes instead of the weights.

    Raises:
        FetchError: the hub does not list or send the model's files.
        ModelFilesError: the model's files are incomplete or have impossible values.
    """
    commit, files = hub.files()
    read_names = (CONFIG_FILE, INDEX_FILE, QUANTIZATION_FILE)
    small_files = [file for file in describing_files(files) if file.path in read_names]
    for file in small_files:
        (folder / file.path).touch()
        hub.fetch(commit, file, folder / file.path)
    has_index = any(file.path == INDEX_FILE for file in small_files)
    index = parse_index((folder / INDEX_FILE).read_bytes()) if has_index else None
    for file in weight_files(files, index):
        _write_header_only(hub, commit, file, folder / file.path)
    return read_profile(folder)


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Interrupts the main thread if the context takes longer than the limit, whatever the thread waits for.

    Raises:
        FetchError: the time is over.
    """

    def raise_error(number: int, frame: FrameType | None) -> None:
        """Raises the error of a hub that answers too slowly."""
        raise FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"the hub has not sent {CONFIG_FILE} and the headers of the weight files within {limit_s:g} s. "
            "Check the network between pods and the hub. If you use a proxy or a mirror, check HTTPS_PROXY "
            "or HF_ENDPOINT in spec.engine.env",
            is_temporary=True,
        )

    old_handler = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, limit_s, _REPEAT_INTERVAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)


def _write_header_only(hub: HubReader, commit: str, file: FetchedFile, path: Path) -> None:
    """Writes a sparse file with the header and the size of a safetensors file, and a hole as its weights."""
    prefix = hub.first_bytes(commit, file, _LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    # If the header is too long, only its length is fetched: `read_profile` then refuses the file.
    header = hub.first_bytes(commit, file, _LENGTH_BYTES + length) if length <= MAX_HEADER_BYTES else prefix
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as sparse_file:
        sparse_file.write(header)
        sparse_file.truncate(max(file.size_bytes, len(header)))  # never cuts the header
