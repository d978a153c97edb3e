"""Sizes of weights in the form of CPU kernels, and the additional memory while weights are packed.

CPU stages and feed-forward ranks are counted with these sizes. Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.column_shares import KERNEL_BLOCK
from heteroinfer_contract.model import LayerKind, Scheme, SchemeName

_BLOCK: Final = 128
"""Weights per block of an output in kernels for AMX; each block has a sum of 4 bytes. A smaller group is one
block."""
_ZERO_POINT: Final[Mapping[SchemeName, Fraction]] = MappingProxyType(
    {SchemeName.AWQ: Fraction(1, 2), SchemeName.GPTQ: Fraction(1, 2), SchemeName.INT4: Fraction(0)}
)
"""Bytes of a group's zero point in the checkpoint: AWQ and GPTQ always store one, int4 may have none."""
_COPIES: Final[Mapping[SchemeName, int]] = MappingProxyType(
    {SchemeName.AWQ: 2, SchemeName.INT4: 2, SchemeName.GPTQ: 3}
)
"""Additional copies of a layer while it is packed: up to 1.9, for experts in GPTQ up to 2.9
(patches/cpu_packing.py; 150 to 300 MiB per layer, 2 cores of an EPYC, 2026-11-24 and 2026-11-25)."""

_GATE_AND_UP: Final = Fraction(2, 3)
"""Share of an MLP's bytes in its gate and up projections."""


class WeightKernels(StrEnum):
    """The kernels that compute a rank's quantized layers; they determine the form of the weights."""

    GPU = "GPU"
    AVX512 = "AVX-512"
    """Kernels of CPUs without AMX."""
    AMX = "AMX"


def packed_part(scheme: Scheme, kernels: WeightKernels = WeightKernels.AMX) -> Fraction:
    """Returns the packed size of quantized weights relative to the checkpoint; 1 for other formats.

    For AMX a group has its values, a sum of 4 bytes per block, a scale of 4 bytes instead of 2, and a zero
    point of one byte. int4 grows to 1.106 with groups of 128 and 1.389 with groups of 32, AWQ and GPTQ to
    1.098 and 1.351, in linear layers and in experts. One scale for a whole output counts as one per 128
    weights and gives 1.064. For AVX-512 linear layers have the same bytes in another order; GPTQ loses its
    zero points: 0.992 and 0.973. AVX-512 has no kernels for experts. Measured with vLLM's own functions, with
    groups of 16 to 256, on an EPYC without AMX, where they also pack for AMX (2026-11-25).
    Source: vllm/model_executor/kernels/linear/mixed_precision/cpu.py::CPUWNA16LinearKernel@v0.32.0,
    vllm/model_executor/layers/fused_moe/oracle/int_wna16.py::_process_weights_cpu@v0.32.0.
    """
    zero_point = _ZERO_POINT.get(scheme.name)
    if zero_point is None or kernels is WeightKernels.GPU:
        return Fraction(1)
    group = scheme.group or _BLOCK
    values = Fraction(group, 2)
    stored = values + 2 + zero_point
    if kernels is WeightKernels.AMX:
        packed = values + 4 * -(-group // _BLOCK) + 4 + 1
    else:
        packed = stored - zero_point * (scheme.name is SchemeName.GPTQ)
    return packed / stored


def filled_part(kind: LayerKind, tensor: int = 1) -> Fraction:
    """Returns the size of a layer's 16-bit routed experts in kernels, relative to the checkpoint.

    vLLM fills the columns with zeros up to whole blocks of the kernels.
    Source: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py
    ::CPUUnquantizedExperts._pad_moe_intermediate@v0.32.0.

    Args:
        kind: kind of the layer; the result is 1 if its experts are quantized, or if it has no experts.
        tensor: ranks that share each expert's columns.
    """
    columns = Fraction(kind.columns, tensor)
    if not (kind.experts and columns) or kind.experts_quantized:
        return Fraction(1)
    return ceil(columns / KERNEL_BLOCK) * KERNEL_BLOCK / columns


def packing_copies(scheme: Scheme) -> int:
    """Returns the additional copies of a layer's quantized bytes while it is packed; 1 for other formats."""
    return _COPIES.get(scheme.name, 1)


def bytes_beside(kind: LayerKind, scheme: Scheme, scale: Fraction) -> Fraction:
    """Returns the most additional bytes while a layer's weights that are not in 4 bits are packed.

    Experts need a second copy, because vLLM replaces both their tensors before it frees the first. An MLP
    needs a second copy of gate and up, which are one tensor. Experts of 0.75 GiB took 0.75 GiB more, an MLP
    of 0.66 GiB took 0.4 GiB more (bf16, 2 cores of an EPYC, 2026-11-25).

    Args:
        scale: bytes of the engine's element type per byte of the checkpoint, for plain weights.
    """
    in_four_bits = scheme.name in _ZERO_POINT
    experts = 0 if kind.experts_quantized and in_four_bits else kind.routed_bytes
    mlp = 0 if kind.quantized_bytes and in_four_bits else kind.mlp_bytes
    of_experts = experts * (Fraction(1) if kind.experts_quantized else scale)
    return max(of_experts, _GATE_AND_UP * mlp * scale)
