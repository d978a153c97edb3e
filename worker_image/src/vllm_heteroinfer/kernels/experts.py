"""Routed experts of a mixture in bf16 or FP8: each chosen expert is read once. Imports torch, not vLLM.

w13 is vLLM's name for an expert's gates and ups, and w2 for its projection back to the hidden size.
"""

from dataclasses import dataclass
from typing import Final

import torch

from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.library import KernelLibrary

BLOCK: Final = 32
"""Columns of a block, and inputs of a unit. An expert must have whole blocks and units."""
MAX_CHOICES: Final = 256
"""Maximum number of experts for each row."""
FP8: Final = torch.float8_e4m3fn
SCALED: Final = 128
"""Number of columns, and of inputs, that share a scale in FP8 weights."""


def pack_experts(library: KernelLibrary, weight: torch.Tensor, *, gates: bool) -> torch.Tensor:
    """Packs the weights of all experts for `experts`.

    Args:
        weight: [experts, n, k] (n columns, k inputs), bf16 or float8_e4m3fn, on the CPU, contiguous; n and k
            multiples of 32. In w13, the gates come before the ups.
        gates: whether this is w13. In the result, its blocks of gates and of ups alternate.

    Returns:
        [experts, n, k] of the weight's dtype. The elements of each expert are [n / 32, k / 2, 32, 2]. In FP8,
        `source/linear.h` has the order of the last two dimensions.

    Raises:
        ValueError: the shape or dtype differs.
    """
    multiple = 2 * BLOCK if gates else BLOCK
    if not can_pack(weight, gates=gates):
        raise ValueError(
            f"expert weights must be [experts, n, k] bf16 or float8_e4m3fn, n a multiple of {multiple} and k "
            f"a multiple of {BLOCK} (got {tuple(weight.shape)} {weight.dtype})"
        )
    packed = weight_memory.empty(weight.shape, weight.dtype)
    library.calls.heteroinfer_ask_for_huge_pages(packed.data_ptr(), packed.nbytes)
    for expert in range(len(weight)):
        pack_expert(library, packed[expert], weight[expert], gates=gates)
    return packed


def pack_expert(library: KernelLibrary, out: torch.Tensor, weight: torch.Tensor, *, gates: bool) -> None:
    """Packs the weight of one expert into `out`; see `pack_experts`.

    Args:
        out: [n, k], contiguous.
        weight: [n, k] of the same dtype.
    """
    calls = library.calls
    call = calls.heteroinfer_pack_fp8 if weight.dtype == FP8 else calls.heteroinfer_pack
    columns, inputs = weight.shape
    if gates:  # from all gates, then all ups, to alternating blocks
        weight = weight.view(2, columns // (2 * BLOCK), BLOCK, inputs).transpose(0, 1)
    rows = weight.reshape(columns, inputs).contiguous()
    call(out.data_ptr(), rows.data_ptr(), inputs, columns, inputs)


def can_pack(weight: torch.Tensor, *, gates: bool) -> bool:
    """Returns whether `pack_experts` supports a weight.

    Args:
        gates: whether this is w13.
    """
    return (
        weight.ndim == 3
        and weight.dtype in {torch.bfloat16, FP8}
        and weight.shape[1] % (2 * BLOCK if gates else BLOCK) == 0
        and weight.shape[2] % BLOCK == 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The packed weights of a layer's experts.

    Attributes:
        w13: packed, [experts, 2 * inner, hidden], bf16 or FP8.
        w2: packed, [experts, hidden, inner], of the same dtype.
        scales: scales of FP8 weights, float32, contiguous; None for bf16. The scales of w13 are
            [experts, 2 * ceil(inner / 128), ceil(hidden / 128)], gates first. The scales of w2 are
            [experts, ceil(hidden / 128), ceil(inner / 128)].

    Raises:
        ValueError: a shape or dtype differs.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        """Checks shapes and dtypes, because the kernel reads raw pointers."""
        num_experts, hidden, inner = self.w2.shape
        has_valid_weights = (
            self.w13.shape == (num_experts, 2 * inner, hidden)
            and self.w13.dtype == self.w2.dtype == (FP8 if self.scales else torch.bfloat16)
            and self.w13.is_contiguous()
            and self.w2.is_contiguous()
        )
        if not has_valid_weights or not self._has_valid_scales():
            raise ValueError(
                "packed experts must be contiguous w13 [experts, 2 * inner, hidden] and w2 [experts, hidden, "
                "inner] in bf16, or in float8_e4m3fn with float32 scales "
                f"(got w13 {tuple(self.w13.shape)} {self.w13.dtype}, "
                f"w2 {tuple(self.w2.shape)} {self.w2.dtype}, "
                f"scales {[(tuple(scale.shape), scale.dtype) for scale in self.scales or ()]})"
            )

    def _has_valid_scales(self) -> bool:
        """Returns whether the scales fit the weights, or there are none."""
        if not self.scales:
            return True
        num_experts, hidden, inner = self.w2.shape
        hidden_blocks, inner_blocks = -(-hidden // SCALED), -(-inner // SCALED)
        w13_scales, w2_scales = self.scales
        return (
            w13_scales.shape == (num_experts, 2 * inner_blocks, hidden_blocks)
            and w2_scales.shape == (num_experts, hidden_blocks, inner_blocks)
            and w13_scales.dtype == w2_scales.dtype == torch.float32
            and w13_scales.is_contiguous()
            and w2_scales.is_contiguous()
        )


def experts(
    library: KernelLibrary,
    y: torch.Tensor,
    x: torch.Tensor,
    packed: PackedExperts,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Writes each row's weighted sum of its experts (SwiGLU with SiLU) into y. Sums are in float32.

    Args:
        y: [m, hidden], bf16, rows contiguous; must not share memory with x.
        x: [m, hidden], bf16, rows contiguous.
        weights: [m, topk], float32, contiguous.
        ids: [m, topk], int32, contiguous; an id that is not an expert adds nothing.

    Raises:
        ValueError: a shape or dtype differs.
    """
    rows, topk = ids.shape
    num_experts, hidden, inner = packed.w2.shape
    is_valid = (
        x.shape == y.shape == (rows, hidden)
        and weights.shape == ids.shape
        and topk <= MAX_CHOICES
        and x.dtype == y.dtype == torch.bfloat16
        and (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        and x.stride(1) == y.stride(1) == 1
        and weights.is_contiguous()
        and ids.is_contiguous()
    )
    if not is_valid:
        raise ValueError(
            f"experts: x and y must be [{rows}, {hidden}] bf16 with contiguous rows. weights (float32) "
            f"and ids (int32) must be contiguous and have one shape, [{rows}, at most {MAX_CHOICES}] "
            f"(got x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}, "
            f"weights {tuple(weights.shape)} {weights.dtype}, ids {tuple(ids.shape)} {ids.dtype}; strides "
            f"{x.stride()}, {y.stride()}, {weights.stride()}, {ids.stride()})"
        )
    scales13, scales2 = (scale.data_ptr() for scale in packed.scales) if packed.scales else (None, None)
    library.calls.heteroinfer_experts(
        y.data_ptr(),
        y.stride(0),
        x.data_ptr(),
        x.stride(0),
        packed.w13.data_ptr(),
        packed.w2.data_ptr(),
        scales13,
        scales2,
        weights.data_ptr(),
        ids.data_ptr(),
        rows,
        topk,
        num_experts,
        hidden,
        inner,
    )
