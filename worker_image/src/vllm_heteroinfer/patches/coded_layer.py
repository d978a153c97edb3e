"""The weight of one of vLLM's linear layers, packed for our kernels. Imports vLLM."""

import torch
from vllm.model_executor.utils import replace_parameter

from vllm_heteroinfer.kernels import coded
from vllm_heteroinfer.kernels.coded import Coded, Scale


class CodedLayer:
    """A layer's weight, packed for our kernels.

    The layer's parameter holds the packed bytes. This object holds their format and sizes.
    """

    def __init__(self, layer: torch.nn.Module, name: str, weight: Coded, *, keep: bool = False) -> None:
        """Packs the weight in place of the layer's parameter `name`.

        Args:
            keep: whether vLLM still reads the parameter. Then the parameter stays, and this object holds the
                packed weight.
        """
        packed = coded.pack(coded.register(), weight)
        self._name = name
        self._packed = packed.packed if keep else None
        self._format_numbers = weight.format.to_numbers()
        self._sizes = (weight.columns, weight.inputs)
        if not keep:
            replace_parameter(layer, name, torch.nn.Parameter(packed.packed, requires_grad=False))

    def compute(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x times the weight, plus bias."""
        weight = getattr(layer, self._name) if self._packed is None else self._packed
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return coded.linear_by_numbers(x, weight, bias, self._format_numbers, *self._sizes)


def free_parameters(layer: torch.nn.Module, *names: str | None) -> None:
    """Removes parameters of a layer, because the packed weight contains their values. Ignores None."""
    for name in names:
        if name is not None and getattr(layer, name, None) is not None:
            setattr(layer, name, None)


def column_scale_of(dtype: torch.dtype) -> Scale:
    """Returns the kernels' type of column scales for bf16, float16 or float32."""
    return {
        torch.bfloat16: Scale.COLUMN_BF16,
        torch.float16: Scale.COLUMN_F16,
        torch.float32: Scale.COLUMN_F32,
    }[dtype]
