"""The patch `cpu_rope`: works around two bugs of vLLM's rotary embedding on CPUs.

1. If a tensor has a dimension of heads (tokens, heads, size), vLLM's CPU kernel takes the stride between
heads
   for the stride between tokens. So a token gets the positions of other tokens, without an error. Multi-head
   latent attention (MLA) uses this shape, unless YaRN scales its positions as in DeepSeek's models.
2. In bf16 the kernel crashes (SIGSEGV) if it rotates more than 8 pairs of elements and the number of pairs is
   not a multiple of 8. An example is StableLM, which rotates the first quarter of heads of size 80.

Only eager models call the replaced function, and CPU ranks are eager. Imports vLLM.
Source: vllm/model_executor/layers/rotary_embedding/base.py::RotaryEmbedding.forward_cpu@v0.32.0; a caller
with the axis of heads is vllm/model_executor/layers/mla.py.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from vllm_heteroinfer.patches.registry import CPU_ROPE
from vllm_heteroinfer.patches.replacing import replace

_VECTOR: Final = 8
"""Number of pairs that vLLM's kernel rotates at the same time in bf16."""


def install() -> None:
    """Replaces vLLM's rotary embedding for CPUs in this process."""
    replace(CPU_ROPE, _with_correct_rotation)


def _with_correct_rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward_cpu() that calls vLLM's `original` only for shapes without these bugs."""

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates query and key by the angles of their positions."""
        dim_with_heads = positions.dim() + 2  # the dimensions of positions, heads and size
        has_heads = query.dim() >= dim_with_heads or (key is not None and key.dim() >= dim_with_heads)
        num_pairs = self.rotary_dim // 2
        may_crash = self.is_neox_style and query.dtype is torch.bfloat16 and num_pairs % _VECTOR != 0
        rotated: tuple[torch.Tensor, torch.Tensor | None]
        if has_heads or may_crash:
            rotated = self.forward_native(positions, query, key)
        else:
            rotated = original(self, positions, query, key)
        return rotated

    return forward_cpu
