"""The patch `cpu_packing`: packs 4-bit weights of a CPU rank in slices, to save memory.

vLLM unpacks a whole layer into 32-bit numbers before it packs the layer for a kernel. This takes extra
memory, measured as a multiple of the layer's bytes (2 cores of an EPYC, 2026-11-24; packing for AMX does not
need a CPU with AMX):

- 6.4 to 10.9 times for an MLP of 87 MiB, and 18.6 to 19.0 times if the MLP is packed for AMX
- 3.5 to 10.3 times for experts of 150 MiB
- 0.8 to 2.9 times for all of these with slices

Slices give the same packed bytes, because a slice has whole blocks of the kernel, and vLLM packs each expert
on its own. Imports vLLM.
Source: vllm/model_executor/layers/fused_moe/oracle/int_wna16.py::_process_weights_cpu@v0.32.0,
vllm/model_executor/kernels/linear/mixed_precision/cpu.py::CPUWNA16LinearKernel@v0.32.0,
vllm/model_executor/layers/quantization/auto_awq.py::_convert_awq_to_standard_format@v0.32.0.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch

from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.patches.registry import (
    CPU_AWQ_PACKING,
    CPU_INT4_EXPERTS_PACKING,
    CPU_INT4_PACKING,
    CPU_INT4_PACKING_AMX,
)
from vllm_heteroinfer.patches.replacing import replace

_UNPACKED_BYTES: Final = 16 << 20
"""Maximum size of an unpacked slice (32 bits for each weight). Several copies exist at the same time."""
_OUTPUTS: Final = 128
"""A slice has a multiple of 128 outputs: whole blocks of a kernel (16 or 32) and whole words of AWQ (8)."""
_WORD: Final = 8
"""Number of 4-bit weights in a 32-bit word."""


def install() -> None:
    """Replaces vLLM's packing of 4-bit weights in this process."""
    replace(CPU_INT4_EXPERTS_PACKING, _with_packing_by_expert)
    replace(CPU_AWQ_PACKING, _with_conversion_in_slices)
    replace(CPU_INT4_PACKING, partial(_with_packing_in_slices, replaces_scales=False))
    replace(CPU_INT4_PACKING_AMX, partial(_with_packing_in_slices, replaces_scales=True))


class _JoinedTensor:
    """A tensor that is assembled from slices along one dimension."""

    def __init__(self, *, parts: int, dim: int, allocate: Callable[..., torch.Tensor]) -> None:
        """Prepares a tensor with `parts` equal parts along `dim`.

        Args:
            allocate: returns memory for the tensor.
        """
        self._parts, self._dim, self._allocate = parts, dim, allocate
        self._whole: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The assembled tensor. `copy_in` must have been called."""
        assert self._whole is not None
        return self._whole

    def copy_in(self, slice_: torch.Tensor, first: int, end: int) -> None:
        """Copies a slice with the parts `first` to `end - 1` into the tensor.

        A part can cover several indices of the dimension, or a fraction of an index. The first call allocates
        the tensor, because only a slice shows the size of a part.
        """
        size, count = slice_.shape[self._dim], end - first
        if self._whole is None:
            shape = list(slice_.shape)
            shape[self._dim] = size * self._parts // count
            self._whole = self._allocate(shape, dtype=slice_.dtype)
        self._whole.narrow(self._dim, size * first // count, size).copy_(slice_)


def _with_packing_by_expert(original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Returns a replacement that calls vLLM's `original` for one expert at a time.

    One call for all experts would unpack all experts at the same time.
    """

    def process_weights_cpu(quant_config: Any, *tensors: Any, **named: Any) -> tuple[Any, ...]:
        """Packs the experts one by one into tensors for all experts."""
        num_experts = tensors[0].shape[0]
        joined_tensors: list[_JoinedTensor | None] = []
        for index in range(num_experts):
            packed = original(
                quant_config,
                *(_select_expert(tensor, index) for tensor in tensors),
                **{name: _select_expert(tensor, index) for name, tensor in named.items()},
            )
            if not joined_tensors:  # only the first result shows which tensors there are
                joined_tensors = [
                    None
                    if tensor is None
                    else _JoinedTensor(parts=num_experts, dim=0, allocate=weight_memory.empty)
                    for tensor in packed
                ]
            for joined, tensor in zip(joined_tensors, packed, strict=True):
                if joined is not None:
                    joined.copy_in(tensor, index, index + 1)
        return tuple(None if joined is None else joined.tensor for joined in joined_tensors)

    return process_weights_cpu


def _select_expert(tensor: torch.Tensor | None, index: int) -> torch.Tensor | None:
    """Returns one expert of a tensor, as a tensor with one expert; None for None."""
    return None if tensor is None else tensor[index : index + 1]


def _yield_slices(inputs: int, outputs: int) -> Iterator[tuple[int, int]]:
    """Yields the first output of each slice, and the output after its last.

    An unpacked slice has at most _UNPACKED_BYTES, unless _OUTPUTS outputs, the fewest of a slice, take more.
    """
    fitting_outputs = _UNPACKED_BYTES // (4 * inputs)
    width = max(fitting_outputs // _OUTPUTS, 1) * _OUTPUTS  # whole multiples of _OUTPUTS
    for first in range(0, outputs, width):
        yield first, min(first + width, outputs)


def _with_conversion_in_slices(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement that calls vLLM's `original` for one slice of the outputs at a time.

    One call for all outputs would unpack the whole weight.
    """

    def convert_awq_to_standard_format(
        layer: Any, w_q_name: str, w_zp_name: str | None, size_bits: int
    ) -> None:
        """Converts a layer's tensors slice by slice.

        For each slice, `original` converts an object that has the slices of the layer's tensors as
        attributes.
        """
        tensors = {name: getattr(layer, name).data for name in (w_q_name, w_zp_name) if name is not None}
        inputs, words = tensors[w_q_name].shape
        # In usual memory, because vLLM frees these tensors when it packs them for the kernel. `dim` is the
        # dimension of the outputs in the results of `original`.
        joined_tensors = {
            name: _JoinedTensor(parts=words, dim=1 if name == w_q_name else 0, allocate=torch.empty)
            for name in tensors
        }
        layer_slice = SimpleNamespace()
        for first, end in _yield_slices(inputs, words * 32 // size_bits):
            first_word, end_word = first * size_bits // 32, end * size_bits // 32
            layer_slice = SimpleNamespace(
                **{name: tensor[:, first_word:end_word] for name, tensor in tensors.items()}
            )
            original(layer_slice, w_q_name, w_zp_name, size_bits)
            for name, joined in joined_tensors.items():
                joined.copy_in(getattr(layer_slice, name).data, first_word, end_word)
        for name, joined in joined_tensors.items():
            # The parameter of the last slice has the class that vLLM chose. It gets the values of all slices.
            parameter = getattr(layer_slice, name)
            parameter.data = joined.tensor
            setattr(layer, name, parameter)

    return convert_awq_to_standard_format


def _with_packing_in_slices(
    original: Callable[[Any, Any], None], *, replaces_scales: bool
) -> Callable[[Any, Any], None]:
    """Returns a replacement that calls vLLM's `original` for one slice of the outputs at a time.

    Args:
        replaces_scales: whether `original` also packs the scales and the zero points.
    """

    def process_gptq_weights(self: Any, layer: Any) -> None:
        """Packs a layer's weight slice by slice, and replaces the layer's parameters.

        For each slice, `original` packs an object that has the slices of the layer's tensors as attributes.
        """
        names = [name for name in (self.w_q_name, self.w_s_name, self.w_zp_name) if name is not None]
        tensors = {name: getattr(layer, name).data for name in names if getattr(layer, name) is not None}
        words, outputs = tensors[self.w_q_name].shape
        packed_names = names if replaces_scales else [self.w_q_name]
        joined_tensors = {
            name: _JoinedTensor(parts=outputs, dim=0, allocate=weight_memory.empty) for name in packed_names
        }
        for first, end in _yield_slices(words * _WORD, outputs):
            layer_slice = SimpleNamespace(bias=getattr(layer, "bias", None))
            for name, tensor in tensors.items():
                outputs_per_column = outputs // tensor.shape[1]  # several for zero points, which are in words
                columns = slice(first // outputs_per_column, end // outputs_per_column)
                values = tensor[:, columns].contiguous()
                setattr(layer_slice, name, torch.nn.Parameter(values, requires_grad=False))
            original(self, layer_slice)
            for name, joined in joined_tensors.items():
                joined.copy_in(getattr(layer_slice, name).data, first, end)
            # `original` may set further attributes. In the end, the layer has those of the last slice.
            for name in vars(layer_slice).keys() - tensors.keys() - joined_tensors.keys():
                setattr(layer, name, getattr(layer_slice, name))
        for name, joined in joined_tensors.items():
            parameter = getattr(layer, name)
            if parameter is None:  # zero points that the checkpoint lacks and `original` has added
                setattr(layer, name, torch.nn.Parameter(joined.tensor, requires_grad=False))
            else:
                parameter.data = joined.tensor

    return process_gptq_weights
