"""Sizes of weights in the packed form of CPU kernels, and the additional memory while weights are packed.

The planner counts CPU stages and feed-forward ranks with these sizes. Pure.
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

_AMX_BLOCK: Final = 128
"""Weights in a block of vLLM's expert kernels for AMX. Each block has a sum of 4 bytes. A group of fewer
weights is one block."""
_SCALE_BYTES: Final = 2
"""Bytes of a group's scale in the checkpoint."""
_ZERO_POINT_BYTES: Final[Mapping[SchemeName, Fraction]] = MappingProxyType(
    {SchemeName.AWQ: Fraction(1, 2), SchemeName.GPTQ: Fraction(1, 2)}
)
"""Bytes of a group's zero point in the checkpoint: AWQ and GPTQ always store a zero point."""
_FLOAT_RATIO: Final = Fraction(201, 200)
"""Packed size of weights in FP8, MXFP8 and NVFP4, relative to the checkpoint. Packing adds 4 bytes for each
column: the ratio is 1.002 with 4,096 inputs and 1.009 with 768."""
_FLOAT_FORMATS: Final = frozenset(
    {
        SchemeName.FP8_BLOCK,
        SchemeName.FP8_CHANNEL,
        SchemeName.FP8_TENSOR,
        SchemeName.MXFP8,
        SchemeName.NVFP4,
    }
)
_PACKING_COPIES: Final[Mapping[SchemeName, int]] = MappingProxyType(
    {SchemeName.AWQ: 2, SchemeName.INT4: 2, SchemeName.GPTQ: 3}
)
"""Number of additional copies of a stage's layer while it is packed. Measurements gave up to 1.9, and up to
2.9 for experts in GPTQ (patches/cpu_packing.py; 150 to 300 MiB per layer, 2 cores of an EPYC, 2026-11-24 and
2026-11-25)."""
_GATE_AND_UP_SHARE: Final = Fraction(2, 3)
"""Share of an MLP's bytes in its gate and up projections."""


def packed_ratio(scheme: Scheme, element_bytes: int = 2) -> Fraction:
    """Returns the packed size of quantized weights, divided by their size in the checkpoint.

    Our kernels pack the weights. Codes and scales keep their size (kernels/coded.py). The ratio differs from
    1 in these cases:

    - AWQ, and INT4 with zero points: each zero point takes a byte. With groups of 128 and 32, the ratio of
      AWQ is 1.008 and 1.027.
    - GPTQ: our kernels store no zero points. With groups of 128 and 32, the ratio is 0.992 and 0.973.
    - INT4 with groups, if the engine computes in float32: vLLM converts the scales to float32.
    - FP8, MXFP8 and NVFP4: packing adds 4 bytes for each column (`_FLOAT_RATIO`).

    Args:
        element_bytes: size of the engine's element type.
    """
    if scheme.name in _FLOAT_FORMATS:
        return _FLOAT_RATIO
    stored_bytes, packed_bytes = _group_bytes(scheme)  # with the zero point, and without it
    if scheme.name is SchemeName.AWQ or scheme.zeros:
        packed_bytes += 1
    if scheme.name is SchemeName.INT4 and scheme.group:  # without groups, a column has one scale
        packed_bytes += element_bytes - _SCALE_BYTES
    return packed_bytes / stored_bytes


def packed_ratio_for_amx(scheme: Scheme) -> Fraction:
    """Returns the size of experts in vLLM's kernels for AMX, relative to the checkpoint.

    CPU ranks that share the layers of a stage use these kernels for 4-bit experts. For other formats, the
    result is that of `packed_ratio`. For each quantization group, vLLM stores the codes, a sum of 4 bytes per
    block, a scale of 4 bytes (2 in the checkpoint) and a zero point of 1 byte. With groups of 128, the ratio
    is 1.106 for int4, and 1.098 for AWQ and GPTQ. vLLM's own packing functions gave these sizes on an
    EPYC (2026-11-25): they pack in the same way on a CPU without AMX.
    Source: vllm/model_executor/layers/fused_moe/oracle/int_wna16.py::_process_weights_cpu@v0.32.0.
    """
    if scheme.name not in FOUR_BITS:
        return packed_ratio(scheme)
    group = scheme.group or _AMX_BLOCK
    code_bytes = Fraction(group, 2)
    sum_bytes = 4 * ceil(group / _AMX_BLOCK)
    scale_bytes, zero_point_bytes = 4, 1
    stored_bytes, _ = _group_bytes(scheme)
    return (code_bytes + sum_bytes + scale_bytes + zero_point_bytes) / stored_bytes


def _group_bytes(scheme: Scheme) -> tuple[Fraction, Fraction]:
    """Returns the bytes of a quantization group in the checkpoint, with and without its zero point.

    Both contain the codes and the scale. A format without groups counts as if _AMX_BLOCK weights were a
    group.
    """
    code_bytes = Fraction((scheme.group or _AMX_BLOCK) * max(scheme.bits, 1), 8)
    zero_point_bytes = Fraction(scheme.bits, 8) if scheme.zeros else _ZERO_POINT_BYTES.get(scheme.name, 0)
    return code_bytes + _SCALE_BYTES + zero_point_bytes, code_bytes + _SCALE_BYTES


def growth_bytes(
    profile: ModelProfile, kind: LayerKind, tensor: int, scale: Fraction, element_bytes: int
) -> Fraction:
    """Returns the bytes that packing adds to a layer, for all ranks of a CPU stage together.

    The number is negative if the packed form is smaller. vLLM fills the columns of 16-bit experts with zeros
    up to whole blocks of the kernels. Source: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py
    ::CPUUnquantizedExperts._pad_moe_intermediate@v0.32.0.

    Args:
        tensor: number of ranks that share each expert's columns.
        scale: bytes of the engine's element type per byte of the checkpoint, for unquantized weights.
        element_bytes: size of the engine's element type.
    """
    growth = kind.quantized_bytes * (packed_ratio(profile.scheme, element_bytes) - 1)
    columns = Fraction(kind.columns, tensor)
    if kind.experts_quantized:
        # Our kernels compute the experts of ranks that hold whole layers, vLLM's those of other ranks.
        scheme = profile.scheme_of_experts
        ratio = packed_ratio(scheme, element_bytes) if tensor == 1 else packed_ratio_for_amx(scheme)
        growth += kind.routed_bytes * (ratio - 1)
    elif kind.experts and columns:
        padded_ratio = ceil(columns / KERNEL_BLOCK) * KERNEL_BLOCK / columns
        growth += kind.routed_bytes * (padded_ratio - 1) * scale
    return growth


def packing_copy_bytes(profile: ModelProfile, kind: LayerKind, scale: Fraction) -> Fraction:
    """Returns the bytes that all ranks of a CPU stage need for copies while they pack a layer.

    Experts need a second copy, because vLLM packs both of their tensors before it frees the unpacked ones. An
    MLP needs a second copy of gate and up only, which are one tensor. Experts of 0.75 GiB took 0.75 GiB more,
    an MLP of 0.66 GiB took 0.4 GiB more (bf16, 2 cores of an EPYC, 2026-11-25). Weights of 4 bits need
    several copies.

    Args:
        scale: bytes of the engine's element type per byte of the checkpoint, for unquantized weights.
    """
    # For a format without an entry, vLLM copies no linear layers, and experts once.
    num_linear_copies = _PACKING_COPIES.get(profile.scheme.name, 0)
    num_expert_copies = _PACKING_COPIES.get(profile.scheme_of_experts.name, 1)
    linear_bytes = num_linear_copies * kind.quantized_bytes
    # Unquantized experts have one copy, in the engine's element type.
    expert_bytes = kind.routed_bytes * (Fraction(num_expert_copies) if kind.experts_quantized else scale)
    # Copies of quantized linear layers already include those of the MLP.
    mlp_bytes = Fraction(0) if linear_bytes else _GATE_AND_UP_SHARE * kind.mlp_bytes * scale
    return max(linear_bytes + expert_bytes, mlp_bytes)
