"""Linear layers in MXFP4, MXFP8 and NVFP4 by our kernels, which do not round inputs. Imports vLLM.

Sources: vllm/model_executor/kernels/linear/mxfp4/base.py::MxFp4LinearKernel@v0.32.0,
.../mxfp8/Mxfp8LinearKernel.py::Mxfp8LinearKernel, .../nvfp4/base.py::NvFp4LinearKernel. vLLM itself has no
kernel for CPUs in these formats.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.kernels.linear import MxFp4LinearKernel, Mxfp8LinearKernel, NvFp4LinearKernel

from vllm_heteroinfer.kernels.coded import Code, Coded, Format, Scale
from vllm_heteroinfer.patches.coded_layer import CodedLayer, free_parameters

_MX_GROUP: Final = 32
_NV_GROUP: Final = 16
_NAME: Final = "weight"
_SCALE: Final = "weight_scale"
_FACTORS: Final = "heteroinfer_factors"
"""Attribute that keeps the factor of each column of a layer in NVFP4, until the layer is packed."""


class _AnyLayerKernel:
    """Methods that the three kernels share. Each kernel supports every layer of its format.

    vLLM calls `process_weights_after_loading`, which packs the weight and sets `_coded`.
    """

    _coded: CodedLayer

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Returns True, because the patch installs this class only if our kernels can run."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Returns True, because the kernels support every layer of the format."""
        return True, None

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x times the layer's weight, plus bias."""
        return self._coded.compute(layer, x, bias)


class CodedMxFp4Kernel(_AnyLayerKernel, MxFp4LinearKernel):
    """MXFP4: e2m1 weights with an e8m0 scale for each 32 inputs."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes and the scales of groups of 32 inputs."""
        codes = layer.weight.data
        columns, inputs = codes.shape[0], codes.shape[1] * 2
        self._coded = _pack_layer(
            layer, Format(code=Code.FP4, scale=Scale.COLUMN_E8M0, group=_MX_GROUP), columns, inputs
        )


class CodedMxFp8Kernel(_AnyLayerKernel, Mxfp8LinearKernel):
    """MXFP8: e4m3 weights with an e8m0 scale for each 32 inputs."""

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Returns whether the kernels support the layer, and the requirement, for vLLM's error."""
        return config.bmm_batch_size is None, "the layer must have one weight, not a batch of weights"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes and the scales of groups of 32 inputs."""
        form = Format(code=Code.FP8, scale=Scale.COLUMN_E8M0, group=_MX_GROUP)
        self._coded = _pack_layer(layer, form, *layer.weight.shape)


class CodedNvFp4Kernel(_AnyLayerKernel, NvFp4LinearKernel):
    """NVFP4: e2m1 weights with an e4m3 scale for each 16 inputs, and a float32 factor.

    If vLLM joins several layers of the file to one, each joined layer has its own factor.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes, the scales of groups of 16 inputs, and the factors."""
        codes = layer.weight.data
        columns, inputs = codes.shape[0], codes.shape[1] * 2
        factors = vars(layer).pop(_FACTORS)
        form = Format(code=Code.FP4, scale=Scale.COLUMN_E4M3, group=_NV_GROUP)
        self._coded = _pack_layer(layer, form, columns, inputs, factors)


def with_kept_divisors(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement of compressed-tensors' method that keeps the factor of each joined layer."""

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        """Keeps the factors for our kernel, then calls vLLM's method."""
        if isinstance(self.kernel, CodedNvFp4Kernel):
            divisors = layer.weight_global_scale.data  # the inverses of the factors
            _keep_factors(layer, 1 / divisors.float())
            divisors.fill_(divisors.max())  # so that vLLM does not warn of different factors
        original(self, layer)

    return process_weights_after_loading


def with_kept_factors(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement of ModelOpt's method that keeps the factor of each joined layer."""

    def process(self: Any, layer: torch.nn.Module, role: Any) -> None:
        """Keeps the factors for our kernel, then calls vLLM's method."""
        if isinstance(layer.quant_method.kernel, CodedNvFp4Kernel):
            factors = layer.weight_scale_2.data
            _keep_factors(layer, factors.float())
            factors.fill_(factors.max())  # so that vLLM does not warn of different factors
        original(self, layer, role)

    return process


def _keep_factors(layer: torch.nn.Module, factors: torch.Tensor) -> None:
    """Keeps the factor of each column of a layer for `CodedNvFp4Kernel`.

    If the layer's own factors differ, vLLM warns of wrong weights. For this kernel, the warning would be
    false. So after this call, callers overwrite the layer's own factors with equal factors.

    Args:
        factors: float32, one for each joined layer.
    """
    widths = torch.tensor(layer.logical_widths)
    setattr(layer, _FACTORS, factors.repeat_interleave(widths))


def _pack_layer(
    layer: torch.nn.Module, form: Format, columns: int, inputs: int, factors: torch.Tensor | None = None
) -> CodedLayer:
    """Packs a layer's codes, and its scales without their padding. Removes the scales from the layer."""
    scales = getattr(layer, _SCALE).data[:columns, : form.groups(inputs)]
    weight = Coded(
        format=form,
        columns=columns,
        inputs=inputs,
        codes=getattr(layer, _NAME).data.contiguous().view(torch.uint8),
        scales=scales.contiguous().view(torch.uint8),
        factors=factors,
    )
    coded = CodedLayer(layer, _NAME, weight)
    free_parameters(layer, _SCALE)
    return coded
