"""Sizes of weights in the form of CPU kernels, and the additional memory while weights are packed.

CPU stages and feed-forward ranks are counted with these sizes. Pure.
"""

from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.column_shares import KERNEL_BLOCK
from heteroinfer_contract.model import LayerKind, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS

_BLOCK: Final = 128
"""Weights per block of an output in vLLM's kernels of experts for AMX; each block has a sum of 4 bytes. A
smaller group is one block."""
_ZERO_POINT: Final[Mapping[SchemeName, Fraction]] = MappingProxyType(
    {SchemeName.AWQ: Fraction(1, 2), SchemeName.GPTQ: Fraction(1, 2)}
)
"""Bytes of a group's zero point in the checkpoint: AWQ and GPTQ always store one."""
_FLOATS_PACKED: Final = Fraction(201, 200)
"""Packed size of weights in FP8 and NVFP4 relative to the checkpoint: 4 bytes more for each column, 1.002
with 4,096 inputs and 1.009 with 768."""
_FLOATS: Final = frozenset(
    {
        SchemeName.FP8_BLOCK,
        SchemeName.FP8_CHANNEL,
        SchemeName.FP8_TENSOR,
        SchemeName.MXFP8,
        SchemeName.NVFP4,
    }
)
_COPIES: Final[Mapping[SchemeName, int]] = MappingProxyType(
    {SchemeName.AWQ: 2, SchemeName.INT4: 2, SchemeName.GPTQ: 3}
)
"""Additional copies of a stage's layer while it is packed: up to 1.9, for experts in GPTQ up to 2.9
(patches/cpu_packing.py; 150 to 300 MiB per layer, 2 cores of an EPYC, 2026-11-24 and 2026-11-25)."""
_GATE_AND_UP: Final = Fraction(2, 3)
"""Share of an MLP's bytes in its gate and up projections."""


def packed_part(scheme: Scheme) -> Fraction:
    """Returns the size of quantized weights in our kernels' form, relative to the checkpoint.

    Codes and scales keep their size (kernels/coded.py). In AWQ a zero point becomes a byte: 1.008 with groups
    of 128 and 1.027 with groups of 32. GPTQ loses its zero points: 0.992 and 0.973.
    """
    if scheme.name in _FLOATS:
        return _FLOATS_PACKED
    stored, own = _group_bytes(scheme)
    return (own + (scheme.name is SchemeName.AWQ)) / stored


def packed_for_amx(scheme: Scheme) -> Fraction:
    """Returns the size of 4-bit experts in vLLM's kernels for AMX, relative to the checkpoint.

    CPU ranks that share the layers of a stage use these kernels. A group has its values, a sum of 4 bytes per
    block, a scale of 4 bytes instead of 2, and a zero point of one byte: 1.106 for int4 and 1.098 for AWQ and
    GPTQ, in groups of 128. Measured with vLLM's own functions on an EPYC, where they also pack for AMX
    (2026-11-25).
    Source: vllm/model_executor/layers/fused_moe/oracle/int_wna16.py::_process_weights_cpu@v0.32.0.
    """
    if scheme.name not in FOUR_BITS:
        return packed_part(scheme)
    group = scheme.group or _BLOCK
    return (Fraction(group, 2) + 4 * -(-group // _BLOCK) + 4 + 1) / _group_bytes(scheme)[0]


def _group_bytes(scheme: Scheme) -> tuple[Fraction, Fraction]:
    """Returns the bytes of a group in the checkpoint, with and without its zero point."""
    own = Fraction((scheme.group or _BLOCK) * max(scheme.bits, 1), 8) + 2
    return own + _ZERO_POINT.get(scheme.name, Fraction(0)), own


def grown_bytes(profile: ModelProfile, kind: LayerKind, tensor: int, scale: Fraction) -> Fraction:
    """Returns the bytes that all ranks of a CPU stage hold of a layer besides its stored bytes.

    vLLM fills the columns of 16-bit experts with zeros up to whole blocks of the kernels.
    Source: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py
    ::CPUUnquantizedExperts._pad_moe_intermediate@v0.32.0.

    Args:
        tensor: ranks that share each expert's columns.
        scale: bytes of the engine's element type per byte of the checkpoint, for plain weights.
    """
    grown = kind.quantized_bytes * (packed_part(profile.scheme) - 1)
    columns = Fraction(kind.columns, tensor)
    if kind.experts_quantized:
        # Our kernels compute the experts of ranks that hold whole layers, vLLM's those of other ranks.
        packed = packed_part if tensor == 1 else packed_for_amx
        grown += kind.routed_bytes * (packed(profile.scheme_of_experts) - 1)
    elif kind.experts and columns:
        filled = ceil(columns / KERNEL_BLOCK) * KERNEL_BLOCK / columns
        grown += kind.routed_bytes * (filled - 1) * scale
    return grown


def bytes_while_packed(profile: ModelProfile, kind: LayerKind, scale: Fraction) -> Fraction:
    """Returns the most additional bytes of all ranks of a CPU stage while a layer is packed.

    Experts need a second copy, because vLLM replaces both their tensors before it frees the first. An MLP
    needs a second copy of gate and up, which are one tensor. Experts of 0.75 GiB took 0.75 GiB more, an MLP
    of 0.66 GiB took 0.4 GiB more (bf16, 2 cores of an EPYC, 2026-11-25). In 4 bits it is several copies.

    Args:
        scale: bytes of the engine's element type per byte of the checkpoint, for plain weights.
    """
    in_linear, in_experts = (
        _COPIES.get(profile.scheme.name, 0),
        _COPIES.get(profile.scheme_of_experts.name, 1),
    )
    experts = kind.routed_bytes * (Fraction(in_experts) if kind.experts_quantized else scale)
    mlp = _GATE_AND_UP * kind.mlp_bytes * scale * (not (kind.quantized_bytes and in_linear))
    return max(in_linear * kind.quantized_bytes + experts, mlp)
