"""RMS norms of bf16 rows in one call each, without torch's dispatcher. Imports torch, not vLLM."""

from typing import Final

import torch

from vllm_heteroinfer.kernels.library import KernelLibrary

PROVIDER: Final = "vllm_cpu"
"""vLLM's name for the implementation of norms that eager CPU ranks use by default."""
_VECTOR: Final = 32
"""The kernels compute this number of elements at the same time, so a row must have a multiple."""
_MAX_AXES: Final = 3
"""Maximum number of axes: tokens, heads and elements."""


def supports_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether `norm` supports x and weight: contiguous bf16 on the CPU, a weight for each element."""
    return (
        x.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and 1 < x.ndim <= _MAX_AXES
        and x.device.type == "cpu"
        and x.shape[-1] == weight.shape[0]
        and x.shape[-1] % _VECTOR == 0
        and x.stride(-1) == 1
        and weight.is_contiguous()
    )


def norm(library: KernelLibrary, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x²) + epsilon) * weight over the last axis: contiguous, rounded once."""
    out = x.new_empty(x.shape)
    tokens, *heads, size = x.shape
    strides = x.stride()
    num_heads, head_stride = (heads[0], strides[1]) if heads else (1, 0)  # without an axis of heads: one head
    library.calls.heteroinfer_norm(
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        tokens,
        strides[0],
        num_heads,
        head_stride,
        size,
        epsilon,
    )
    return out


def supports_add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether `add_and_norm` supports these tensors."""
    return (
        residual.dtype is torch.bfloat16
        and residual.shape == x.shape
        and x.is_contiguous()
        and residual.is_contiguous()
        and supports_norm(x, weight)
    )


def add_and_norm(
    library: KernelLibrary, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Writes x + residual into the residual, and the norm of this sum into x."""
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    library.calls.heteroinfer_add_and_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, size, epsilon
    )
