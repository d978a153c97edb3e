"""Draws FP8 weights with a scale for each block of 128 x 128, and widens them. Imports torch."""

import torch

from vllm_heteroinfer.kernels.experts import FP8, SCALED


def draw_fp8(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Draws FP8 numbers of all sizes, including denormal ones, without NaN."""
    codes = torch.randint(0, 254, shape, generator=draw, dtype=torch.uint8)
    return (codes + (codes >= 127)).view(FP8)


def draw_scales(draw: torch.Generator, experts: int, columns: int, inputs: int) -> torch.Tensor:
    """Draws scales for weights [experts, columns, inputs]. Products are about as large as their row."""
    scales = torch.rand(experts, -(-columns // SCALED), -(-inputs // SCALED), generator=draw) + 0.1
    return scales * inputs**-0.5 / 100


def widen_experts(
    w13: torch.Tensor, w2: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns w13 and w2 of all experts in float64, multiplied by their scales. w13 has gates, then ups."""
    of_w13, of_w2 = scales
    halves = zip(w13.chunk(2, 1), of_w13.chunk(2, 1), strict=True)
    return [torch.cat([_widen(*half) for half in halves], 1), _widen(w2, of_w2)]


def _widen(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.double().repeat_interleave(SCALED, 1).repeat_interleave(SCALED, 2)
    return weight.double() * wide[:, : weight.shape[1], : weight.shape[2]]
