"""Yields the tensors of one linear layer in each published format: names, types and shapes."""

from collections.abc import Iterator
from math import ceil

from heteroinfer_contract.model import Scheme, SchemeName

TensorShape = tuple[str, str, tuple[int, ...]]
"""Name, safetensors' type, shape."""
ELEMENT_BITS = {
    "F32": 32,
    "BF16": 16,
    "F16": 16,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "I32": 32,
    "I64": 64,
}


def linear(  # noqa: C901 - one case a format
    name: str, out: int, into: int, scheme: Scheme, *, bias: bool = False
) -> Iterator[TensorShape]:
    """Yields the tensors of a linear layer.

    Args:
        name: name without `.weight`.
        out: number of rows.
        into: number of columns.
        scheme: its format.
        bias: whether it has one.
    """
    if bias:
        yield f"{name}.bias", "BF16", (out,)
    group = scheme.group or into
    match scheme.name:
        case SchemeName.NONE:
            yield f"{name}.weight", "BF16", (out, into)
        case SchemeName.FP8_BLOCK:
            yield f"{name}.weight", "F8_E4M3", (out, into)
            yield f"{name}.weight_scale_inv", "F32", (ceil(out / group), ceil(into / group))
        case SchemeName.FP8_CHANNEL:
            yield f"{name}.weight", "F8_E4M3", (out, into)
            yield f"{name}.weight_scale", "BF16", (out, 1)
        case SchemeName.FP8_TENSOR:
            yield f"{name}.weight", "F8_E4M3", (out, into)
            yield f"{name}.weight_scale", "F32", ()
            yield f"{name}.input_scale", "F32", ()
        case SchemeName.INT8:
            yield f"{name}.weight", "I8", (out, into)
            yield f"{name}.weight_scale", "BF16", (out, 1)
        case SchemeName.AWQ:
            packed = 32 // scheme.bits
            yield f"{name}.qweight", "I32", (into, out // packed)
            yield f"{name}.qzeros", "I32", (into // group, out // packed)
            yield f"{name}.scales", "F16", (into // group, out)
        case SchemeName.GPTQ:
            packed = 32 // scheme.bits
            yield f"{name}.qweight", "I32", (into // packed, out)
            yield f"{name}.qzeros", "I32", (into // group, out // packed)
            yield f"{name}.scales", "F16", (into // group, out)
            yield f"{name}.g_idx", "I32", (into,)
        case SchemeName.INT4:
            yield f"{name}.weight_packed", "I32", (out, into * scheme.bits // 32)
            yield f"{name}.weight_scale", "BF16", (out, into // group)
            yield f"{name}.weight_shape", "I64", (2,)
        case SchemeName.NVFP4:
            yield f"{name}.weight_packed", "U8", (out, into // 2)
            yield f"{name}.weight_scale", "F8_E4M3", (out, into // 16)
            yield f"{name}.weight_global_scale", "F32", (1,)
            yield f"{name}.input_global_scale", "F32", (1,)
        case _:
            raise ValueError(f"{name}: no tensors are known for {scheme}")
