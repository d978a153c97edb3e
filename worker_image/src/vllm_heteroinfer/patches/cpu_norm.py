"""The patch `cpu_norm`: eager CPU ranks compute an RMS norm of bf16 rows in one call of our kernels.

Our kernels round like vLLM's operation for CPUs, but add up squares in another order. vLLM's own function
still serves other types and shapes, norms without a weight or over part of a row, compiled models, and ranks
whose user chose the implementation of norms (`--ir-op-priority`). Imports vLLM.
Source: vllm/model_executor/layers/layernorm.py::RMSNorm.forward_native@v0.32.0.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from vllm import ir

from vllm_heteroinfer.kernels import linear, norms
from vllm_heteroinfer.kernels.library import KernelLibrary
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.patches.registry import CPU_NORM
from vllm_heteroinfer.patches.replacing import replace

Normed: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def install() -> None:
    """Replaces vLLM's RMS norm in this process.

    Does nothing if HETEROINFER_CPU_LINEAR=onednn, or if this CPU cannot run our kernels.
    """
    library = linear.find() if is_wanted(os.environ) else None
    if library is not None:
        replace(CPU_NORM, partial(_with_our_norms, library))


def _with_our_norms(library: KernelLibrary, original: Callable[..., Normed]) -> Callable[..., Normed]:
    """Returns a forward_native() that calls our kernels if they support the norm, else vLLM's `original`."""
    norm_operation, add_and_norm_operation = ir.ops.rms_norm, ir.ops.fused_add_rms_norm

    def forward_native(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """Returns the norm of x. With a residual, returns the norm of x + residual, and this sum."""
        operation = norm_operation if residual is None else add_and_norm_operation
        if torch.compiler.is_compiling() or not _can_replace(self, operation):
            return original(self, x, residual)
        weight = self._parameters["weight"]
        if residual is None:
            if not norms.supports_norm(x, weight):
                return original(self, x)
            return norms.norm(library, x, weight, self.variance_epsilon)
        if not norms.supports_add_and_norm(x, residual, weight):
            return original(self, x, residual)
        norms.add_and_norm(library, x, residual, weight, self.variance_epsilon)
        return x, residual

    return forward_native


def _can_replace(norm: Any, operation: Any) -> bool:
    """Returns whether our kernels may compute a norm.

    The norm must have a weight and cover whole rows, and the user must not have chosen another implementation
    of `operation`.
    """
    has_weight = norm.has_weight and norm.pass_weight and norm.pass_weight_add
    if not has_weight or norm.variance_size_override is not None:
        return False
    implementations = operation._priority_impls
    return bool(implementations) and implementations[0].provider == norms.PROVIDER
