"""Turns parameters of vLLM's expert methods into weights of our kernels. Imports torch, not vLLM.

An expert has gates and ups (vLLM names both together w13) and a projection back to the hidden size (w2).
vLLM has a method for each format, which creates the parameters. In `w13_*`, gates come before ups, or gates
and ups alternate. A format is recognized by the names, types and shapes of the parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from heteroinfer_contract.column_shares import Span
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.expert_reader import LayerReader, Range, describe
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, Code, Coded, Format, Scale

_FP8: Final = torch.float8_e4m3fn
_FLOATS: Final = {torch.bfloat16: Code.BF16, torch.float16: Code.F16}
_COLUMN_SCALES: Final = {
    torch.float32: Scale.COLUMN_F32,
    torch.bfloat16: Scale.COLUMN_BF16,
    torch.float16: Scale.COLUMN_F16,
}
_SIGNS: Final = 0x88
"""XOR with this byte subtracts 8 from two 4-bit codes: 0 to 15 become -8 to 7 in two's complement."""
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""In AWQ, an int32 has the 4-bit codes of eight columns. The place of each column's code in the int32."""
_BLOCK: Final = 128
"""Columns and inputs of a block of FP8 weights."""
_NIBBLES: Final = 8
"""Codes of 4 bits in an int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """This rank's part of each expert of a layer.

    Attributes:
        own: this rank's intermediate columns.
        padded: number of intermediate columns in vLLM's parameters, including padding.
        gated: whether the experts have gates. Without gates, w13 has only ups.
        alternate: whether gate and up columns alternate in w13.
    """

    hidden: int
    own: Span
    padded: int
    gated: bool
    alternate: bool


class ExpertWeights:
    """Reads this rank's part of a layer's experts. Recognizes the format by the layer's parameters.

    Attributes:
        name: name of the format.
    """

    def __init__(self, reader: LayerReader, shape: ExpertShape) -> None:
        """Recognizes the format; raises ContractError if no kernel computes it."""
        self._reader, self._shape = reader, shape
        self._read, self.name = self._recognize()

    @property
    def unquantized_dtype(self) -> torch.dtype | None:
        """Type of unquantized weights; None for coded weights."""
        dtype = self._find_dtype("w13_weight")
        return dtype if dtype in {torch.bfloat16, torch.float16, torch.float32} else None

    def read_coded(self, expert: int, *, w13: bool) -> Coded:
        """Returns this rank's part of w13 or w2, with codes and scales as the kernels need them.

        The rank has columns of w13 (gates, then ups), or inputs of w2.
        """
        return self._read(expert, w13)

    def read_floats(self, expert: int, *, w13: bool) -> torch.Tensor:
        """Returns this rank's part of w13 or w2 in bf16, float16, float32 or FP8, without scales.

        The shape is [columns, inputs].
        """
        return self._read_columns("w13_weight", expert) if w13 else self._read_inputs("w2_weight", expert)

    def read_bias(self, expert: int, *, w13: bool) -> torch.Tensor | None:
        """Returns this rank's bias of w13 or of w2, or None for experts without a bias.

        Only one rank adds the bias of w2. The other ranks get zeros, because the asking rank adds the answers
        of all ranks.
        """
        name = "w13_bias" if w13 else "w2_bias"
        if not self._reader.has(name):
            return None
        if w13:
            return self._read_columns(name, expert)
        bias = self._reader.read(name, expert, (0, self._shape.hidden))
        return bias if self._shape.own.adds_bias else torch.zeros_like(bias)

    # Regions of parameters

    def _read_columns(self, name: str, expert: int, dim: int = 0, per_element: int = 1) -> torch.Tensor:
        """Reads this rank's columns of w13: gates, then ups.

        Args:
            dim: dimension of the columns.
            per_element: number of columns in one element of the parameter.
        """
        shape, own = self._shape, self._shape.own

        def read(first: int, end: int) -> torch.Tensor:
            """Reads the parameter's elements for the columns `first` to `end - 1`."""
            ranges: list[Range | None] = [None, None]
            ranges[dim] = (first // per_element, -(-end // per_element))
            num_dims = len(self._reader.shape(name))  # 2, but 1 for a bias
            return self._reader.read(name, expert, *ranges[:num_dims])

        if not shape.gated:
            return read(own.first, own.end)
        if shape.alternate:
            _check_alternating(name, per_element)
            alternating = read(2 * own.first, 2 * own.end)
            index = torch.arange(alternating.shape[dim])
            gates_then_ups = torch.cat((index[0::2], index[1::2]))
            return alternating.index_select(dim, gates_then_ups)
        # The ups begin with an element of their own, even if the last element of the gates is not full.
        first_up = -(-shape.padded // per_element) * per_element
        gates, ups = read(own.first, own.end), read(first_up + own.first, first_up + own.end)
        return torch.cat((gates, ups), dim)

    def _read_inputs(self, name: str, expert: int, dim: int = 1, per_element: int = 1) -> torch.Tensor:
        """Reads this rank's inputs of w2.

        Args:
            dim: dimension of the inputs.
            per_element: number of inputs in one element of the parameter.
        """
        own = self._shape.own
        ranges: list[Range | None] = [None, None]
        ranges[dim] = (own.first // per_element, -(-own.end // per_element))
        return self._reader.read(name, expert, *ranges)

    def _read_columns_and_inputs(
        self, suffix: str, expert: int, w13: bool, per_column: int = 1, per_input: int = 1
    ) -> torch.Tensor:
        """Reads this rank's columns of a parameter of w13, or its inputs of a parameter of w2.

        Args:
            suffix: name of the parameter after `w13_` or `w2_`. Its shape is [columns, inputs].
            per_column: number of columns in one element of the parameter.
            per_input: number of inputs in one element of the parameter.
        """
        if w13:
            return self._read_columns(f"w13_{suffix}", expert, dim=0, per_element=per_column)
        return self._read_inputs(f"w2_{suffix}", expert, dim=1, per_element=per_input)

    def _columns_and_inputs(self, w13: bool) -> tuple[int, int]:
        """Returns the number of columns and of inputs of this rank's w13 or w2."""
        shape = self._shape
        columns = shape.own.count * (2 if shape.gated else 1)
        return (columns, shape.hidden) if w13 else (shape.hidden, shape.own.count)

    def _build_coded(
        self, form: Format, w13: bool, codes: torch.Tensor, **tensors: torch.Tensor | None
    ) -> Coded:
        """Returns this rank's w13 or w2 with these codes.

        Args:
            **tensors: scales, zero points and factors, as in `Coded`.
        """
        columns, inputs = self._columns_and_inputs(w13)
        return Coded(format=form, columns=columns, inputs=inputs, codes=codes, **tensors)

    # Formats

    def _find_dtype(self, name: str) -> torch.dtype | None:
        """Returns the type of a parameter; None if the layer does not have it."""
        return self._reader.dtype(name) if name in self._reader.recipe.parameters else None

    def _recognize(self) -> tuple[Callable[[int, bool], Coded], str]:
        """Returns the method that reads this layer's format, and the format's name."""
        # Each format has exactly one of these parameters, which contains the codes.
        dtype = (
            self._find_dtype("w13_weight")
            or self._find_dtype("w13_weight_packed")
            or self._find_dtype("w13_qweight")
        )
        if dtype in _FLOATS or dtype == torch.float32:
            return self._read_unquantized, str(dtype).removeprefix("torch.")
        is_compressed_tensors = self._find_dtype("w13_weight_packed") is not None
        recognize = {
            _FP8: self._recognize_fp8,
            torch.int8: self._recognize_int8,
            torch.uint8: self._recognize_fp4,
            torch.int32: self._recognize_packed if is_compressed_tensors else self._recognize_awq_or_gptq,
        }
        if dtype not in recognize:
            raise self._build_refusal()
        return recognize[dtype]()

    def _build_refusal(self) -> ContractError:
        """Returns the error for a format that no kernel computes."""
        recipe = self._reader.recipe
        parameters = ", ".join(
            f"{name} {describe(parameter)}" for name, parameter in sorted(recipe.parameters.items())
        )
        return ContractError(
            f"experts: HeteroInfer's CPU kernels do not support the format of {recipe.method} "
            f"({parameters}). Use the model in bf16, FP8, int8, int4, MXFP8, MXFP4 or NVFP4, or use "
            "GPU roles only"
        )

    def _read_unquantized(self, expert: int, w13: bool) -> Coded:
        """Reads bf16 or float16 weights as codes of 16 bits without scales."""
        weight = self.read_floats(expert, w13=w13)
        return self._build_coded(Format(code=_FLOATS[weight.dtype]), w13, _with_contiguous_rows(weight))

    def _has_column_scales(self, suffix: str) -> bool:
        """Returns whether a parameter of w13 has one scale for each column."""
        shape = self._reader.shape(f"w13_{suffix}") if self._find_dtype(f"w13_{suffix}") else ()
        return len(shape) == 2 and shape[1] == 1 and shape[0] == self._reader.shape("w13_weight")[0]

    def _recognize_fp8(self) -> tuple[Callable[[int, bool], Coded], str]:
        """Recognizes FP8 by its scales: MXFP8, per channel, per tensor, or in blocks."""
        if self._find_dtype("w13_weight_scale") == torch.uint8:
            return self._read_mxfp8, "MXFP8"
        if self._has_column_scales("weight_scale"):
            return self._read_fp8_column, "FP8 per channel"
        scale = f"w13_{self._block_scale_suffix}"
        if self._find_dtype(scale) is None:
            raise self._build_refusal()
        if len(self._reader.shape(scale)) <= 1:
            return self._read_fp8_tensor, "FP8 per tensor"
        if not self.has_fp8_blocks:
            raise self._build_refusal()
        return self._read_fp8_block, "FP8 in blocks"

    @property
    def _block_scale_suffix(self) -> str:
        """Name of the parameter with the scales of FP8 blocks, without `w13_` or `w2_`."""
        return "weight_scale_inv" if self._find_dtype("w13_weight_scale_inv") else "weight_scale"

    @property
    def has_fp8_blocks(self) -> bool:
        """Whether each block of _BLOCK columns and _BLOCK inputs of FP8 weights has one scale."""
        scale = f"w13_{self._block_scale_suffix}"
        if self._find_dtype("w13_weight") != _FP8 or self._find_dtype(scale) != torch.float32:
            return False
        columns, inputs = self._reader.shape("w13_weight")
        halves = 2 if self._shape.gated else 1  # gates and ups have blocks of their own
        blocks_per_half = -(-(columns // halves) // _BLOCK)
        return self._reader.shape(scale) == (halves * blocks_per_half, -(-inputs // _BLOCK))

    def block_scales(self, expert: int, *, w13: bool) -> torch.Tensor:
        """Returns the scales of this rank's blocks of 128 columns and 128 inputs, float32."""
        return self._read_columns_and_inputs(
            self._block_scale_suffix, expert, w13, per_column=_BLOCK, per_input=_BLOCK
        )

    def _read_bytes(self, expert: int, w13: bool) -> torch.Tensor:
        """Reads codes of 8 bits."""
        return _with_contiguous_rows(self._read_columns_and_inputs("weight", expert, w13).view(torch.uint8))

    def _read_fp8_block(self, expert: int, w13: bool) -> Coded:
        """Reads FP8 with a float32 scale for each block of 128 columns and inputs.

        The kernels need a scale for each 32 columns, so each scale is repeated.
        """
        scales = self.block_scales(expert, w13=w13).repeat_interleave(_BLOCK // SHARED_COLUMNS, 0)
        columns, _ = self._columns_and_inputs(w13)
        # This rank's columns may end inside of a block. Then the last repeated scales belong to another
        # rank's columns, and are cut off. If w13 has gates and ups, both halves of the scales are cut.
        if w13 and self._shape.gated:
            first_up, scales_per_half = len(scales) // 2, -(-columns // (2 * SHARED_COLUMNS))
            scales = torch.cat((scales[:scales_per_half], scales[first_up : first_up + scales_per_half]))
        else:
            scales = scales[: -(-columns // SHARED_COLUMNS)]
        form = Format(code=Code.FP8, scale=Scale.BLOCK_F32, group=_BLOCK)
        return self._build_coded(form, w13, self._read_bytes(expert, w13), scales=scales.contiguous())

    def _read_fp8_column(self, expert: int, w13: bool) -> Coded:
        """Reads FP8 with a scale for each column."""
        scales = self._read_column_scales(expert, w13)
        form = Format(code=Code.FP8, scale=_COLUMN_SCALES[scales.dtype])
        return self._build_coded(form, w13, self._read_bytes(expert, w13), scales=scales)

    def _read_column_scales(self, expert: int, w13: bool) -> torch.Tensor:
        """Reads one scale for each column of w13 or w2."""
        if w13:
            return self._read_columns("w13_weight_scale", expert).contiguous()
        return self._reader.read("w2_weight_scale", expert).contiguous()

    def _read_fp8_tensor(self, expert: int, w13: bool) -> Coded:
        """Reads FP8 with one scale for w2, and one scale for w13 or one each for gates and ups.

        The kernels need a scale for each column, so each scale is repeated.
        """
        columns, _ = self._columns_and_inputs(w13)
        checkpoint_scales = (
            self._reader.read("w13_weight_scale" if w13 else "w2_weight_scale", expert).float().view(-1)
        )
        scales = checkpoint_scales.repeat_interleave(columns // checkpoint_scales.numel()).view(columns, 1)
        return self._build_coded(
            Format(code=Code.FP8, scale=Scale.COLUMN_F32), w13, self._read_bytes(expert, w13), scales=scales
        )

    def _read_mxfp8(self, expert: int, w13: bool) -> Coded:
        """Reads MXFP8: FP8 with an E8M0 scale (a power of two) for each 32 inputs of a column."""
        form = Format(code=Code.FP8, scale=Scale.COLUMN_E8M0, group=32)
        scales = self._read_columns_and_inputs(
            "weight_scale", expert, w13, per_column=1, per_input=32
        ).contiguous()
        return self._build_coded(form, w13, self._read_bytes(expert, w13), scales=scales)

    def _recognize_int8(self) -> tuple[Callable[[int, bool], Coded], str]:
        """Recognizes int8 with one scale for each column."""
        if not self._has_column_scales("weight_scale"):
            raise self._build_refusal()
        return self._read_int8, "int8"

    def _read_int8(self, expert: int, w13: bool) -> Coded:
        """Reads int8 with a scale for each column."""
        scales = self._read_column_scales(expert, w13)
        return self._build_coded(
            Format(code=Code.INT8, scale=_COLUMN_SCALES[scales.dtype]),
            w13,
            self._read_bytes(expert, w13),
            scales=scales,
        )

    def _recognize_fp4(self) -> tuple[Callable[[int, bool], Coded], str]:
        """Recognizes MXFP4 and NVFP4 by the type and the number of their scales."""
        scale = self._find_dtype("w13_weight_scale")
        # vLLM's method may pad the inputs, so there may be more groups than the hidden size needs.
        groups = self._reader.shape("w13_weight_scale")[-1] if scale else 0
        if scale == torch.uint8 and groups * 32 >= self._shape.hidden:
            return self._read_mxfp4, "MXFP4"
        if scale == _FP8 and groups * 16 >= self._shape.hidden:
            return self._read_nvfp4, "NVFP4"
        raise self._build_refusal()

    def _read_fp4_codes(self, expert: int, w13: bool) -> torch.Tensor:
        """Reads codes of FP4, and cuts the padding off (extra columns and inputs)."""
        suffix = "weight" if self._find_dtype("w13_weight") else "weight_packed"
        columns, inputs = self._columns_and_inputs(w13)
        codes = self._read_columns_and_inputs(suffix, expert, w13, per_column=1, per_input=2)
        return _with_contiguous_rows(codes[:columns, : inputs // 2])

    def _read_mxfp4(self, expert: int, w13: bool) -> Coded:
        """Reads MXFP4: 4-bit floats with an E8M0 scale (a power of two) for each 32 inputs.

        Cuts off the padding of codes and scales (extra columns and inputs).
        """
        form = Format(code=Code.FP4, scale=Scale.COLUMN_E8M0, group=32)
        columns, inputs = self._columns_and_inputs(w13)
        num_scales = -(-inputs // 32)
        scales = self._read_columns_and_inputs("weight_scale", expert, w13, per_column=1, per_input=32)
        scales = scales[:columns, :num_scales].contiguous()
        return self._build_coded(form, w13, self._read_fp4_codes(expert, w13), scales=scales)

    def _read_nvfp4(self, expert: int, w13: bool) -> Coded:
        """Reads NVFP4: 4-bit floats with E4M3 scales (FP8) and float32 factors.

        Each 16 inputs of a column have a scale, which is multiplied by a factor.
        w2 has one factor. w13 has one factor, or one each for gates and ups. The kernels need a factor for
        each column, so each factor is repeated. ModelOpt stores the factors (`_scale_2`), but
        compressed-tensors stores their inverses (`_global_scale`).
        """
        form = Format(code=Code.FP4, scale=Scale.COLUMN_E4M3, group=16)
        columns, _ = self._columns_and_inputs(w13)
        part = "w13" if w13 else "w2"
        has_inverses = self._find_dtype("w13_weight_global_scale") is not None
        name = f"{part}_weight_global_scale" if has_inverses else f"{part}_weight_scale_2"
        stored_factors = self._reader.read(name, expert).float().view(-1)
        part_factors = 1 / stored_factors if has_inverses else stored_factors
        factors = part_factors.repeat_interleave(columns // part_factors.numel())
        scales = (
            self._read_columns_and_inputs("weight_scale", expert, w13, per_column=1, per_input=16)
            .contiguous()
            .view(torch.uint8)
        )
        codes = self._read_fp4_codes(expert, w13)
        return self._build_coded(form, w13, codes, scales=scales, factors=factors.contiguous())

    def _recognize_packed(self) -> tuple[Callable[[int, bool], Coded], str]:
        """Recognizes compressed-tensors' int4: each int32 word has 8 codes of one column."""
        words_per_column = self._reader.shape("w13_weight_packed")[1]
        # A checkpoint with g_idx orders its inputs by their activations. No kernel supports this.
        has_input_order = self._reader.has("w13_weight_g_idx")
        if words_per_column * _NIBBLES != self._shape.hidden or has_input_order:
            raise self._build_refusal()
        return self._read_int4_packed, "int4"

    def _read_int4_packed(self, expert: int, w13: bool) -> Coded:
        """Reads compressed-tensors' int4, with zero points if the file has them.

        The file stores unsigned codes (0 to 15). The kernels need signed numbers (-8 to 7), so this method
        subtracts 8 from codes.
        """
        part = "w13" if w13 else "w2"
        has_zeros = self._reader.has(f"{part}_weight_zero_point")
        scales_per_column = self._reader.shape(f"{part}_weight_scale")[1]
        group = self._inputs_per_scale(scales_per_column, w13, has_zeros=has_zeros)
        packed = self._read_columns_and_inputs("weight_packed", expert, w13, per_column=1, per_input=_NIBBLES)
        codes = _with_contiguous_rows(packed).view(torch.uint8) ^ _SIGNS  # subtracts 8 from each 4-bit code
        scales = self._read_group_scales("weight_scale", expert, w13, group)
        zeros = None
        if has_zeros:
            zeros = self._read_zero_points(f"{part}_weight_zero_point", expert, w13, group)
        form = Format(code=Code.INT4, scale=_COLUMN_SCALES[scales.dtype], group=group, zeros=has_zeros)
        return self._build_coded(form, w13, codes, scales=scales, zeros=zeros)

    def _read_zero_points(self, name: str, expert: int, w13: bool, group: int) -> torch.Tensor:
        """Reads the zero points of int4, int8 [columns, groups].

        The file packs zero points along the columns, [columns / 8, groups], and stores unsigned numbers (0 to
        15). This method subtracts 8.
        """
        if w13:
            packed = self._read_columns(name, expert, dim=0, per_element=_NIBBLES)
        else:
            packed = (
                self._read_inputs(name, expert, dim=1, per_element=group)
                if group
                else self._reader.read(name, expert)
            )
        unpacked = _unpack_nibbles(packed.t().contiguous()).t()
        return (unpacked.to(torch.int8) - 8).contiguous()

    def _inputs_per_scale(self, scales: int, w13: bool, *, has_zeros: bool = False) -> int:
        """Returns the number of inputs that share a scale; 0 if all inputs share one scale.

        With zero points, never returns 0, because the kernels subtract zero points from groups only.

        Args:
            scales: number of scales of a column, for the inputs of all ranks.
        """
        inputs = self._shape.hidden if w13 else self._shape.own.total
        return 0 if scales == 1 and not has_zeros else inputs // scales

    def _read_group_scales(self, suffix: str, expert: int, w13: bool, group: int) -> torch.Tensor:
        """Reads the scales of groups of inputs, [columns, groups].

        Args:
            group: inputs of a group; 0 if all inputs are one group.
        """
        if w13:
            return self._read_columns(f"w13_{suffix}", expert).contiguous()
        if not group:
            return self._reader.read(f"w2_{suffix}", expert).contiguous()
        return self._read_inputs(f"w2_{suffix}", expert, dim=1, per_element=group).contiguous()

    def _recognize_awq_or_gptq(self) -> tuple[Callable[[int, bool], Coded], str]:
        """Recognizes AWQ (codes packed along the columns) and GPTQ (packed along the inputs)."""
        words_along_inputs, hidden = self._reader.shape("w13_qweight")[0], self._shape.hidden
        if words_along_inputs == hidden:
            return self._read_awq, "int4 (AWQ)"
        if words_along_inputs * _NIBBLES == hidden:
            return self._read_gptq, "int4 (GPTQ)"
        raise self._build_refusal()

    def _read_by_group(
        self, suffix: str, expert: int, w13: bool, group: int, per_element: int
    ) -> torch.Tensor:
        """Reads a parameter [groups, columns / per_element] of AWQ or GPTQ.

        Args:
            suffix: name of the parameter after `w13_` or `w2_`.
            group: inputs of a group; 0 if all inputs are one group.
            per_element: number of columns in one element of the parameter.
        """
        if w13:
            return self._read_columns(f"w13_{suffix}", expert, dim=1, per_element=per_element)
        if not group:
            return self._reader.read(f"w2_{suffix}", expert)
        return self._read_inputs(f"w2_{suffix}", expert, dim=0, per_element=group)

    def _read_awq(self, expert: int, w13: bool) -> Coded:
        """Reads AWQ's int4 with zero points, as [columns, inputs].

        The file stores [inputs, columns], with unsigned codes and zero points (0 to 15). The kernels need
        signed numbers (-8 to 7), so this method subtracts 8 from codes and from zero points.
        """
        scales_per_column = self._reader.shape("w13_scales" if w13 else "w2_scales")[0]
        group = self._inputs_per_scale(scales_per_column, w13, has_zeros=True)
        packed = (
            self._read_columns("w13_qweight", expert, dim=1, per_element=_NIBBLES)
            if w13
            else self._read_inputs("w2_qweight", expert, dim=0)
        )
        codes = _unpack_nibbles(packed, _AWQ_ORDER).t().contiguous()
        scales = self._read_by_group("scales", expert, w13, group, 1).t().contiguous()
        unsigned_zeros = _unpack_nibbles(
            self._read_by_group("qzeros", expert, w13, group, _NIBBLES), _AWQ_ORDER
        )
        zeros = (unsigned_zeros.t().to(torch.int8) - 8).contiguous()
        form = Format(code=Code.INT4, scale=_COLUMN_SCALES[scales.dtype], group=group, zeros=True)
        signed_codes = _pack_nibbles(codes) ^ _SIGNS  # subtracts 8 from each 4-bit code
        return self._build_coded(form, w13, signed_codes, scales=scales, zeros=zeros)

    def _read_gptq(self, expert: int, w13: bool) -> Coded:
        """Reads GPTQ's int4 as [columns, inputs].

        The file stores [inputs, columns], with unsigned codes (0 to 15). The kernels need signed numbers (-8
        to 7), so this method subtracts 8 from codes.
        """
        part = "w13" if w13 else "w2"
        group = self._inputs_per_scale(self._reader.shape(f"{part}_scales")[0], w13)
        if self._reader.has(f"{part}_g_idx"):
            groups = self._reader.read(f"{part}_g_idx", expert)  # the group of each input
            if group and not torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // group):
                # The groups do not ascend, because the checkpoint orders its inputs by their activations.
                raise self._build_refusal()
        packed = (
            self._read_columns("w13_qweight", expert, dim=1)
            if w13
            else self._read_inputs("w2_qweight", expert, dim=0, per_element=_NIBBLES)
        )
        codes = packed.t().contiguous().view(torch.uint8) ^ _SIGNS  # subtracts 8 from each 4-bit code
        scales = self._read_by_group("scales", expert, w13, group, 1).t().contiguous()
        # vLLM supports only symmetric GPTQ, and ignores the zero points in its files.
        form = Format(code=Code.INT4, scale=_COLUMN_SCALES[scales.dtype], group=group)
        return self._build_coded(form, w13, codes, scales=scales)


def _check_alternating(name: str, columns_per_element: int) -> None:
    """Raises ContractError if gate and up columns alternate, but share elements of a parameter."""
    if columns_per_element > 1:
        raise ContractError(
            f"{name}: gate and up columns alternate, so each column must have an element of its own (got "
            f"{columns_per_element} columns per element). Use another checkpoint of the model, or GPU roles "
            "only"
        )


def _with_contiguous_rows(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight itself if its rows are contiguous, otherwise a copy."""
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def _unpack_nibbles(packed: torch.Tensor, order: tuple[int, ...] = tuple(range(_NIBBLES))) -> torch.Tensor:
    """Unpacks codes of 4 bits: int32 [rows, n] to uint8 [rows, 8 n].

    Args:
        order: place of each of the 8 codes in its int32; place 0 has the lowest 4 bits.
    """
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    codes = (packed.contiguous().unsqueeze(-1) >> shifts) & 0xF
    return codes.flatten(-2).to(torch.uint8)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Packs 4-bit codes [rows, n] into bytes [rows, n / 2], the first code in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
