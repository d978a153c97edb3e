"""The patch `cpu_coded`: our kernels for coded weights compute quantized linear layers of a CPU rank.

vLLM has a list of kernel classes for each platform, and uses the first class that supports a layer. `install`
puts our classes first in the lists for CPUs. Our kernels do not round inputs to 8 bits, and keep weights as
wide as in the checkpoint. Imports vLLM.
Source: vllm/model_executor/kernels/linear/__init__.py::choose_scaled_mm_linear_kernel@v0.32.0.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_FP8_BLOCK_KERNELS,
    _POSSIBLE_FP8_KERNELS,
    _POSSIBLE_INT8_KERNELS,
    _POSSIBLE_KERNELS,
    _POSSIBLE_MXFP4_KERNELS,
    _POSSIBLE_MXFP8_KERNELS,
    _POSSIBLE_NVFP4_KERNELS,
)
from vllm.model_executor.kernels.linear.scaled_mm import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import _upcast_e8m0_to_fp32
from vllm.platforms import PlatformEnum

from vllm_heteroinfer.kernels import coded
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, Code, Coded, Format, Scale
from vllm_heteroinfer.kernels.library import KernelsUnavailableError
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.patches.coded_floats import (
    CodedMxFp4Kernel,
    CodedMxFp8Kernel,
    CodedNvFp4Kernel,
    with_kept_divisors,
    with_kept_factors,
)
from vllm_heteroinfer.patches.coded_integers import CodedInt8Kernel, CodedWNA16Kernel
from vllm_heteroinfer.patches.coded_layer import CodedLayer
from vllm_heteroinfer.patches.registry import (
    CPU_CODED_FACTORS,
    CPU_CODED_MODELOPT_FACTORS,
    CPU_CODED_MODELOPT_SCALES,
    CPU_CODED_SCALES,
)
from vllm_heteroinfer.patches.replacing import replace

_logger = logging.getLogger(__name__)
_GROUP = 128
"""Inputs of a block of FP8 weights with one scale. A block has a multiple of SHARED_COLUMNS columns."""


def install() -> None:
    """Puts our kernels first in vLLM's lists for CPUs, and keeps the scales of joined layers.

    vLLM joins layers with the same input, such as q, k and v. Does nothing if the user chose vLLM's kernels,
    or if this CPU cannot run our kernels.
    """
    if not is_wanted(os.environ):
        return
    try:
        library = coded.register()
    except KernelsUnavailableError:
        return  # `LinearLayers` logs the reason
    lists: tuple[tuple[dict[PlatformEnum, list[Any]], type], ...] = (
        (_POSSIBLE_FP8_KERNELS, CodedFp8Kernel),
        (_POSSIBLE_FP8_BLOCK_KERNELS, CodedFp8BlockKernel),
        (_POSSIBLE_INT8_KERNELS, CodedInt8Kernel),
        (_POSSIBLE_KERNELS, CodedWNA16Kernel),
        (_POSSIBLE_MXFP4_KERNELS, CodedMxFp4Kernel),
        (_POSSIBLE_MXFP8_KERNELS, CodedMxFp8Kernel),
        (_POSSIBLE_NVFP4_KERNELS, CodedNvFp4Kernel),
    )
    for by_platform, kernel in lists:
        kernels = by_platform.setdefault(PlatformEnum.CPU, [])
        if kernel not in kernels:
            kernels.insert(0, kernel)
    replace(CPU_CODED_SCALES, _with_kept_scales)
    replace(CPU_CODED_MODELOPT_SCALES, _with_kept_scales)
    replace(CPU_CODED_FACTORS, with_kept_divisors)
    replace(CPU_CODED_MODELOPT_FACTORS, with_kept_factors)
    _logger.info(
        "CPU quantized linear layers: HeteroInfer's kernels compute them (%s)", ", ".join(library.coded_paths)
    )


def _with_kept_scales(_: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement that keeps the weights of joined layers, and repeats the scale of each layer.

    vLLM's own function rounds the weights again, so that all joined layers share one scale.
    """

    def requantize_with_max_scale(
        weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a scale for each column, or one scale for all, and the unchanged weight.

        If the checkpoint stores the joined layers as one tensor (such as qkv_proj), the tensor has one scale.
        Then vLLM sets the first of the scales, and the others are the smallest number.

        Args:
            weight_scale: scale of each joined layer.
            logical_widths: number of columns of each joined layer.
        """
        is_filled = weight_scale.ndim > 0 and bool(weight_scale[-1] <= torch.finfo(torch.float8_e4m3fn).min)
        has_one_scale = weight_scale.ndim == 0 or is_filled
        if has_one_scale or weight_scale.numel() != len(logical_widths):
            return weight_scale.max(), weight
        widths = torch.tensor(logical_widths)
        return weight_scale.repeat_interleave(widths).view(-1, 1), weight

    return requantize_with_max_scale


class CodedFp8Kernel(FP8ScaledMMLinearKernel):
    """FP8 weights with one scale for each column, for the whole layer, or for each joined layer."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Returns True, because the patch installs this class only if our kernels can run."""
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Returns whether the kernels support the layer's scales, and the requirement, for vLLM's error."""
        shape = c.weight_quant_key.scale.group_shape
        # vLLM has two names for one scale for each column of a weight: per channel, or per token.
        return shape.is_per_tensor() or shape.is_per_channel() or shape.is_per_token(), (
            "the layer must have one scale for each column, or one for all weights"
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes, with one scale for each column."""
        name, scale_name, *_ = self.layer_param_names
        codes = getattr(layer, name).data.t()  # vLLM's parameter is a view [inputs, columns]
        columns, inputs = codes.shape
        scales = getattr(layer, scale_name).data.float().reshape(-1, 1).expand(columns, 1).contiguous()
        weight = Coded(
            format=Format(code=Code.FP8, scale=Scale.COLUMN_F32),
            columns=columns,
            inputs=inputs,
            codes=codes.contiguous().view(torch.uint8),
            scales=scales,
        )
        self._coded = CodedLayer(layer, name, weight)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x times the layer's weight, plus bias."""
        return self._coded.compute(layer, x, bias)

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        raise NotImplementedError("CodedFp8Kernel computes in apply_weights")


class CodedFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """FP8 weights with one scale for each block of 128 inputs and some columns."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Returns True, because the patch installs this class only if our kernels can run."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Returns whether the kernels support the layer's blocks, and the requirement, for vLLM's error."""
        shape = config.weight_quant_key.scale.group_shape
        return shape.col == _GROUP and shape.row > 0 and shape.row % SHARED_COLUMNS == 0, (
            f"blocks must have {_GROUP} inputs and a multiple of {SHARED_COLUMNS} columns"
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes, and repeats the scale of each block for each 32 columns, as the kernels need."""
        params = self._get_layer_params(layer)
        codes, scales = params.weight.data.contiguous(), params.block_scale.data
        if scales.dtype in {torch.float8_e8m0fnu, torch.uint8}:
            scales = _upcast_e8m0_to_fp32(scales)
        columns, inputs = codes.shape
        repeats = self.weight_group_shape.row // SHARED_COLUMNS
        scales = scales.float().repeat_interleave(repeats, 0)[: -(-columns // SHARED_COLUMNS)]
        weight = Coded(
            format=Format(code=Code.FP8, scale=Scale.BLOCK_F32, group=_GROUP),
            columns=columns,
            inputs=inputs,
            codes=codes.view(torch.uint8),
            scales=scales.contiguous(),
        )
        # Latent attention (MLA) reads the weight of one of its linear layers directly. vLLM marks this layer,
        # and the layer keeps its weight.
        keep = getattr(layer, "_cpu_skip_gemm_dispatch", False)
        self._coded = CodedLayer(layer, params.WEIGHT, weight, keep=keep)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Returns x times the layer's weight, plus bias."""
        return self._coded.compute(layer, x, bias)

    def apply_block_scaled_mm(self, **_: Any) -> torch.Tensor:
        raise NotImplementedError("CodedFp8BlockKernel computes in apply_weights")
