"""The patch `cpu_rope`: rotary embeddings of CPU ranks are right for every shape, and end no process.

vLLM's operation for CPUs takes the distance between two heads for the one between two tokens where both axes
are there: with (tokens, heads, size) a token is turned by angles of others, without an error. Attention over
latents asks so, unless its positions are scaled by YaRN as DeepSeek's are. And in bf16 it ends the process
(SIGSEGV) where more than 8 pairs of elements are turned and their number is no multiple of 8: StableLM, whose
heads of 80 are turned in their first quarter. Compiled models do not call it; CPU ranks are eager.
Imports vLLM.
Source: vllm/model_executor/layers/rotary_embedding/base.py::RotaryEmbedding.forward_cpu@v0.32.0; who asks:
vllm/model_executor/layers/mla.py.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from vllm_heteroinfer.patches.registry import CPU_ROPE
from vllm_heteroinfer.patches.replacing import replace

_VECTOR: Final = 8
"""Pairs that vLLM's operation turns at once in bf16."""


def install() -> None:
    """Has this process's rotary embeddings computed so from now on."""
    replace(CPU_ROPE, _rotating)


def _rotating(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with_heads = positions.dim() + 2
        unaligned = self.is_neox_style and query.dtype is torch.bfloat16 and self.rotary_dim // 2 % _VECTOR
        if not unaligned and query.dim() < with_heads and (key is None or key.dim() < with_heads):
            rotated: tuple[torch.Tensor, torch.Tensor | None] = original(self, positions, query, key)
        else:
            rotated = self.forward_native(positions, query, key)
        return rotated

    return forward_cpu
