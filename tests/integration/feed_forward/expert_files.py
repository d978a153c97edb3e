"""Draws weights of experts as published checkpoints store them, with their values.

Imports torch. The values are computed here from the stored tensors in float64, without the code under test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of one projection by the suffix of their names, and its weight [columns, inputs] in float64."""
Draw = Callable[[torch.Generator, int, int], Stored]

FP8 = torch.float8_e4m3fn
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each place in an int32 of AWQ, its column of eight."""


def _uniform(draw: torch.Generator, *shape: int, low: float, high: float) -> torch.Tensor:
    return torch.rand(shape, generator=draw) * (high - low) + low


def _codes(draw: torch.Generator, *shape: int, end: int = 16) -> torch.Tensor:
    return torch.randint(0, end, shape, generator=draw)


def _packed(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Packs eight codes along a dimension into an int32. Place i has the code order[i]."""
    groups = codes.unflatten(dim, (-1, 8))
    total = sum(groups.select(dim + 1, column) << (4 * place) for place, column in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def _wide(scales: torch.Tensor, group: int) -> torch.Tensor:
    return scales.double().repeat_interleave(group, 1)


def plain(draw: torch.Generator, columns: int, inputs: int, *, dtype: torch.dtype) -> Stored:
    """Draws an unquantized projection."""
    weight = (torch.randn(columns, inputs, generator=draw) * inputs**-0.5).to(dtype)
    return {"weight": weight}, weight.double()


def _fp8(draw: torch.Generator, columns: int, inputs: int) -> torch.Tensor:
    return (torch.randn(columns, inputs, generator=draw) * 100).clamp(-448, 448).to(FP8)


def fp8_block(draw: torch.Generator, columns: int, inputs: int) -> Stored:
    """Draws FP8 with a scale for each block of 128 x 128, as DeepSeek-V3 and Qwen3."""
    weight = _fp8(draw, columns, inputs)
    scales = _uniform(draw, columns // 128, inputs // 128, low=3e-4, high=1e-3)
    wide = _wide(scales, 128).repeat_interleave(128, 0)
    return {"weight": weight, "weight_scale_inv": scales}, weight.double() * wide


def fp8_tensor(draw: torch.Generator, columns: int, inputs: int) -> Stored:
    """Draws FP8 with one scale for the projection and a static scale for its inputs."""
    weight, scale = _fp8(draw, columns, inputs), _uniform(draw, low=3e-4, high=1e-3)
    stored = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    return stored, weight.double() * scale.double()


def fp8_channel(draw: torch.Generator, columns: int, inputs: int) -> Stored:
    """Draws FP8 with a bf16 scale for each column, as compressed-tensors."""
    weight = _fp8(draw, columns, inputs)
    scales = _uniform(draw, columns, 1, low=3e-4, high=1e-3).bfloat16()
    return {"weight": weight, "weight_scale": scales}, weight.double() * scales.double()


def int8_channel(draw: torch.Generator, columns: int, inputs: int) -> Stored:
    """Draws int8 with a bf16 scale for each column, as compressed-tensors."""
    weight = torch.randint(-128, 128, (columns, inputs), generator=draw, dtype=torch.int8)
    scales = _uniform(draw, columns, 1, low=3e-4, high=1e-3).bfloat16()
    return {"weight": weight, "weight_scale": scales}, weight.double() * scales.double()


def int8_packed(draw: torch.Generator, columns: int, inputs: int) -> Stored:
    """Draws int8 for weights only, as compressed-tensors. 128 is added to codes; an int32 has four."""
    codes = torch.randint(0, 256, (columns, inputs), generator=draw)
    scales = _uniform(draw, columns, 1, low=3e-4, high=1e-3).bfloat16()
    groups = codes.unflatten(1, (-1, 4))
    total = sum(groups.select(2, place) << (8 * place) for place in range(4))
    stored = {
        "weight_packed": torch.where(total >= 2**31, total - 2**32, total).to(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([columns, inputs]),
    }
    return stored, (codes - 128).double() * scales.double()


def int4_packed(
    draw: torch.Generator, columns: int, inputs: int, *, group: int, zeros: bool = False
) -> Stored:
    """Draws int4, as compressed-tensors. 8 is added to codes and zero points; an int32 has eight."""
    codes = _codes(draw, columns, inputs)
    scales = _uniform(draw, columns, inputs // group, low=4e-3, high=2e-2).bfloat16()
    stored = {
        "weight_packed": _packed(codes, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([columns, inputs]),
    }
    points = torch.full((columns, inputs // group), 8)
    if zeros:
        points = _codes(draw, columns, inputs // group)
        stored["weight_zero_point"] = _packed(points, 0)
    return stored, (codes - points.repeat_interleave(group, 1)).double() * _wide(scales, group)


def awq(draw: torch.Generator, columns: int, inputs: int, *, group: int) -> Stored:
    """Draws AWQ: [inputs, columns / 8], with a zero point for each group and column."""
    codes, points = _codes(draw, inputs, columns), _codes(draw, inputs // group, columns)
    scales = _uniform(draw, inputs // group, columns, low=4e-3, high=2e-2).half()
    stored = {
        "qweight": _packed(codes, 1, _AWQ_COLUMNS),
        "qzeros": _packed(points, 1, _AWQ_COLUMNS),
        "scales": scales,
    }
    values = (codes - points.repeat_interleave(group, 0)).double()
    return stored, (values * scales.double().repeat_interleave(group, 0)).t()


def gptq(draw: torch.Generator, columns: int, inputs: int, *, group: int, stored_zero: int) -> Stored:
    """Draws symmetric GPTQ without act-order: [inputs / 8, columns].

    Args:
        stored_zero: the stored number for the zero point 8: 7 in the first version of GPTQ, 8 in the
            second.
    """
    codes = _codes(draw, inputs, columns)
    points = torch.full((inputs // group, columns), stored_zero)
    scales = _uniform(draw, inputs // group, columns, low=4e-3, high=2e-2).half()
    stored = {"qweight": _packed(codes, 0), "qzeros": _packed(points, 1), "scales": scales}
    return stored, ((codes - 8).double() * scales.double().repeat_interleave(group, 0)).t()


def _fp4(draw: torch.Generator, columns: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = _codes(draw, columns, inputs)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), _FP4[codes]


def _powers(draw: torch.Generator, columns: int, groups: int, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns exponents of E8M0 and the powers of 2 that they stand for."""
    exponents = _codes(draw, columns, groups, end=4) + low
    return (exponents + 127).to(torch.uint8), torch.exp2(exponents.double())


def mxfp4(
    draw: torch.Generator, columns: int, inputs: int, *, name: str, scales: str = "weight_scale"
) -> Stored:
    """Draws MXFP4, in which 32 numbers of 4 bits share a power of 2."""
    packed, values = _fp4(draw, columns, inputs)
    exponents, powers = _powers(draw, columns, inputs // 32, -7)
    return {name: packed, scales: exponents}, values * _wide(powers, 32)


def mxfp8(draw: torch.Generator, columns: int, inputs: int) -> Stored:
    """Draws MXFP8: 32 numbers in FP8 share a power of 2."""
    weight = _fp8(draw, columns, inputs)
    scales, powers = _powers(draw, columns, inputs // 32, -13)
    return {"weight": weight, "weight_scale": scales}, weight.double() * _wide(powers, 32)


def nvfp4(draw: torch.Generator, columns: int, inputs: int, *, model_opt: bool) -> Stored:
    """Draws NVFP4: 16 numbers of 4 bits share a scale in FP8, and one factor is for all.

    ModelOpt stores the factor, compressed-tensors its inverse.
    """
    packed, values = _fp4(draw, columns, inputs)
    scales = _uniform(draw, columns, inputs // 16, low=50, high=400).to(FP8)
    factor = _uniform(draw, low=5e-5, high=1e-4)
    if model_opt:
        stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor}
        stored["input_scale"] = torch.tensor(0.01)
        return stored, values * _wide(scales, 16) * factor.double()
    factor = (1 / factor).view(1)
    stored = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": factor}
    stored["input_global_scale"] = torch.tensor([100.0])
    return stored, values * _wide(scales, 16) / factor.double()


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> Callable[[], Any]:
    def build() -> Any:
        from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
        return compressed_tensors.CompressedTensorsConfig.from_config(
            {
                "quant_method": "compressed-tensors",
                "format": form,
                "config_groups": {"group_0": group},
                "ignore": [],
                "quantization_status": "compressed",
            }
        )

    return build


def _config(module: str, name: str, **document: Any) -> Callable[[], Any]:
    def build() -> Any:
        import importlib

        found = importlib.import_module(f"vllm.model_executor.layers.quantization.{module}")
        return getattr(found, name).from_config(document)

    return build


def _numbers(kind: str, bits: int, strategy: str, **rest: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **rest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One format of weights.

    Attributes:
        draw: draws the weights of a projection.
        config: builds vLLM's quantization configuration from the checkpoint's.
        dtype: dtype of inputs, outputs and unquantized parameters.
        unit: number of neighbouring intermediate columns that one rank must have together.
    """

    draw: Draw
    config: Callable[[], Any] = lambda: None
    dtype: torch.dtype = torch.bfloat16
    unit: int = 32


_PER_TOKEN = {"strategy": "token", "symmetric": True, "dynamic": True}
_GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "quant_method": "gptq"}


def _int4(group: int, *, symmetric: bool = True) -> Callable[[], Any]:
    weights = {**_numbers("int", 4, "group", group_size=group), "symmetric": symmetric}
    return _compressed(weights, None, "pack-quantized")


FORMATS: dict[str, Published] = {
    **{
        name: Published(
            draw=partial(plain, dtype=getattr(torch, name)),
            dtype=getattr(torch, name),
        )
        for name in ("bfloat16", "float16", "float32")
    },
    "FP8 in blocks": Published(
        draw=fp8_block,
        unit=128,
        config=_config(
            "fp8",
            "Fp8Config",
            quant_method="fp8",
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
        ),
    ),
    "FP8 per tensor": Published(
        draw=fp8_tensor,
        config=_config("fp8", "Fp8Config", quant_method="fp8", activation_scheme="static"),
    ),
    "FP8 per channel": Published(
        draw=fp8_channel,
        config=_compressed(
            _numbers("float", 8, "channel"),
            {**_PER_TOKEN, "type": "float", "num_bits": 8},
            "float-quantized",
        ),
    ),
    "int8 per channel": Published(
        draw=int8_channel,
        config=_compressed(
            _numbers("int", 8, "channel"), {**_PER_TOKEN, "type": "int", "num_bits": 8}, "int-quantized"
        ),
    ),
    **{
        f"int4, groups of {group}": Published(
            draw=partial(int4_packed, group=group),
            config=_int4(group),
            unit=group,
        )
        for group in (32, 128)
    },
    "int4, zero points": Published(
        draw=partial(int4_packed, group=128, zeros=True),
        config=_int4(128, symmetric=False),
        unit=128,
    ),
    "AWQ": Published(
        draw=partial(awq, group=128),
        unit=128,
        config=_config(
            "auto_awq", "AutoAWQConfig", bits=4, group_size=128, zero_point=True, quant_method="awq"
        ),
        dtype=torch.float16,
    ),
    **{
        name: Published(
            draw=partial(gptq, group=128, stored_zero=zero),
            config=_config("auto_gptq", "AutoGPTQConfig", sym=True, **_GPTQ),
            unit=128,
            dtype=torch.float16,
        )
        for name, zero in (("GPTQ", 7), ("GPTQ, version 2", 8))
    },
    "MXFP4 of gpt-oss": Published(
        draw=partial(mxfp4, name="blocks", scales="scales"),
        config=_config("mxfp4", "GptOssMxfp4Config"),
    ),
    "MXFP4": Published(
        draw=partial(mxfp4, name="weight"),
        config=_config("mxfp4", "Mxfp4Config"),
    ),
    "MXFP4, compressed-tensors": Published(
        draw=partial(mxfp4, name="weight_packed"),
        config=_compressed(_numbers("float", 4, "group", group_size=32), None, "mxfp4-pack-quantized"),
    ),
    "MXFP8": Published(
        draw=mxfp8,
        config=_config(
            "modelopt",
            "ModelOptMxFp8Config",
            quantization={"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []},
        ),
    ),
    "MXFP8, compressed-tensors": Published(
        draw=mxfp8,
        config=_compressed(
            _numbers("float", 8, "group", group_size=32, scale_dtype="torch.uint8"),
            {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
            "mxfp8-quantized",
        ),
    ),
    "NVFP4": Published(
        draw=partial(nvfp4, model_opt=True),
        config=_config(
            "modelopt",
            "ModelOptNvFp4Config",
            quantization={
                "quant_algo": "NVFP4",
                "group_size": 16,
                "kv_cache_quant_algo": None,
                "exclude_modules": [],
            },
        ),
    ),
    "NVFP4, compressed-tensors": Published(
        draw=partial(nvfp4, model_opt=False),
        config=_compressed(_numbers("float", 4, "tensor_group", group_size=16), None, "nvfp4-pack-quantized"),
    ),
}
"""Formats by their names in the test."""
