"""Selects the files of a hub's model that serving needs. Pure.

Hubs store a model in several formats: as safetensors, as .bin or .pth, as GGUF, in a folder
`original/`. vLLM reads the safetensors files at the top level; if there is an index, the files in the index
(`vllm/model_executor/model_loader/weight_utils.py::filter_duplicate_safetensors_files@v0.32.0`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model.config import CONFIG_FILE
from heteroinfer_contract.model.weights import INDEX_FILE
from heteroinfer_contract.model_fetch import LOCK_FILE, MARKER_FILE, PARTS_FOLDER, FetchedFile
from vllm_heteroinfer.fetch.errors import FetchError

SINGLE_FILE: Final = "model.safetensors"
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 2048
"""Limits of Linux for a file's name, and for a path that leaves room for the path of the cache."""
_DESCRIBING: Final = re.compile(
    r"[^/]+\.(json|txt|model|tiktoken|jinja|py|bpe|vocab)"  # config, tokenizer, the model's own code
    r"|tokenizer\.model\.[^/]+"  # tokenizers of Mistral
    r"|additional_chat_templates/[^/]+\.jinja"
)
_INDEX_OF_OTHER_FORMAT: Final = re.compile(r".+\.(bin|h5|msgpack)\.index\.json")
_WEIGHTS: Final = re.compile(r"[^/]+\.safetensors")


def can_be_a_file(path: Any) -> bool:
    """Checks whether a hub's path is safe, normalised, and not a name that the cache itself uses."""
    if not isinstance(path, str) or not path.isprintable():  # the path appears in logs
        return False
    posix_path = PurePosixPath(path)
    if path != str(posix_path) or posix_path.is_absolute() or ".." in posix_path.parts:
        return False
    has_long_name = any(len(part.encode()) > _MAX_NAME_BYTES for part in posix_path.parts)
    if has_long_name or len(path.encode()) > _MAX_PATH_BYTES:
        return False
    return bool(posix_path.parts) and not any(_is_used_by_cache(part) for part in posix_path.parts)


def _is_used_by_cache(name: str) -> bool:
    """Checks whether the cache itself uses this name; ignores upper and lower case."""
    name = name.casefold()
    return name in (LOCK_FILE, PARTS_FOLDER) or name.startswith(MARKER_FILE)


def describing_files(files: Sequence[FetchedFile]) -> list[FetchedFile]:
    """Returns the small files: config, tokenizer, chat template, index, code of the model.

    Raises:
        FetchError: there is no config.json, so vLLM cannot serve the model.
    """
    if not any(file.path == CONFIG_FILE for file in files):
        raise _not_servable_error(f"has no {CONFIG_FILE}", files)
    return [
        file
        for file in files
        if _DESCRIBING.fullmatch(file.path)
        and not _INDEX_OF_OTHER_FORMAT.fullmatch(file.path)
        and can_be_a_file(file.path)  # leaves out the marker of a cache that was uploaded
    ]


def parse_index(content: bytes) -> Any:
    """Parses an index. If the content is not JSON, returns an empty index, which `weight_files` refuses."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return {}


def weight_files(files: Sequence[FetchedFile], index: Any) -> list[FetchedFile]:
    """Returns the safetensors files of the model, without files that repeat the same weights.

    These are the files that the index names. Without an index, they are model.safetensors or, if there is no
    such file, all safetensors files at the top level.

    Args:
        index: the parsed model.safetensors.index.json; None if the model has no index.

    Raises:
        FetchError: there are no safetensors files, or the index names files that do not exist, or
            names that a file of a model must not have.
    """
    by_path = {file.path: file for file in files if can_be_a_file(file.path)}
    if index is not None:
        names = _file_names(index)
        _check_indexed_files(names, by_path, files)
        return [by_path[name] for name in names]
    if SINGLE_FILE in by_path:
        return [by_path[SINGLE_FILE]]
    weights = [file for path, file in by_path.items() if _WEIGHTS.fullmatch(path)]
    if not weights:
        raise _not_servable_error("has no weights as *.safetensors", files)
    return weights


def _check_indexed_files(
    names: Sequence[str], by_path: Mapping[str, FetchedFile], files: Sequence[FetchedFile]
) -> None:
    """Checks that the hub has each file that the index names, and that the cache can store these files.

    Args:
        names: the names in the index.
        by_path: the hub's files with valid paths, by path.
        files: all files of the hub, for the error.

    Raises:
        FetchError: see `weight_files`.
    """
    if not names:
        raise _not_servable_error(f"has an index ({INDEX_FILE}) that names no files", files)
    absent = [name for name in names if name not in by_path]
    if invalid := [name for name in absent if not can_be_a_file(name)]:
        problem = f"has invalid file names in {INDEX_FILE}: {', '.join(invalid[:3])}"
        raise _not_servable_error(problem, files)
    if absent:
        raise _not_servable_error(f"lacks files that {INDEX_FILE} names: {', '.join(absent[:3])}", files)
    folders = {str(parent) for path in by_path for parent in PurePosixPath(path).parents}
    for name in names:
        is_in_a_file = any(str(parent) in by_path for parent in PurePosixPath(name).parents)
        if name in folders or is_in_a_file:
            raise _not_servable_error(f"has {name} both as a file and as a folder", files)


def _file_names(index: Any) -> list[str]:
    """Returns the names of the files in an index, sorted; none if the index has another form."""
    weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
    return sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, Mapping) else []


def _not_servable_error(problem: str, files: Sequence[FetchedFile]) -> FetchError:
    """Returns the error for a model that vLLM cannot serve from this hub; `problem` begins with a verb."""
    present = ", ".join(file.path for file in files[:5]) or "nothing"
    return FetchError(
        FailureReason.MODEL_NOT_READABLE,
        f"the hub's model {problem}; its files are {present}{', ...' if len(files) > 5 else ''}. Use a model "
        "in Hugging Face's format with safetensors, or convert the model (save_pretrained) and use pvc://CLAIM/PATH",
    )
