"""RMS norms of eager CPU ranks: registers vLLM's CPU operations in vLLM's own registry. Imports vLLM.

For CPUs the registry contains only `native`, which runs nine operations of torch for a norm if the model is
not compiled. Without AVX512-BF16, vLLM's CPU operations cut float32 off to bf16 instead of rounding it, so
`native` computes bf16 rows on such CPUs. Source: vllm/ir/ops/layernorm.py, vllm/kernels/vllm_c.py,
csrc/cpu/cpu_types_x86.hpp::BF16Vec8@v0.32.0.
"""

import functools
from typing import Final

import torch
from vllm import ir

from vllm_heteroinfer.kernels.norms import PROVIDER

_VECTOR: Final = 32
"""Rows must be a multiple of 32 elements, because the operations read whole vectors (of 8 or 16 elements)."""


def _supports_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Returns whether our `rms_norm` supports these arguments: a norm over whole rows, with a weight."""
    return variance_size is None and _supports_rows(x, weight)


def _supports_add_and_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Returns whether our `fused_add_rms_norm`, which writes to both inputs, supports these arguments."""
    can_write = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return can_write and variance_size is None and _supports_rows(x, weight)


def _supports_rows(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Returns whether vLLM's CPU operations can read these rows in whole vectors, and round them correctly.

    The weight must have the dtype of the rows.
    """
    fits = weight is not None and weight.dtype == x.dtype and x.shape[-1] % _VECTOR == 0
    rounds_correctly = x.dtype is not torch.bfloat16 or _rounds_bf16()
    return fits and rounds_correctly


@functools.cache
def _rounds_bf16() -> bool:
    """Whether vLLM's CPU operations round bf16 results to the nearest number on this CPU."""
    return torch.cpu._is_avx512_bf16_supported()


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supports_norm)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Returns x / sqrt(mean(x²) + epsilon) * weight, over the last axis, rounded once."""
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_supports_add_and_norm, inplace=True)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the norm of x + x_residual to x, and the sum itself to x_residual. Returns both."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
