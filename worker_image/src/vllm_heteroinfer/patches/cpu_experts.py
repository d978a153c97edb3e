"""The patch `cpu_experts`: our kernels pack and compute bf16 and FP8 experts of a CPU rank.

vLLM still computes experts that our kernels do not support: experts with biases or other activations, and
experts whose sizes are not multiples of 32. Imports vLLM.
Source: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py::CPUUnquantizedExperts@v0.32.0,
::CPUExpertsFp8 (only blocks of 128 x 128 and SiLU).
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import replace_parameter

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.experts import BLOCK, FP8, PackedExperts, can_pack, experts, pack_experts
from vllm_heteroinfer.kernels.library import KernelLibrary
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.patches.registry import (
    CPU_EXPERTS_APPLY,
    CPU_EXPERTS_PACKING,
    CPU_FP8_EXPERTS_APPLY,
    CPU_FP8_EXPERTS_PACKING,
)
from vllm_heteroinfer.patches.replacing import replace

_logger = logging.getLogger(__name__)
_LIBRARY: Final = "heteroinfer_library"
"""Attribute of weights that our kernels packed. `replace_parameter` copies it to the new parameter."""


def install() -> None:
    """Replaces vLLM's packing and computing of bf16 and FP8 experts in this process.

    Does nothing if HETEROINFER_CPU_LINEAR=onednn, because this setting is for experts, too.
    """
    if is_wanted(os.environ):
        logged: set[torch.dtype] = set()  # use of our kernels is logged once for each type
        replace(CPU_EXPERTS_PACKING, partial(_with_our_bf16_packing, logged))
        replace(CPU_FP8_EXPERTS_PACKING, partial(_with_our_fp8_packing, logged))
        replace(CPU_EXPERTS_APPLY, _with_our_computation)
        replace(CPU_FP8_EXPERTS_APPLY, _with_our_computation)


def library_of(layer: Any) -> KernelLibrary | None:
    """Returns the kernels for which a layer's routed experts are packed; None if vLLM computes them."""
    return _find_packing_library(getattr(layer, "w13_weight", None))


def packed_experts(vllm_experts: Any, w13: torch.Tensor, w2: torch.Tensor) -> PackedExperts:
    """Returns a layer's packed weights together with the scales from vLLM's experts object.

    Raises:
        ValueError: weights and scales do not fit together.
    """
    w13_scales, w2_scales = vllm_experts.w1_scale, vllm_experts.w2_scale
    scales = None if w13_scales is None else (w13_scales, w2_scales)
    return PackedExperts(w13=w13, w2=w2, scales=scales)


def check_limit(vllm_experts: Any) -> None:
    """Raises ContractError if the model limits its experts' activations (`swiglu_limits`).

    No CPU kernel for bf16 or FP8 applies the limit. vLLM's own class for CPUs ignores the limit without an
    error, although config.py::FusedMoEConfig@v0.32.0 promises an error.
    """
    limit = getattr(vllm_experts.moe_config, "swiglu_limit", None)
    if limit:
        raise ContractError(
            f"config.json: the experts' activations are limited to {limit} (swiglu_limits), but CPU kernels "
            "ignore the limit. Use GPU roles only"
        )


def _find_packing_library(weight: Any) -> KernelLibrary | None:
    """Returns the kernels for which a weight was packed; None if vLLM packed it."""
    library: KernelLibrary | None = getattr(weight, _LIBRARY, None)
    return library


def _with_our_bf16_packing(
    logged: set[torch.dtype], original: Callable[[Any, torch.nn.Module], None]
) -> Callable[[Any, torch.nn.Module], None]:
    """Returns a replacement that packs bf16 experts of supported sizes for our kernels.

    It passes all other experts to the original function.
    """

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        """Packs a layer's experts in place of its parameters."""
        library = _find_kernels(self, layer)
        if library is None:
            original(self, layer)
            return
        self._pad_moe_intermediate(layer)
        for name, gates in (("w13_weight", True), ("w2_weight", False)):
            replace_parameter(layer, name, _pack(library, getattr(layer, name), gates=gates))
        _log_once(logged, library, layer.w13_weight.dtype)

    return process_weights_after_loading


def _with_our_fp8_packing(
    logged: set[torch.dtype],
    original: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Returns a replacement that packs FP8 experts of supported sizes for our kernels.

    It passes all other experts to the original function.
    """

    def prepare_fp8_moe_layer_for_cpu(
        w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the packed w13 and w2 of a layer's experts."""
        is_supported = (
            w13.dtype == w2.dtype == FP8 and can_pack(w13, gates=True) and can_pack(w2, gates=False)
        )
        library = linear.find() if is_supported else None
        if library is None:
            return original(w13, w2)
        _log_once(logged, library, FP8)
        return _pack(library, w13, gates=True), _pack(library, w2, gates=False)

    return prepare_fp8_moe_layer_for_cpu


def _pack(library: KernelLibrary, weight: torch.Tensor, *, gates: bool) -> torch.Tensor:
    """Packs a weight, and records on it the library whose kernels can read it (`_find_packing_library`)."""
    packed = pack_experts(library, weight.data, gates=gates)
    setattr(packed, _LIBRARY, library)
    return packed


def _log_once(logged: set[torch.dtype], library: KernelLibrary, dtype: torch.dtype) -> None:
    """Logs once for each dtype that our kernels compute the experts."""
    if dtype not in logged:
        logged.add(dtype)
        name = "FP8" if dtype == FP8 else "bf16"
        _logger.info("CPU experts: HeteroInfer's %s kernels (%s)", name, ", ".join(library.paths))


def _with_our_computation(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement that computes the experts that our kernels packed.

    It passes all other experts to the original function.
    """

    def apply(self: Any, **named: Any) -> None:
        """Writes each row's weighted sum of its experts to `output`."""
        check_limit(self)
        library = _find_packing_library(named["w1"])
        # Simulated routers return int64, but all kernels need int32 (…/router/routing_simulator_router.py).
        named["topk_ids"] = named["topk_ids"].to(torch.int32).contiguous()
        if library is None:
            original(self, **named)
            return
        experts(
            library,
            named["output"],
            named["hidden_states"].contiguous(),
            packed_experts(self, named["w1"], named["w2"]),
            weights=_router_weights(**named),
            ids=named["topk_ids"],
        )

    return apply


def _router_weights(
    *, topk_weights: torch.Tensor, apply_router_weight_on_input: bool, **_: Any
) -> torch.Tensor:
    """Returns the weights of each row's experts, float32; ones if the inputs contain them already."""
    if apply_router_weight_on_input:  # `hidden_states` is already multiplied by the weights
        return torch.ones(topk_weights.shape)
    return topk_weights.float().contiguous()


def _find_kernels(vllm_experts: Any, layer: Any) -> KernelLibrary | None:
    """Returns our kernels if they can compute these bf16 experts; otherwise None."""
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
    return linear.find()
