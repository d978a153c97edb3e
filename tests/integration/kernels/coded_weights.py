"""Draws random weights in each format of checkpoints, with their values in float64."""

from typing import Final

import torch

from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, Code, Coded, Format, Scale

FORMATS: Final = {
    "bf16": Format(code=Code.BF16),
    "float16": Format(code=Code.F16),
    "fp8 block": Format(code=Code.FP8, scale=Scale.BLOCK_F32, group=128),
    "fp8 channel": Format(code=Code.FP8, scale=Scale.COLUMN_F32),
    "int8 channel": Format(code=Code.INT8, scale=Scale.COLUMN_F32),
    "int8 128": Format(code=Code.INT8, scale=Scale.COLUMN_BF16, group=128),
    "int4 32": Format(code=Code.INT4, scale=Scale.COLUMN_BF16, group=32),
    "int4 64": Format(code=Code.INT4, scale=Scale.COLUMN_F16, group=64),
    "int4 128": Format(code=Code.INT4, scale=Scale.COLUMN_F16, group=128),
    "int4 channel": Format(code=Code.INT4, scale=Scale.COLUMN_BF16),
    "int4 32 zeros": Format(code=Code.INT4, scale=Scale.COLUMN_BF16, group=32, zeros=True),
    "int4 128 zeros": Format(code=Code.INT4, scale=Scale.COLUMN_F16, group=128, zeros=True),
    "mxfp4": Format(code=Code.FP4, scale=Scale.COLUMN_E8M0, group=32),
    "mxfp8": Format(code=Code.FP8, scale=Scale.COLUMN_E8M0, group=32),
    "nvfp4": Format(code=Code.FP4, scale=Scale.COLUMN_E4M3, group=16),
}
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_NAN: Final = 127


def draw_coded(draw: torch.Generator, form: Format, columns: int, inputs: int) -> Coded:
    """Draws a weight with all codes except NaN, including denormal ones."""

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)

    if form.code in {Code.BF16, Code.F16}:
        dtype = torch.bfloat16 if form.code == Code.BF16 else torch.float16
        codes = torch.randn(columns, inputs, generator=draw).to(dtype)
    elif form.code in {Code.INT4, Code.FP4}:
        codes = bytes_of(columns, -(-inputs // 2))
    else:
        codes = bytes_of(columns, inputs)
        if form.code == Code.FP8:
            codes[codes % 128 == _FP8_NAN] = 3
    groups, scales, zeros, factors = form.groups(inputs), None, None, None
    if form.scale:
        rows = -(-columns // SHARED_COLUMNS) if form.scale == Scale.BLOCK_F32 else columns
        size = torch.rand(rows, groups, generator=draw) + 0.1
        if form.scale == Scale.COLUMN_E8M0:
            scales = torch.randint(120, 130, (rows, groups), generator=draw, dtype=torch.uint8)
        elif form.scale == Scale.COLUMN_E4M3:
            scales = torch.randint(1, 120, (rows, groups), generator=draw, dtype=torch.uint8)
            factors = torch.rand(columns, generator=draw) / 64
        else:
            types = {Scale.COLUMN_BF16: torch.bfloat16, Scale.COLUMN_F16: torch.float16}
            scales = size.to(types.get(form.scale, torch.float32))
    if form.zeros:
        zeros = torch.randint(-8, 9, (columns, groups), generator=draw, dtype=torch.int8)
    return Coded(
        format=form, columns=columns, inputs=inputs, codes=codes, scales=scales, zeros=zeros, factors=factors
    )


def widen(weight: Coded) -> torch.Tensor:  # noqa: C901 - one case for each format
    """Returns the weight [columns, inputs] in float64."""
    form, codes = weight.format, weight.codes
    if form.code in {Code.INT4, Code.FP4}:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : weight.inputs].long()
        table = torch.tensor([*_FP4, *(-size for size in _FP4)], dtype=torch.float64)
        if form.code == Code.INT4:
            table = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float64)
        values = table[nibbles]
    elif form.code == Code.FP8:
        values = codes.contiguous().view(torch.float8_e4m3fn).double()
    elif form.code == Code.INT8:
        values = codes.contiguous().view(torch.int8).double()
    else:
        values = codes.double()

    def spread(groups: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(form.group or weight.inputs, 1)[:, : weight.inputs]

    if weight.zeros is not None:
        values = values - spread(weight.zeros.double())
    if weight.scales is None:
        return values
    if form.scale == Scale.COLUMN_E8M0:
        scales = torch.where(weight.scales == 255, torch.nan, 2.0 ** (weight.scales.double() - 127))
    elif form.scale == Scale.COLUMN_E4M3:
        assert weight.factors is not None
        scales = weight.scales.view(torch.float8_e4m3fn).double() * weight.factors.double()[:, None]
    else:
        scales = weight.scales.double()
    if form.scale == Scale.BLOCK_F32:
        scales = scales.repeat_interleave(SHARED_COLUMNS, 0)[: weight.columns]
    return values * spread(scales)
