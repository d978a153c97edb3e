"""The patch `cpu_coded_experts`: CPU stages compute quantized experts by our kernels for coded weights.

vLLM has a method for each format, which creates and loads the experts' parameters. But a method refuses a
format for which vLLM has no kernel, and on CPUs vLLM has none for most formats. With this patch, the methods
accept each format, and our kernels pack and compute the experts. On CPUs with AVX-512, the patch
`cpu_experts` still computes FP8 in blocks. Imports vLLM. Source:
vllm/model_executor/layers/fused_moe/modular_kernel.py::FusedMoEExperts.is_supported_config@v0.32.0,
.../routed_experts.py::RoutedExperts._get_quant_method.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_heteroinfer.kernels import coded, linear
from vllm_heteroinfer.kernels.experts import SCALED
from vllm_heteroinfer.kernels.library import KernelsUnavailableError
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.patches.registry import CPU_CODED_EXPERTS_CHOICE, CPU_CODED_EXPERTS_METHOD
from vllm_heteroinfer.patches.replacing import replace

_logger = logging.getLogger(__name__)
_CLASSES_OF_OUR_FORMATS: Final = frozenset(
    {
        "CPUExpertsFp8",
        "CPUExpertsMxfp4",
        "CPUExpertsInt4",
        "CPUExpertsInt8",
        "Mxfp8EmulationTritonExperts",
        "Nvfp4QuantizationEmulationTritonExperts",
    }
)
"""Names of vLLM's classes of experts, one for each format of our kernels. For a format without a class for
CPUs, it is the class that keeps the parameters as in the file."""


class PackedStageExperts(Protocol):
    """A layer's packed experts.

    Attributes:
        packed: tensors of the weights.
        method: format and kernels, for the log.
    """

    packed: Sequence[torch.Tensor]
    method: str

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Writes each row's weighted sum of its experts into y."""


PackExperts = Callable[[Any, torch.dtype], PackedStageExperts]
"""Packs the experts that a RoutedExperts of vLLM has loaded. Takes also the type of inputs."""


def install(pack_experts: PackExperts) -> None:
    """Replaces vLLM's choice of kernels for quantized experts in this process.

    Does nothing if HETEROINFER_CPU_LINEAR=onednn. If this process cannot use our kernels, only logs a
    warning.
    """
    if not is_wanted(os.environ):
        return
    try:
        coded.register()
    except KernelsUnavailableError as error:
        _logger.warning(
            "this rank cannot use HeteroInfer's kernels for quantized experts, so vLLM's kernels compute "
            "these experts, at another speed than planned: %s",
            error,
        )
        return
    logged: set[str] = set()  # each method of computing is logged once
    replace(CPU_CODED_EXPERTS_CHOICE, _with_our_formats)
    replace(CPU_CODED_EXPERTS_METHOD, lambda original: _with_our_method(original, pack_experts, logged))


def _has_all_experts(config: Any) -> bool:
    """Returns whether this rank has all columns of all experts of a layer."""
    return {config.tp_size, config.ep_size, config.dp_size, config.pcp_size} == {1}


def _with_our_formats(
    original: Callable[..., tuple[bool, str | None]],
) -> Callable[..., tuple[bool, str | None]]:
    """Returns a check that also accepts the formats of our kernels."""

    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """Returns True for classes whose format our kernels compute, else vLLM's answer."""
        if cls.__name__ in _CLASSES_OF_OUR_FORMATS and _has_all_experts(moe_config):
            return True, None
        return original(cls, moe_config, weight_key, activation_key, activation_format)

    return is_supported_config


def _with_our_method(
    original: Callable[..., FusedMoEMethodBase], pack_experts: PackExperts, logged: set[str]
) -> Callable[..., FusedMoEMethodBase]:
    """Returns a replacement of vLLM's choice of methods that gives quantized experts to our kernels."""

    def get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        """Returns vLLM's method. For quantized experts, our kernels replace its packing and computing."""
        method = original(self, prefix, quant_config, moe_config)
        is_unquantized = isinstance(method, UnquantizedFusedMoEMethod)
        if is_unquantized or not _has_all_experts(moe_config) or _uses_cpu_experts(method, moe_config):
            return method
        # The method gets a new class with our functions. The new class has the same name, because vLLM's
        # loader reads it, and the former class as its base, because models check for this class.
        vllm_class = type(method)
        own_members = {name: each for name, each in vars(_CodedMethod).items() if not name.startswith("__")}
        # Python makes a function in a class a method. In a tuple, `pack_experts` stays a plain function.
        settings = {"pack_experts": (pack_experts,), "logged": logged}
        method.__class__ = type(vllm_class.__name__, (vllm_class,), {**own_members, **settings})
        return method

    return get_quant_method


def _uses_cpu_experts(method: Any, config: Any) -> bool:
    """Returns whether `cpu_experts` computes these experts: FP8 in blocks, bf16, SiLU, on AVX-512."""
    blocks = getattr(method, "weight_block_size", None)
    return (
        linear.find() is not None
        and blocks is not None
        and list(blocks) == [SCALED, SCALED]
        and config.in_dtype == torch.bfloat16
        and config.activation == MoEActivation.SILU
        and not config.swiglu_limit
        and not config.has_bias
    )


class _CodedMethod:
    """Packs and computes a layer's experts instead of vLLM's method.

    `_with_our_method` copies its members into a subclass of the method's class. The method exists already, so
    its class cannot get another base class.
    """

    pack_experts: tuple[PackExperts]
    logged: set[str]
    moe: Any
    _experts: PackedStageExperts

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the experts, and replaces the layer's parameters by the packed weights."""
        (pack_experts,) = self.pack_experts  # `_with_our_method` explains the tuple
        self._experts = pack_experts(layer, self.moe.in_dtype)
        for name in list(layer._parameters):
            del layer._parameters[name]
        for number, tensor in enumerate(self._experts.packed):
            layer.register_parameter(f"packed_{number}", torch.nn.Parameter(tensor, requires_grad=False))
        if self._experts.method not in self.logged:
            self.logged.add(self._experts.method)
            _logger.info("CPU experts: %s", self._experts.method)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None, because no kernel of vLLM computes these experts."""

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The type that our kernels need: int32."""
        return torch.int32

    @property
    def is_monolithic(self) -> bool:
        """False, because vLLM's router chooses the experts."""
        return False

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the sum of the chosen experts' answers, [rows, hidden], without shared experts."""
        del shared_experts, shared_experts_input  # vLLM's runner computes the shared experts
        weights = topk_weights.to(torch.float32)
        if layer.apply_router_weight_on_input:
            x = (x * weights).to(x.dtype)  # each row of such a layer has one expert, and so one weight
            weights = torch.ones_like(weights)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        ids = topk_ids.to(torch.int32).contiguous()
        self._experts.compute(y, x.contiguous(), weights.contiguous(), ids)
        return y
