"""The patch `cpu_experts`: bf16 experts of a CPU rank are packed for, and computed by, our kernels.

What the kernels don't take (biases, other activations, sizes that are no multiple of 32) stays vLLM's.
Imports vLLM.
Source: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py::CPUUnquantizedExperts@v0.32.0.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import replace_parameter

from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.experts import BLOCK, experts, pack_experts
from vllm_heteroinfer.kernels.library import KernelLibrary, KernelsUnavailableError
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.patches.registry import CPU_EXPERTS_APPLY, CPU_EXPERTS_PACKING
from vllm_heteroinfer.patches.replacing import replace, restore

_logger = logging.getLogger(__name__)
_LIBRARY: Final = "heteroinfer_library"
"""Attribute of vLLM's object for a layer's experts, where these are packed by us."""


def install() -> None:
    """Hands this process's bf16 experts to our kernels from now on, unless the user chose vLLM's.

    To be called in a CPU rank before it loads its model; twice is a no-op.

    Raises:
        ContractError: HETEROINFER_CPU_LINEAR is neither `auto` nor `onednn`.
        PatchError: this vLLM is another one than the patch was written for.
    """
    if is_wanted(os.environ):
        replace(CPU_EXPERTS_PACKING, _packing)
        replace(CPU_EXPERTS_APPLY, _applying)


def revert() -> None:
    """Puts vLLM's own functions back; a no-op where the patch is not applied."""
    restore(CPU_EXPERTS_PACKING)
    restore(CPU_EXPERTS_APPLY)


def library_of(vllm_experts: Any) -> KernelLibrary | None:
    """Returns the kernels that a layer's experts are packed for; None if they are vLLM's."""
    found: KernelLibrary | None = getattr(vllm_experts, _LIBRARY, None)
    return found


def _packing(original: Callable[[Any, torch.nn.Module], None]) -> Callable[[Any, torch.nn.Module], None]:
    said: list[KernelLibrary] = []

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        library = _taking(self, layer)
        if library is None:
            original(self, layer)
            return
        self._pad_moe_intermediate(layer)
        for name, gates in (("w13_weight", True), ("w2_weight", False)):
            replace_parameter(layer, name, pack_experts(library, getattr(layer, name).data, gates=gates))
        setattr(self, _LIBRARY, library)
        if not said:
            said.append(library)
            _logger.info("CPU experts: HeteroInfer's bf16 kernels (%s)", ", ".join(library.paths))

    return process_weights_after_loading


def _applying(original: Callable[..., None]) -> Callable[..., None]:
    def apply(self: Any, **named: Any) -> None:
        library = library_of(self)
        if library is None:
            original(self, **named)
            return
        experts(
            library,
            named["output"],
            named["hidden_states"].contiguous(),
            w13=named["w1"],
            w2=named["w2"],
            weights=_weights(**named),
            ids=named["topk_ids"].to(torch.int32).contiguous(),
        )

    return apply


def _weights(*, topk_weights: torch.Tensor, apply_router_weight_on_input: bool, **_: Any) -> torch.Tensor:
    if apply_router_weight_on_input:  # to `hidden_states`, which has them already
        return torch.ones(topk_weights.shape)
    return topk_weights.float().contiguous()


def _taking(vllm_experts: Any, layer: Any) -> KernelLibrary | None:
    """Returns the kernels if they can compute these experts."""
    weight, config = layer.w13_weight, vllm_experts.moe_config
    if (
        weight.dtype != torch.bfloat16
        or weight.device.type != "cpu"
        or vllm_experts.w1_bias is not None
        or vllm_experts.w2_bias is not None
        or config.activation != MoEActivation.SILU
        or weight.shape[2] % BLOCK
    ):
        return None
    try:
        return linear.prepare()
    except KernelsUnavailableError:
        return None  # said by the linear layers
