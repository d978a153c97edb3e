"""Routed experts of a mixture in bf16: each chosen expert is read once. Imports torch, not vLLM."""

from typing import Final

import torch

from vllm_heteroinfer.kernels.library import KernelLibrary

BLOCK: Final = 32
"""Columns of a block, and inputs of a unit: both sizes of an expert are multiples of it."""
MOST_CHOICES: Final = 256
"""Experts of a row."""


def pack_experts(library: KernelLibrary, weight: torch.Tensor, *, gates: bool) -> torch.Tensor:
    """Returns the weights of all experts as `experts` reads them.

    Args:
        library: the kernels.
        weight: [experts, n, k], bf16, cpu, contiguous; n and k multiples of 32. Of w13 the gates come first.
        gates: whether this is w13: its blocks become gate and up in turn.

    Returns:
        [experts, n, k], bf16: each expert's bytes as [n / 32, k / 2, 32, 2].

    Raises:
        ValueError: another shape or dtype.
    """
    multiple = 2 * BLOCK if gates else BLOCK
    if (
        weight.ndim != 3
        or weight.dtype != torch.bfloat16
        or weight.shape[1] % multiple
        or weight.shape[2] % BLOCK
    ):
        raise ValueError(
            f"got expert weights {tuple(weight.shape)} {weight.dtype}, expected [experts, n, k] bf16, "
            f"n a multiple of {multiple} and k of {BLOCK}"
        )
    count, columns, inputs = weight.shape
    packed = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for expert in range(count):
        own = weight[expert]
        if gates:
            own = own.view(2, columns // multiple, BLOCK, inputs).transpose(0, 1)
        own = own.reshape(columns, inputs).contiguous()
        library.calls.heteroinfer_pack(packed[expert].data_ptr(), own.data_ptr(), inputs, columns, inputs)
    return packed


def experts(
    library: KernelLibrary,
    y: torch.Tensor,
    x: torch.Tensor,
    *,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Writes each row's weighted sum of its experts, SwiGLU with SiLU, into y; sums are float32.

    Args:
        library: the kernels.
        y: [m, hidden], bf16, rows contiguous; may not share memory with x.
        x: [m, hidden], bf16, rows contiguous.
        w13: packed, [experts, 2 * inner, hidden].
        w2: packed, [experts, hidden, inner].
        weights: [m, topk], float32, contiguous.
        ids: [m, topk], int32, contiguous; one that is no expert counts nothing.

    Raises:
        ValueError: a shape or dtype is another.
    """
    m, topk = ids.shape
    count, hidden, inner = w2.shape
    right = (
        x.shape == y.shape == (m, hidden)
        and weights.shape == ids.shape
        and topk <= MOST_CHOICES
        and w13.shape == (count, 2 * inner, hidden)
        and x.dtype == y.dtype == w13.dtype == w2.dtype == torch.bfloat16
        and (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        and x.stride(1) == y.stride(1) == 1
        and all(tensor.is_contiguous() for tensor in (w13, w2, weights, ids))
    )
    if not right:
        raise ValueError(
            f"got x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)}, w13 {tuple(w13.shape)}, "
            f"w2 {tuple(w2.shape)}, "
            f"weights {tuple(weights.shape)} {weights.dtype}, ids {tuple(ids.shape)} {ids.dtype}; "
            "expected what experts() says"
        )
    library.calls.heteroinfer_experts(
        *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), w13.data_ptr(), w2.data_ptr()),
        *(weights.data_ptr(), ids.data_ptr(), m, topk, count, hidden, inner),
    )
