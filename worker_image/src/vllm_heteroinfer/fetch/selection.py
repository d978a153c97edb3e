"""Which files of a hub's model serving needs. Pure.

Hubs keep a model several times over: as safetensors, as .bin or .pth, as GGUF, in a folder
`original/`. vLLM reads the safetensors at the top; with an index, the files that it names
(`vllm/model_executor/model_loader/weight_utils.py::filter_duplicate_safetensors_files@v0.32.0`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import MARKER_FILE, FetchedFile
from heteroinfer_contract.model_files import CONFIG_FILE, INDEX_FILE
from vllm_heteroinfer.fetch.errors import FetchError

SINGLE_FILE: Final = "model.safetensors"
_DESCRIBING: Final = re.compile(
    r"[^/]+\.(json|txt|model|tiktoken|jinja|py|bpe|vocab)"  # config, tokenizer, code of its own
    r"|tokenizer\.model\.[^/]+"  # Mistral's
    r"|additional_chat_templates/[^/]+\.jinja"
)
_OF_OTHER_WEIGHTS: Final = re.compile(r".+\.(bin|h5|msgpack)\.index\.json")
_WEIGHTS: Final = re.compile(r"[^/]+\.safetensors")


def describing_files(files: Sequence[FetchedFile]) -> list[FetchedFile]:
    """Returns the small files: config, tokenizer, chat template, index, code of the model's own.

    Raises:
        FetchError: there is no config.json: it is no model that vLLM serves.
    """
    if not any(file.path == CONFIG_FILE for file in files):
        raise _not_servable(f"has no {CONFIG_FILE}", files)
    return [
        file
        for file in files
        if _DESCRIBING.fullmatch(file.path)
        and not _OF_OTHER_WEIGHTS.fullmatch(file.path)
        and file.path != MARKER_FILE  # of a cache that the repository was filled from; ours is written last
    ]


def parse_index(content: bytes) -> Any:
    """Returns a parsed index; one without files for what is not JSON, which weight_files refuses."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return {}


def weight_files(files: Sequence[FetchedFile], index: Any) -> list[FetchedFile]:
    """Returns the safetensors that make up the model, each weight once.

    Args:
        files: all of the model's.
        index: the parsed model.safetensors.index.json, or None if there is none.

    Raises:
        FetchError: there are none, or the index names files that are not there.
    """
    by_path = {file.path: file for file in files if file.path != MARKER_FILE}
    if index is not None:
        names = _names_of(index)
        absent = [name for name in names if name not in by_path or _leaves(name)]
        if absent or not names:
            raise _not_servable(
                f"has an {INDEX_FILE} that names {', '.join(absent[:3]) or 'no'} files", files
            )
        return [by_path[name] for name in names]
    if SINGLE_FILE in by_path:
        return [by_path[SINGLE_FILE]]
    found = [file for file in files if _WEIGHTS.fullmatch(file.path)]
    if not found:
        raise _not_servable("has no weights as *.safetensors", files)
    return found


def _names_of(index: Any) -> list[str]:
    weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
    return sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, Mapping) else []


def _leaves(name: str) -> bool:
    """Returns whether a path would leave the model's folder."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def _not_servable(what: str, files: Sequence[FetchedFile]) -> FetchError:
    found = ", ".join(file.path for file in files[:5]) or "nothing"
    return FetchError(
        FailureReason.MODEL_NOT_READABLE,
        f"the hub's model {what}; it holds {found}{', ...' if len(files) > 5 else ''}. Take a model in "
        "Hugging Face's format with safetensors, or convert it (save_pretrained) and use pvc://CLAIM/PATH",
    )
