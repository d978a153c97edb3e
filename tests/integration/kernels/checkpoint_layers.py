"""Builds layers of int4, int8 and 4-bit floats as in checkpoints, with their weights in float64.

This code follows the formats' definitions, and uses no code of vLLM or of ours.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_COMPRESSED: Final = "compressed-tensors"
_DIVISORS: Final = ("weight_global_scale", "input_global_scale")
_SCALES: Final = ("weight_scale", "weight_scale_2", "scales", "input_scale")


def _compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Any:
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, **weights},
        "input_activations": None if inputs is None else {"symmetric": True, **inputs},
    }
    return _COMPRESSED, {"format": layout, "ignore": [], "config_groups": {"group_0": group}}


def _integers(bits: int, group: int, *, zeros: bool = False) -> Any:
    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, **strategy}
    return _compressed("pack-quantized", weights)


def _int8(of_weights: str, **inputs: Any) -> Any:
    eight = {"num_bits": 8, "type": "int"}
    return _compressed("int-quantized", {**eight, "strategy": of_weights}, {**eight, **inputs})


def _awq(group: int) -> Any:
    return "auto_awq", {"bits": 4, "group_size": group, "zero_point": True, "modules_to_not_convert": None}


def _gptq(group: int) -> Any:
    return "auto_gptq", {"bits": 4, "group_size": group, "desc_act": False, "sym": True}


def _floats(
    bits: int, strategy: str, group: int, layout: str, scale: str | None = None, **inputs: Any
) -> Any:
    each = {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "group_size": group,
        "scale_dtype": scale,
    }
    return _compressed(layout, each, {**each, "dynamic": True, **inputs})


FORMATS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "int8 channel": _int8("channel", strategy="token", dynamic=True),
    "int8 tensor, static inputs": _int8("tensor", strategy="tensor", dynamic=False),
    "int8 channel, inputs with zero points": _int8(
        "channel", strategy="token", dynamic=True, symmetric=False
    ),
    "int8 weights alone": _integers(8, 128),
    "int8 weights alone, zero points": _integers(8, 128, zeros=True),
    "int4 channel": _integers(4, -1),
    "int4 32": _integers(4, 32),
    "int4 64": _integers(4, 64),
    "int4 128": _integers(4, 128),
    "int4 32 zeros": _integers(4, 32, zeros=True),
    "int4 128 zeros": _integers(4, 128, zeros=True),
    "awq 32": _awq(32),
    "awq 64": _awq(64),
    "awq 128": _awq(128),
    "gptq 32": _gptq(32),
    "gptq 128": _gptq(128),
    "mxfp4": _floats(4, "group", 32, "mxfp4-pack-quantized"),
    "mxfp8": _floats(8, "group", 32, "mxfp8-quantized", "torch.uint8"),
    "nvfp4": _floats(4, "tensor_group", 16, "nvfp4-pack-quantized", dynamic="local"),
    "nvfp4 of modelopt": ("modelopt_fp4", {"quant_algo": "NVFP4", "group_size": 16, "ignore": []}),
}


def fill(layer: torch.nn.Module, draw: torch.Generator) -> None:
    """Writes random values, as a checkpoint may have them, into a layer's parameters."""
    for name, parameter in layer.named_parameters():
        data = parameter.data
        if name.endswith(("_zero_point", "qzeros")) or data.dtype == torch.int32:
            words = torch.randint(-(2**31), 2**31, data.shape, generator=draw, dtype=torch.int64)
            data.copy_(words.to(torch.int32))
        elif name == "weight_scale" and data.dtype == torch.uint8:
            data.copy_(torch.randint(115, 122, data.shape, generator=draw, dtype=torch.uint8))
        elif name == "weight_scale" and data.dtype == torch.float8_e4m3fn:
            data.copy_((torch.rand(data.shape, generator=draw) * 4 + 0.5).to(data.dtype))
        elif name in _DIVISORS:  # joined layers have a value for each of them
            data.copy_(torch.rand(data.shape, generator=draw) * 64 + 32)
        elif name in _SCALES:
            data.copy_(torch.rand(data.shape, generator=draw) / 50 + 0.001)
        elif data.dtype == torch.float8_e4m3fn:
            data.copy_((torch.randn(data.shape, generator=draw) * 100).to(data.dtype))
        elif data.dtype in {torch.uint8, torch.int8}:
            data.copy_(torch.randint(0, 256, data.shape, generator=draw, dtype=torch.int64).to(data.dtype))


def dense(layer: torch.nn.Module, name: str, widths: tuple[int, ...]) -> torch.Tensor:
    """Returns a filled layer's weight [columns, inputs] in float64."""
    kind, config = FORMATS[name]
    if kind == "auto_awq":
        return _awq_weight(layer)
    if kind == "auto_gptq":
        codes = _fields(layer.qweight.data.t(), 4) - 8
        return codes.double() * _spread(layer.scales.data.t(), codes.shape[1])
    if hasattr(layer, "weight_shape"):
        return _packed_integers(layer, config["config_groups"]["group_0"]["weights"]["num_bits"])
    if name.startswith("nvfp4"):
        return _nvfp4_weight(layer, widths)
    scales = layer.weight_scale.data
    if name in {"mxfp4", "mxfp8"}:
        codes = _fp4(layer.weight_packed.data) if name == "mxfp4" else layer.weight.data.double()
        return codes * (2.0 ** (scales.double() - 127)).repeat_interleave(32, 1)
    if scales.ndim == 1:
        scales = scales.repeat_interleave(torch.tensor(widths)).view(-1, 1)
    return layer.weight.data.double() * scales.double()


def _packed_integers(layer: Any, bits: int) -> torch.Tensor:
    """Returns the weight of a layer in packed integers of compressed-tensors."""
    codes = _fields(layer.weight_packed.data, bits).double()
    if hasattr(layer, "weight_zero_point"):
        zeros = _fields(layer.weight_zero_point.data.t(), bits).t()
        codes -= _spread(zeros, codes.shape[1])
    else:
        codes -= 1 << (bits - 1)
    return codes * _spread(layer.weight_scale.data, codes.shape[1])


def _nvfp4_weight(layer: Any, widths: tuple[int, ...]) -> torch.Tensor:
    """Returns the weight of a layer in NVFP4. ModelOpt stores the factor, compressed-tensors its inverse."""
    by_modelopt = hasattr(layer, "weight_scale_2")
    codes = layer.weight.data if by_modelopt else layer.weight_packed.data
    factors = layer.weight_scale_2.data if by_modelopt else 1 / layer.weight_global_scale.data.double()
    factors = factors.double().repeat_interleave(torch.tensor(widths)).view(-1, 1)
    return _fp4(codes) * layer.weight_scale.data.double().repeat_interleave(16, 1) * factors


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the unsigned fields of int32 words, the lowest first: [rows, words * 32 / bits]."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _awq_weight(layer: Any) -> torch.Tensor:
    places = torch.tensor([8 * word + _AWQ_ORDER.index(i) for word in range(1000) for i in range(8)])

    def columns(words: torch.Tensor) -> torch.Tensor:
        fields = _fields(words, 4)
        return fields[:, places[: fields.shape[1]]]

    codes, zeros = columns(layer.qweight.data), columns(layer.qzeros.data)
    group = codes.shape[0] // zeros.shape[0]
    values = (codes - zeros.repeat_interleave(group, 0)).double()
    return (values * layer.scales.data.double().repeat_interleave(group, 0)).t()


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*_FP4, *(-size for size in _FP4)], dtype=torch.float64)
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]


def _spread(groups: torch.Tensor, inputs: int) -> torch.Tensor:
    return groups.double().repeat_interleave(inputs // groups.shape[1], 1)
