"""A model's sizes, read from its own files: config.json and the headers of its safetensors.

Stdlib only. Reads headers, never weights: the first 8 bytes of a safetensors file are
the length of a JSON header that names every tensor's dtype, shape and place
(https://github.com/huggingface/safetensors, "Format").
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_profile import ModelProfile

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As in safetensors itself: a longer header is a broken or hostile file."""

_LAYER = re.compile(r"^(?:(?:model|language_model|transformer|decoder)\.)*(?:layers|h)\.(\d+)\.")
"""Of the language model only: a vision tower has layers of its own."""
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|wte)\.weight$")
_HEAD = re.compile(r"^(?:.*\.)?lm_head\.")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONFIG_DTYPES = frozenset(_DTYPES.values())


class ModelFilesError(ContractError):
    """A directory does not hold a model that can be read; the text says what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    name: str
    dtype: str
    size_bytes: int


def read_profile(directory: Path) -> ModelProfile:
    """Returns the sizes of the model in `directory`, in its checkpoint's own dtype.

    Raises:
        ModelFilesError: the path is missing or no directory, it holds no model, or a
            file of it is missing, unreadable or cut short.
    """
    config = _text_config(_read_config(directory))
    tensors = [tensor for path in _shards(directory) for tensor in _read_header(path)]
    layers: dict[int, int] = defaultdict(int)
    embedding = head = other = 0
    for tensor in tensors:
        if match := _LAYER.search(tensor.name):
            layers[int(match[1])] += tensor.size_bytes
        elif _EMBEDDING.search(tensor.name):
            embedding += tensor.size_bytes
        elif _HEAD.search(tensor.name):
            head += tensor.size_bytes
        else:
            other += tensor.size_bytes
    number = _number(config, directory, "num_hidden_layers")
    # More layers than that are for speculation (multi-token prediction) and are not served.
    if missing := sorted(set(range(number)) - set(layers)):
        raise ModelFilesError(
            f"{directory}: no weights of layers {_brief(missing)}, expected layers 0..{number - 1} "
            f"as num_hidden_layers in {CONFIG_FILE} says; download the model again"
        )
    # Some checkpoints keep a copy of a tied head; vLLM does not load it.
    tied = bool(config.get("tie_word_embeddings", False)) or head == 0
    heads = _number(config, directory, "num_attention_heads")
    hidden = _number(config, directory, "hidden_size")
    return ModelProfile(
        architecture=_architecture(config),
        dtype=_dtype(config, tensors, directory),
        num_layers=number,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=_number(config, directory, "num_key_value_heads", heads),
        head_dim=_number(config, directory, "head_dim", hidden // heads),
        vocab_size=_number(config, directory, "vocab_size"),
        max_position_embeddings=_number(config, directory, "max_position_embeddings"),
        layer_bytes=tuple(layers[index] for index in range(number)),
        embedding_bytes=embedding,
        head_bytes=0 if tied else head,
        tied_head=tied,
        other_bytes=other,
        quantization=_quantization(config),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        entries = os.listdir(directory)
    except FileNotFoundError as error:
        raise ModelFilesError(f"{directory}: no such directory; see model.uri") from error
    except NotADirectoryError as error:
        raise ModelFilesError(
            f"{directory}: got a file, expected the directory that holds {CONFIG_FILE}"
        ) from error
    except PermissionError as error:
        raise _not_readable(directory, error) from error
    if CONFIG_FILE not in entries:
        found = ", ".join(sorted(entries)[:5]) or "nothing"
        raise ModelFilesError(
            f"{directory}: not a model: expected {CONFIG_FILE} in it, got {found}; "
            "give the directory of a model in Hugging Face's format"
        )
    config = _read_json(directory / CONFIG_FILE)
    if not isinstance(config, dict):
        raise ModelFilesError(f"{directory / CONFIG_FILE}: expected a JSON object")
    return config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the language model's part, with what only the whole says (multimodal models nest it)."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config
    return {**config, **nested, "architectures": config.get("architectures", nested.get("architectures"))}


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.exists():
        content = _read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFilesError(f"{index}: expected a weight_map from tensors to files")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise ModelFilesError(
                f"{directory}: {INDEX_FILE} names {len(names)} files, of which {_brief(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; finish the download"
            )
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise ModelFilesError(
            f"{directory}: expected weights as *.safetensors, got none; "
            "convert the model (save_pretrained(..., safe_serialization=True))"
        )
    return found


def _read_header(path: Path) -> list[_Tensor]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise ModelFilesError(
                    f"{path}: got {size} bytes, expected a header of {length} bytes after the first 8; "
                    "the file is cut short or not safetensors: download it again"
                )
            header = _parse_json(path, file.read(length))
    except OSError as error:
        raise _not_readable(path, error) from error
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        tensors = [
            _Tensor(
                name=name,
                dtype=str(entry["dtype"]),
                size_bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelFilesError(
            f"{path}: its header is not safetensors' ({error!r}); download it again"
        ) from error
    if 8 + length + end != size:
        raise ModelFilesError(
            f"{path}: got {size} bytes, expected {8 + length + end} as its header says; "
            "the download is not complete: finish it"
        )
    return tensors


def _read_json(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _not_readable(path, error) from error
    return _parse_json(path, content)


def _parse_json(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ModelFilesError(f"{path}: expected JSON: {error}; download it again") from error


def _not_readable(path: Path, error: OSError) -> ModelFilesError:
    return ModelFilesError(
        f"{path}: cannot be read as user {os.getuid()}: {error.strerror}; "
        "make the model readable for all (chmod -R a+rX)"
    )


def _number(config: Mapping[str, Any], directory: Path, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelFilesError(
            f"{directory / CONFIG_FILE}: {name}: got {value!r}, expected a number above 0; "
            "is this a decoder language model?"
        )
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def _dtype(config: Mapping[str, Any], tensors: list[_Tensor], directory: Path) -> str:
    """Returns the dtype that the config names; without one, that of most bytes of the weights."""
    for key in ("dtype", "torch_dtype"):
        if config.get(key) in _CONFIG_DTYPES:
            return str(config[key])
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.dtype] += tensor.size_bytes
    named = [(size, _DTYPES[dtype]) for dtype, size in weights.items() if dtype in _DTYPES]
    if not named:
        raise ModelFilesError(
            f"{directory}: got weights of {', '.join(sorted(weights))}, expected some of "
            f"{', '.join(sorted(_DTYPES))}, or a dtype in {CONFIG_FILE}"
        )
    return max(named)[1]


def _quantization(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config")
    return str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""


def _brief(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:4])
    return f"{shown}, ... ({len(items)} in all)" if len(items) > 4 else shown or "none"
