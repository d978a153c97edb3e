"""Weights as kernels of CPUs have them: in 4 bits their bytes once packed, and what lies beside meanwhile.

Stages on CPUs and feed-forward ranks are counted by it. Pure.
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
"""Weights of an output that kernels for AMX have in a block, with a sum of 4 bytes; a smaller group is one
block."""
_ZERO_POINT: Final[Mapping[SchemeName, Fraction]] = MappingProxyType(
    {SchemeName.AWQ: Fraction(1, 2), SchemeName.GPTQ: Fraction(1, 2), SchemeName.INT4: Fraction(0)}
)
"""Bytes of a group's zero point in the checkpoint: AWQ and GPTQ always store one, int4 may have none."""
_COPIES: Final[Mapping[SchemeName, int]] = MappingProxyType(
    {SchemeName.AWQ: 2, SchemeName.INT4: 2, SchemeName.GPTQ: 3}
)
"""Of a layer's bytes, what is beside it at most while it is packed: up to 1.9, of experts in GPTQ up to 2.9
(patches/cpu_packing.py; 150 to 300 MiB a layer, 2 cores of an EPYC, 2026-11-24 and 2026-11-25)."""

_GATE_AND_UP: Final = Fraction(2, 3)
"""Of an MLP."""


class WeightKernels(StrEnum):
    """Whose kernels compute a rank's quantized layers, and so in which form it has them."""

    GPU = "GPU"
    AVX512 = "AVX-512"
    """Of CPUs without AMX."""
    AMX = "AMX"


def packed_part(scheme: Scheme, kernels: WeightKernels = WeightKernels.AMX) -> Fraction:
    """Returns the bytes of quantized weights as kernels have them, of the checkpoint's; 1 in other formats.

    For AMX a group has its values, a sum of 4 bytes for each block of it, a scale of 4 bytes in place of 2,
    and a byte of zero point: of int4 1.106 with groups of 128 and 1.389 with groups of 32, of AWQ and GPTQ
    1.098 and 1.351, in linear layers and experts alike. One scale for a whole output is taken for one for 128
    weights, and has 1.064. For AVX-512 linear layers have the same bytes in another order, of GPTQ without
    zero points: 0.992 and 0.973; there are no experts. Measured by vLLM's own functions, with groups of 16 to
    256, on an EPYC without AMX, where they pack for it all the same (2026-11-25).
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
    """Returns the bytes of a layer's routed experts in 16 bits as kernels have them, of the checkpoint's.

    Columns are filled up with zeros to whole blocks of the kernels.
    Source: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py
    ::CPUUnquantizedExperts._pad_moe_intermediate@v0.32.0.

    Args:
        kind: of the layer; 1 for one whose experts are quantized, or that has none.
        tensor: ranks that share each expert's columns.
    """
    columns = Fraction(kind.columns, tensor)
    if not (kind.experts and columns) or kind.experts_quantized:
        return Fraction(1)
    return ceil(columns / KERNEL_BLOCK) * KERNEL_BLOCK / columns


def packing_copies(scheme: Scheme) -> int:
    """Returns how often a layer's quantized bytes lie beside it while it is packed; 1 in other formats."""
    return _COPIES.get(scheme.name, 1)


def bytes_beside(kind: LayerKind, scheme: Scheme, scale: Fraction) -> Fraction:
    """Returns what lies beside a layer at most while weights of it are packed that are not in 4 bits.

    All its experts once more, since both their tensors are replaced before the first of them goes; of an MLP
    gate and up, which are one tensor. Of experts of 0.75 GiB 0.75 GiB, of an MLP of 0.66 GiB 0.4 (bf16, 2
    cores of an EPYC, 2026-11-25).

    Args:
        scale: bytes of the engine's element type for one byte of the checkpoint, of plain weights.
    """
    in_four_bits = scheme.name in _ZERO_POINT
    experts = 0 if kind.experts_quantized and in_four_bits else kind.routed_bytes
    mlp = 0 if kind.quantized_bytes and in_four_bits else kind.mlp_bytes
    of_experts = experts * (Fraction(1) if kind.experts_quantized else scale)
    return max(of_experts, _GATE_AND_UP * mlp * scale)
