"""Linear layers in int4 and int8 by our kernels, which do not round inputs. Imports vLLM.

Sources: vllm/model_executor/kernels/linear/mixed_precision/MPLinearKernel.py::MPLinearKernel@v0.32.0 (AWQ,
GPTQ and compressed-tensors in 4 and 8 bits), .../scaled_mm/ScaledMMLinearKernel.py::Int8ScaledMMLinearKernel.
"""

from typing import Any, Final

import torch
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, MPLinearKernel, MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from vllm_heteroinfer.kernels.coded import ELEMENTS, SHARED_COLUMNS, Code, Coded, Format, Scale
from vllm_heteroinfer.patches.coded_layer import CodedLayer, column_scale_of, free_parameters

_SYMMETRIC: Final = (scalar_types.uint4b8, scalar_types.uint8b128)
_WITH_ZEROS: Final = (scalar_types.uint4, scalar_types.uint8)
_WORD_BITS: Final = 32
_FLIPPED: Final = {4: 0x88, 8: 0x80}
"""By the bits of a code: the byte whose XOR turns codes that count from 0 into two's complement."""


class CodedWNA16Kernel(MPLinearKernel):
    """Weights of 4 or 8 bits with a scale, and perhaps a zero point, for each group of inputs."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns -1, because a CPU has no CUDA capability."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Returns whether the kernels support the layer, and if not, the requirement that is not met."""
        types = _WITH_ZEROS if c.zero_points else _SYMMETRIC
        if c.weight_type not in types:
            names = ", ".join(map(str, types))
            return False, f"the type of weights must be one of {names} (got {c.weight_type})"
        if c.group_size != -1 and (c.group_size <= 0 or c.group_size % SHARED_COLUMNS):
            return False, f"the group size must be a multiple of {SHARED_COLUMNS} inputs (got {c.group_size})"
        if c.act_type not in ELEMENTS:
            names = ", ".join(map(str, ELEMENTS))
            return False, f"the type of activations must be one of {names} (got {c.act_type})"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes in two's complement, with scales and zero points by column."""
        weights, scales, zeros = self._get_weight_params(layer)
        bits = self.config.weight_type.size_bits
        inputs, columns = self.config.partition_weight_shape
        words = weights.data if weights.input_dim == 1 else weights.data.t()  # [columns, words of inputs]
        codes = words.contiguous().view(torch.uint8)[:, : -(-inputs * bits // 8)].bitwise_xor(_FLIPPED[bits])
        column_scales = scales.data if scales.output_dim == 0 else scales.data.t()
        group = self.config.group_size
        if group == -1:  # one scale for each column
            # Our kernels subtract zero points from groups only, so with zero points all inputs are one group.
            group = -(-inputs // SHARED_COLUMNS) * SHARED_COLUMNS if self.config.zero_points else 0
        weight = Coded(
            format=Format(
                code=Code.INT4 if bits == 4 else Code.INT8,
                scale=column_scale_of(column_scales.dtype),
                group=group,
                zeros=self.config.zero_points,
            ),
            columns=columns,
            inputs=inputs,
            codes=codes,
            scales=column_scales.contiguous(),
            zeros=_unpack_zero_points(zeros, bits, columns) if self.config.zero_points else None,
        )
        self._coded = CodedLayer(layer, self.w_q_name, weight)
        free_parameters(layer, self.w_s_name, self.w_zp_name)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x times the layer's weight, plus bias."""
        return self._coded.compute(layer, x, bias)


def _unpack_zero_points(packed: Any, bits: int, columns: int) -> torch.Tensor:
    """Returns the zero points [columns, groups] as int8.

    In the checkpoint, codes and zero points count from 0. In the kernels, both count from minus half of their
    range.
    """
    words = packed.data if packed.output_dim == 0 else packed.data.t()
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    values = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & ((1 << bits) - 1)
    return (values.flatten(0, 1)[:columns] - (1 << (bits - 1))).to(torch.int8).contiguous()


class CodedInt8Kernel(Int8ScaledMMLinearKernel):
    """int8 weights with a scale for each column, or for each layer that vLLM joins. Does not round inputs."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Returns True, because the patch installs this class only if our kernels can run."""
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Returns True, because the kernels support every int8 layer."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the codes, with one scale for each column."""
        weight_name, scale_name, *other_names = self.layer_param_names
        codes, scales = getattr(layer, weight_name).data, getattr(layer, scale_name).data.float()
        columns, inputs = codes.shape
        if scales.numel() not in {1, columns}:  # a scale for each of the layers that vLLM joined
            scales = scales.flatten().repeat_interleave(torch.tensor(layer.logical_widths))
        weight = Coded(
            format=Format(code=Code.INT8, scale=Scale.COLUMN_F32),
            columns=columns,
            inputs=inputs,
            codes=codes.contiguous().view(torch.uint8),
            scales=scales.reshape(-1, 1).expand(columns, 1).contiguous(),
        )
        self._coded = CodedLayer(layer, weight_name, weight)
        free_parameters(layer, scale_name, *other_names)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x times the layer's weight, plus bias."""
        return self._coded.compute(layer, x, bias)
