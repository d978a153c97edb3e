"""A model's sizes, read from its own files: config.json and the headers of its safetensors.

Stdlib only. Reads headers, never weights: the first 8 bytes of a safetensors file are
the length of a JSON header that names every tensor's dtype, shape and offset
(https://github.com/huggingface/safetensors, "Format").
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

from heteroinfer_contract.column_shares import column_unit_of
from heteroinfer_contract.model import LayerKind, Routing, Scheme
from heteroinfer_contract.model.attention import first_of_shared_kv, layer_attention
from heteroinfer_contract.model.config import (
    CONFIG_FILE,
    from_params,
    is_empty_block,
    served_config,
    text_class,
    text_config,
)
from heteroinfer_contract.model.faults import find_faults, stored_expert_scheme
from heteroinfer_contract.model.scheme import (
    find_quantization,
    has_limited_experts,
    limits_all_experts,
    read_method,
    read_routing,
    read_scheme,
)
from heteroinfer_contract.model.weights import INDEX_FILE, LayerBytes, Tensor, Weights, sum_weights
from heteroinfer_contract.model_file_content import (
    MAX_HEADER_BYTES,
    ModelFilesError,
    dangling,
    not_readable,
    read_header,
    read_json,
)
from heteroinfer_contract.model_profile import MAX_LAYERS, ModelProfile

PARAMS_FILE = "params.json"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Describes the quantization of ModelOpt checkpoints whose config.json does not."""
_CONSOLIDATED = "consolidated*.safetensors"
_NUMBERED = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")
_MAX_SHARDS = 10_000
"""Maximum number of shards to look for by number; published models have a few hundred."""
MAX_CONFIG_BYTES = 16 * 2**20
"""Maximum size of config.json or params.json; published models need a few hundred KB."""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer*.model",
    "tokenizer.model*",
    "tekken.json",
    "vocab.*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "*.spm",
    "tokenization_*.py",
)
"""Files that hold or accompany a vocabulary: tokenizers, sentencepiece, tiktoken, Mistral, or custom code."""

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONFIG_DTYPES = frozenset(_DTYPES.values())
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPE_BYTES = {dtype: _ELEMENT_BYTES[stored_type] for stored_type, dtype in _DTYPES.items()}
"""Bytes of an element in memory, by torch's name of the dtype."""


def read_profile(directory: Path) -> ModelProfile:
    """Reads the sizes of the model in `directory`, in the dtype that its config names.

    Raises:
        ModelFilesError: the path is missing or not a directory, it does not hold a model, or one of the
            model's files is missing, unreadable, cut short or has impossible values.
    """
    try:
        profile = _read_profile(directory)
        return ModelProfile.from_json(profile.to_json())  # parsing checks the profile
    except ModelFilesError:
        raise
    except OSError as error:
        raise not_readable(directory, error) from error
    except _UNEXPECTED_VALUE_ERRORS as error:
        raise ModelFilesError(
            f"{directory}: cannot interpret {CONFIG_FILE} or a safetensors header ({type(error).__name__}: "
            f"{str(error)[:200]}). Download the model again, or use another model"
        ) from error


_UNEXPECTED_VALUE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors caused by values of the wrong type or range; config.json has too many fields to check each."""


def has_tokenizer(directory: Path) -> bool:
    """Returns whether a directory has a tokenizer. vLLM's API server cannot start without a tokenizer."""
    return any(
        fnmatch(name, pattern) and (directory / name).exists()  # False for a link without its target
        for name in os.listdir(directory)
        for pattern in _TOKENIZER_FILES
    )


def _read_profile(directory: Path) -> ModelProfile:
    """Reads the sizes of the model in `directory`. `read_profile` converts unexpected errors."""
    config, consolidated = _read_config(directory)
    text = text_config(config)
    stored = _read_distinct_tensors(_weight_files(directory, consolidated))
    dtype, scheme = _weights_dtype(text, stored, directory), read_scheme(config, text)
    tensors = [_with_loaded_size(tensor, dtype, scheme) for tensor in stored]
    num_layers = _number_of_layers(text, directory)
    attention = layer_attention(text)
    weights = _sum_complete_weights(tensors, text, num_layers, attention, directory)
    # A checkpoint without a head ties the head to the embedding, even if config.json does not state this.
    # Some checkpoints with a tied head keep a copy of the head; vLLM does not load the copy (dropped_bytes).
    tied = bool(text.get("tie_word_embeddings", False)) or weights.head == 0
    num_heads = _positive_number(text, directory, "num_attention_heads")
    hidden = _positive_number(text, directory, "hidden_size")
    kinds, kind_of_layer = _kinds_of_layers(text, attention, weights, directory)
    architecture = _architecture(text)
    text_architecture, text_type = text_class(config)
    experts = stored_expert_scheme(stored, hidden)
    return ModelProfile(
        architecture=architecture,
        dtype=dtype,
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=num_heads,
        num_kv_heads=_positive_number(text, directory, "num_key_value_heads", num_heads),
        head_dim=_positive_number(text, directory, "head_dim", hidden // num_heads),
        vocab_size=_positive_number(text, directory, "vocab_size"),
        max_position_embeddings=_positive_number(text, directory, "max_position_embeddings"),
        layer_bytes=tuple(weights.layers[index].total for index in range(num_layers)),
        embedding_bytes=weights.embedding,
        head_bytes=0 if tied else weights.head,
        tied_head=tied,
        other_bytes=weights.other,
        quantization=read_method(config, text),
        scheme=scheme,
        kinds=kinds,
        kind_of_layer=kind_of_layer,
        routing=read_routing(architecture, text) if any(kind.experts for kind in kinds) else Routing.NONE,
        limited_experts=has_limited_experts(text) or limits_all_experts(text),
        state_dtype=str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or ""),
        encoder=_encoder_input(config, weights) if weights.encoder else "",
        encoder_bytes=weights.encoder,
        dropped_bytes=weights.dropped + (weights.head if tied else 0),
        first_stage_layers=_first_stage_layers(served_config(config)),
        # Layers that share a KV cache must be in one stage, so the last stage has at least these layers.
        last_stage_layers=num_layers - first_of_shared_kv(attention),
        layer_table_bytes=weights.layer_tables,
        column_unit=column_unit_of(find_quantization(config, text)),
        expert_scheme=None if experts == scheme else experts,
        text_architecture=text_architecture,
        text_type=text_type,
        host_table_bytes=weights.host_tables,
        faults=find_faults(text, stored, scheme, experts),
    )


def _number_of_layers(text: Mapping[str, Any], directory: Path) -> int:
    """Returns the number of layers in a config; raises ModelFilesError if it is out of range."""
    num_layers = _positive_number(text, directory, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ModelFilesError(
            f"{directory / CONFIG_FILE}: num_hidden_layers must be at most {MAX_LAYERS} (got {num_layers}). "
            "Download the model again, or use another model"
        )
    return num_layers


def _sum_complete_weights(
    tensors: Sequence[Tensor],
    text: Mapping[str, Any],
    num_layers: int,
    attention: Sequence[LayerKind],
    directory: Path,
) -> Weights:
    """Returns the weights of each part of a model.

    Raises:
        ModelFilesError: a layer has no weights, although its config does not mark the layer as empty.
    """
    sharing_layers = {index for index, kind in enumerate(attention) if kind.shares_kv}
    weights = sum_weights(tensors, num_layers, sharing_layers)
    for index in range(num_layers):
        if is_empty_block(text, index):
            # The layer has no weights by design, so it is not missing.
            weights.layers.setdefault(index, LayerBytes())
    # Checks only served layers. Layers from `num_layers` on are for speculation (multi-token prediction).
    if missing := sorted(set(range(num_layers)) - set(weights.layers)):
        raise ModelFilesError(
            f"{directory}: weights of layers {_shortened_list(missing)} are missing; {CONFIG_FILE} has "
            f"num_hidden_layers {num_layers}. Download the model again"
        )
    return weights


def _read_distinct_tensors(files: Sequence[Path]) -> list[Tensor]:
    """Returns the tensors of all files.

    A tensor in several files counts once (`model.safetensors` beside its own shards), although vLLM loads it
    twice.
    """
    return list({tensor.name: tensor for path in files for tensor in _read_tensors(path)}.values())


def _kinds_of_layers(
    text: Mapping[str, Any], attention: Sequence[LayerKind], weights: Weights, directory: Path
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Returns the distinct kinds of layers, and for each layer the index of its kind."""
    kinds: list[LayerKind] = []
    kind_of_layer: list[int] = []
    for index, attention_kind in enumerate(attention):
        layer = weights.layers[index]
        experts = _positive_number(text, directory, "num_experts") if layer.routed else 0
        _check_experts(text, index, experts, layer, directory)
        kind = replace(
            attention_kind,
            experts=experts,
            experts_per_token=_positive_number(text, directory, "num_experts_per_tok") if experts else 0,
            expert_bytes=layer.routed // experts if experts else 0,
            # Scales and biases of a bf16 expert may be named like those of a quantized expert. So experts are
            # quantized only if most of their bytes are.
            experts_quantized=layer.routed_quantized * 2 > layer.routed > 0,
            gates_together=layer.gates_together,
            quantized_bytes=layer.quantized,
            mlp_bytes=layer.mlp,
            columns=layer.columns(_positive_number(text, directory, "hidden_size")),
        )
        if kind not in kinds:
            kinds.append(kind)
        kind_of_layer.append(kinds.index(kind))
    return tuple(kinds), tuple(kind_of_layer)


def _check_experts(
    text: Mapping[str, Any], index: int, experts: int, layer: LayerBytes, directory: Path
) -> None:
    """Checks that a layer has as many experts as config.json specifies.

    Skips models whose layers may differ: those with `block_configs` or with image experts (ERNIE-4.5-VL).
    """
    may_differ = text.get("block_configs") or isinstance(text.get("moe_num_experts"), list)
    if not layer.numbered or may_differ:
        return
    if len(layer.numbered) != experts or max(layer.numbered) >= experts:
        raise ModelFilesError(
            f"{directory}: layer {index} has weights of {len(layer.numbered)} experts, but {CONFIG_FILE} has "
            f"{experts}. Download the model again"
        )


def _encoder_input(config: Mapping[str, Any], weights: Weights) -> str:
    """Returns the encoder's input type, `audio` or `images`.

    Names of tensors may not reveal the type (granite-speech's `encoder.`), so keys of the config count too.
    """
    takes_audio = weights.has_audio_encoder or any(name.startswith("audio_") for name in config)
    return "audio" if takes_audio else "images"


def _first_stage_layers(config: Mapping[str, Any]) -> int:
    """Returns the minimum number of layers of the first stage.

    Qwen3-VL adds its encoder's outputs of several depths to the first layers. These layers must be in one
    stage (vllm/model_executor/models/qwen3_vl.py@v0.32.0: "start_layer should be greater than or equal to").
    """
    vision = config.get("vision_config")
    depths = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return max(len(depths), 1) if isinstance(depths, list) else 1


def _read_config(directory: Path) -> tuple[dict[str, Any], bool]:
    """Returns the config, and whether the model has files in Mistral's format, which vLLM prefers.

    Source: vllm/transformers_utils/repo_utils.py::is_mistral_model_repo@v0.32.0.
    """
    entries = _list_entries(directory)
    has_consolidated = any(fnmatch(name, _CONSOLIDATED) for name in entries)
    if has_consolidated and PARAMS_FILE in entries:
        return _read_mistral_config(directory, has_config=CONFIG_FILE in entries), True
    if CONFIG_FILE not in entries:
        present = ", ".join(sorted(entries)[:5]) or "nothing"
        raise ModelFilesError(
            f"{directory}: is not a model: {CONFIG_FILE} is missing (found {present}). "
            "Use the directory of a model in Hugging Face's format"
        )
    config = _read_object(directory / CONFIG_FILE)
    # vLLM reads this file in the same case (vllm/transformers_utils/config.py::get_config@v0.32.0).
    if config.get("quantization_config") is None and QUANTIZATION_FILE in entries:
        config["quantization_config"] = _read_object(directory / QUANTIZATION_FILE)
    return config, False


def _list_entries(directory: Path) -> list[str]:
    """Returns the names of the files and folders in a directory; raises ModelFilesError."""
    try:
        return os.listdir(directory)
    except FileNotFoundError as error:
        raise ModelFilesError(
            f"{directory}: no such directory. Use a directory with config.json and *.safetensors"
        ) from error
    except NotADirectoryError as error:
        raise ModelFilesError(
            f"{directory}: must be a directory that contains {CONFIG_FILE} (got a file). Use its folder"
        ) from error
    except PermissionError as error:
        raise not_readable(directory, error) from error


def _read_mistral_config(directory: Path, *, has_config: bool) -> dict[str, Any]:
    """Reads params.json, Mistral's own config. If it has no maximum length, config.json may have the length.

    Args:
        has_config: whether the directory has a config.json, too.
    """
    params = _read_object(directory / PARAMS_FILE)
    if "max_position_embeddings" not in params and has_config:
        config_text = text_config(_read_object(directory / CONFIG_FILE))
        longest = config_text.get("max_position_embeddings", 128_000)  # vLLM's default, too
        params["max_position_embeddings"] = longest
    return from_params(params)


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises ModelFilesError."""
    value = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: must be a JSON object. Download it again")
    return value


def _weight_files(directory: Path, consolidated: bool) -> list[Path]:
    """Returns the safetensors files that contain the model's weights.

    Args:
        consolidated: whether the model has files in Mistral's format.

    Raises:
        ModelFilesError: the model has no such files, or one of them is missing.
    """
    if consolidated:
        return sorted(directory.glob(_CONSOLIDATED))
    if (directory / INDEX_FILE).exists():
        return _indexed_files(directory)
    # vLLM prefers files in Mistral's format (default_loader.py::_prepare_weights@v0.32.0).
    weight_files = sorted(directory.glob(_CONSOLIDATED)) or sorted(directory.glob("*.safetensors"))
    if not weight_files:
        raise ModelFilesError(
            f"{directory}: has no weights as *.safetensors. "
            "Convert the model (save_pretrained(..., safe_serialization=True))"
        )
    if missing := _missing_numbers({path.name for path in weight_files}):
        raise ModelFilesError(
            f"{directory}: {_shortened_list(missing)} {'is' if len(missing) == 1 else 'are'} missing. "
            "Finish the download"
        )
    return weight_files


def _indexed_files(directory: Path) -> list[Path]:
    """Returns the files that the model's index names.

    Raises:
        ModelFilesError: the index names no files, or files outside its folder, or a file is missing.
    """
    index = directory / INDEX_FILE
    content = read_json(index, MAX_HEADER_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{index}: must have a weight_map from tensors to files. Download it again")
    names = sorted({str(name) for name in weight_map.values()})
    if outside := [name for name in names if _is_outside_folder(name)]:
        raise ModelFilesError(
            f"{directory}: {INDEX_FILE} must name files in its folder only (got "
            f"{_shortened_list(outside)}). Download the model again, or use another model"
        )
    missing = [name for name in names if not (directory / name).exists()]
    if links := [name for name in missing if (directory / name).is_symlink()]:
        raise dangling(directory / links[0])
    if missing:
        raise ModelFilesError(
            f"{directory}: {_shortened_list(missing)} {'is' if len(missing) == 1 else 'are'} missing; "
            f"{INDEX_FILE} names {len(names)} files. Finish the download"
        )
    return [directory / name for name in names]


def _missing_numbers(names: Set[str]) -> list[str]:
    """Returns the names of missing shards, which numbers in other names imply (`model-00001-of-00003`)."""
    expected = {
        f"{match[1]}{number:0{len(match[2])}}-of-{match[3]}.safetensors"
        for match in filter(None, map(_NUMBERED.fullmatch, names))
        for number in range(1, min(int(match[3]), _MAX_SHARDS) + 1)
    }
    return sorted(expected - names)


def _is_outside_folder(name: str) -> bool:
    """Returns whether a path leads outside the model's folder. Does not follow links.

    A link may lead outside the folder: links of a hub's own cache do.
    """
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def _read_tensors(path: Path) -> list[Tensor]:
    """Returns the tensors that a file's header names; raises ModelFilesError if the file is incomplete."""
    header, header_end, size = read_header(path)
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        tensors = [
            Tensor(
                name=name,
                dtype=str(entry["dtype"]),
                size_bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
                shape=tuple(int(size) for size in entry["shape"]),
            )
            for name, entry in entries.items()
        ]
    except _UNEXPECTED_VALUE_ERRORS as error:
        raise ModelFilesError(
            f"{path}: the header is not in safetensors format ({error!r}). Download it again"
        ) from error
    if header_end + end != size:
        raise ModelFilesError(
            f"{path}: the download is incomplete (got {size} bytes, the header requires {header_end + end}). "
            "Finish the download"
        )
    return tensors


def _positive_number(
    config: Mapping[str, Any], directory: Path, name: str, default: int | None = None
) -> int:
    """Returns a field of a config that must be a number above 0, or the default; raises ModelFilesError."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelFilesError(
            f"{directory / CONFIG_FILE}: {name} must be a whole number above 0 (got {value!r}). "
            "Use a decoder language model, or repair the file"
        )
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def _weights_dtype(config: Mapping[str, Any], tensors: list[Tensor], directory: Path) -> str:
    """Returns the dtype in the config; if the config names none, the dtype of most bytes of the weights."""
    if config.get("dtype") in _CONFIG_DTYPES:
        return str(config["dtype"])
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.dtype] += tensor.size_bytes
    named = [(size, _DTYPES[dtype]) for dtype, size in weights.items() if dtype in _DTYPES]
    if not named:
        raise ModelFilesError(
            f"{directory}: some weights must be in {', '.join(sorted(_DTYPES))}, or {CONFIG_FILE} must name "
            f"a dtype (got weights in {', '.join(sorted(weights))}). Add `dtype` to {CONFIG_FILE}"
        )
    return max(named)[1]


def _with_loaded_size(tensor: Tensor, dtype: str, scheme: Scheme) -> Tensor:
    """Returns the tensor with its size in `dtype`; vLLM converts all unquantized tensors to this type.

    In a quantized model, tensors that are no weight and no bias, such as scales, keep their type.
    """
    keeps_type = scheme != Scheme() and not tensor.name.endswith((".weight", ".bias"))
    if tensor.dtype not in _ELEMENT_BYTES or tensor.is_quantized or keeps_type:
        return tensor
    size_bytes = tensor.size_bytes * _DTYPE_BYTES[dtype] // _ELEMENT_BYTES[tensor.dtype]
    return replace(tensor, size_bytes=size_bytes)


def _shortened_list(items: list[Any]) -> str:
    """Returns the first four items as text for a message, and the number of all items."""
    if not items:
        return "none"
    shown = ", ".join(str(item) for item in items[:4])
    return f"{shown}, ... ({len(items)} in all)" if len(items) > 4 else shown
