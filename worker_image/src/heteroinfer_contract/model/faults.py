"""Contradictions between a config.json and the headers of its weights. Stdlib only; pure.

vLLM builds a model by its config. If the weights differ, vLLM cannot load them, or its answers are wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from heteroinfer_contract.model.attention import unknown_layer_types
from heteroinfer_contract.model.scheme import Scheme, SchemeName
from heteroinfer_contract.model.weights import Tensor, is_embedding, is_expert_input

_FP8: Final = frozenset({"F8_E4M3", "F8_E5M2"})
_PACKED_TYPES: Final = frozenset({"U8", "I8"})
_FP4: Final = frozenset({SchemeName.MXFP4, SchemeName.NVFP4})
_EXPERT_TYPE_FIELD: Final = "expert_dtype"
"""Field in which DeepSeek-V4's config names the format of its experts, which vLLM supports
(vllm/models/deepseek_v4/quant_config.py@v0.32.0)."""


def stored_expert_scheme(tensors: Sequence[Tensor], hidden: int) -> Scheme | None:
    """Returns the format of routed experts that are stored as 4-bit floats; None for other formats.

    Types and shapes of the tensors show the format: each byte holds two values, so a row has half the bytes.

    Args:
        hidden: width of the residual stream.
    """
    packed = next(
        (tensor for tensor in tensors if is_expert_input(tensor) and tensor.dtype in _PACKED_TYPES), None
    )
    if packed is None or packed.shape[-1] * 2 != hidden:
        return None
    expert = packed.name.rpartition(".")[0]
    scales = {tensor.dtype for tensor in tensors if tensor.name.startswith(expert) and "scale" in tensor.name}
    if "F8_E4M3" in scales:  # scales of MXFP4 are powers of two (F8_E8M0)
        return Scheme(name=SchemeName.NVFP4, bits=4, group=16)
    return Scheme(name=SchemeName.MXFP4, bits=4, group=32)


def find_faults(
    text: Mapping[str, Any], tensors: Sequence[Tensor], scheme: Scheme, experts: Scheme | None
) -> tuple[str, ...]:
    """Returns each contradiction as a sentence that names the config's value and the files' value.

    Args:
        text: a language model's config, with defaults (`model.config.text_config`).
        scheme: format that the config names.
        experts: result of `stored_expert_scheme`.
    """
    return (
        *_layer_type_faults(text),
        *_size_faults(text, tensors),
        *_quantization_faults(text, tensors, scheme, experts),
    )


def _layer_type_faults(text: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence about types of layers whose memory the planner cannot compute."""
    if words := unknown_layer_types(text):
        yield f"config.json has layer_types {', '.join(words)[:100]}, whose memory the planner cannot compute"


def _size_faults(text: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yields a sentence for each size of the embedding that differs from the config."""
    embedding = next((tensor for tensor in tensors if is_embedding(tensor)), None)
    if embedding is None:
        return
    has_projected_embedding = "word_embed_proj_dim" in text  # such an embedding has another width (OPT)
    if has_projected_embedding:
        return
    for name, size in zip(("vocab_size", "hidden_size"), embedding.shape, strict=True):
        if name in text and text[name] != size:
            yield f"config.json has {name} {text[name]}, but {embedding.name} has {size} in the files"


def _quantization_faults(
    text: Mapping[str, Any], tensors: Sequence[Tensor], scheme: Scheme, experts: Scheme | None
) -> Iterator[str]:
    """Yields a sentence for each format of quantized weights in the files that the config does not name."""
    if experts is not None and scheme.name not in _FP4 and str(text.get(_EXPERT_TYPE_FIELD)) != "fp4":
        named = "no quantization" if scheme == Scheme() else str(scheme)
        yield f"config.json names {named}, but the files store the experts in {experts}"
    stored = next(
        (tensor.name for tensor in tensors if tensor.dtype in _FP8 and tensor.name.endswith(".weight")), ""
    )
    if stored and scheme == Scheme():
        yield f"config.json has no quantization_config, but the files store {stored} in FP8"
