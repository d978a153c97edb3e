"""Quantizes the weights of linear layers and experts as the files of each format store them.

Imports torch inside functions only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from heteroinfer_contract.model import SchemeName
from tests.integration.served_models.cases import LAYERS

GROUP: Final = 128
"""Number of weights that share a scale in formats of 4 bits, and side of a block in FP8."""
_NIBBLES: Final = 8
"""Number of 4-bit codes in an int32."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_MOST: Final = 448.0
_MXFP4_GROUP: Final = 32
_MXFP4_EXPONENT: Final = 122
"""Exponent of 2, with the bias of 127. Random codes then have a standard deviation of 0.1."""

_FP4: Final = tuple(sign * each for sign in (1.0, -1.0) for each in (0, 0.5, 1, 1.5, 2, 3, 4, 6))
"""Values of the 4-bit codes of MXFP4."""

_LAYERS_ALONE: Final = ["lm_head"]
_ROUTERS: Final = [f"model.layers.{index}.mlp.gate" for index in range(LAYERS)]
"""Not quantized in published mixtures. vLLM would read quantized ones as weights without a scale."""

Tensors = dict[str, Any]
Quantized = tuple[Tensors, Any]
"""The tensors of a layer by the suffix of their names, and the weight that they stand for, float32 [out,
in]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A format of linear layers with random weights. Experts in this format have their own tests.

    Attributes:
        config: `quantization_config` of config.json.
        draw: name of a function of feed_forward/expert_files.py, and its arguments.
    """

    config: Mapping[str, Any]
    draw: tuple[str, Mapping[str, Any]]

    def quantize(self, weight: Any) -> Quantized:
        """Draws weights of the same shape in this format. `weight` only seeds the random numbers."""
        import torch

        from tests.integration.feed_forward import expert_files

        name, arguments = self.draw
        seed = torch.Generator().manual_seed(int(weight.double().abs().sum() * 1e3))
        stored, meant = getattr(expert_files, name)(seed, *weight.shape, **arguments)
        return stored, meant.float()


def _compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [*_LAYERS_ALONE, "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def _integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


def _floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def _in_floats(bits: int, strategy: str, group: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}
    weights |= {"group_size": group, "dynamic": False}
    return weights, {**weights, "dynamic": True}


_LOUDER: Final = 4
"""Factor of norms before drawn weights, which are smaller than those of the model."""
DRAWN: Final[Mapping[str, Drawn]] = {
    "int4 with zero points": Drawn(
        config=_compressed(
            "pack-quantized", {**_integers(4, "group", group_size=32), "symmetric": False}, None
        ),
        draw=("int4_packed", {"group": 32, "zeros": True}),
    ),
    "int8 weights alone": Drawn(
        config=_compressed("pack-quantized", _integers(8, "channel"), None),
        draw=("int8_packed", {}),
    ),
    "MXFP4": Drawn(
        config=_compressed("mxfp4-pack-quantized", _in_floats(4, "group", 32)[0], None),
        draw=("mxfp4", {"name": "weight_packed"}),
    ),
    "MXFP8": Drawn(
        config=_compressed("mxfp8-quantized", *_in_floats(8, "group", 32, scale_dtype="torch.uint8")),
        draw=("mxfp8", {}),
    ),
    "NVFP4": Drawn(
        config=_compressed(
            "nvfp4-pack-quantized",
            _in_floats(4, "tensor_group", 16)[0],
            {**_in_floats(4, "tensor_group", 16)[0], "dynamic": "local"},
        ),
        draw=("nvfp4", {"model_opt": False}),
    ),
    "FP8 of ModelOpt": Drawn(
        config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": _LAYERS_ALONE},
        draw=("fp8_tensor", {}),
    ),
    "NVFP4 of ModelOpt": Drawn(
        config={
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": _LAYERS_ALONE,
        },
        draw=("nvfp4", {"model_opt": True}),
    ),
}
"""Formats by their names in cases."""


CONFIGS: Final[Mapping[SchemeName, Mapping[str, Any]]] = {
    SchemeName.INT8: _compressed(
        "int-quantized", _integers(8, "channel", dynamic=False), _integers(8, "token", dynamic=True)
    ),
    SchemeName.FP8_CHANNEL: _compressed(
        "float-quantized", _floats("channel", dynamic=False), _floats("token", dynamic=True)
    ),
    SchemeName.FP8_TENSOR: {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": [*_LAYERS_ALONE, *_ROUTERS],
    },
    SchemeName.INT4: _compressed("pack-quantized", _integers(4, "group", group_size=GROUP), None),
    SchemeName.AWQ: {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    },
    SchemeName.GPTQ: {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    },
    SchemeName.FP8_BLOCK: {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": [*_LAYERS_ALONE, *_ROUTERS],
    },
    SchemeName.MXFP4: {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
"""`quantization_config` of config.json."""


def quantize(
    tensors: Mapping[str, Any], scheme: SchemeName, drawn: Drawn | None = None
) -> tuple[Tensors, Tensors]:
    """Returns a checkpoint's tensors with quantized layers, and the same values in float32.

    Args:
        tensors: unquantized tensors, as transformers stores them.
        scheme: one of CONFIGS.
        drawn: another format of this scheme.
    """
    if scheme is SchemeName.MXFP4 and drawn is None:
        return _experts_in_mxfp4(tensors)
    quantize_one = _LINEAR[scheme] if drawn is None else drawn.quantize
    found: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        louder = _LOUDER if drawn is not None and module.endswith("layernorm") else 1
        found[name], meant[name] = tensor * louder, tensor.float() * louder
        if last == "weight" and module.endswith("_proj"):
            del found[name]
            parts, meant[name] = quantize_one(tensor.float())
            found |= {f"{module}.{part}": each for part, each in parts.items()}
    return found, meant


def _int8(weight: Any) -> Quantized:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def _fp8_channel(weight: Any) -> Quantized:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / _FP8_MOST
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def _fp8_tensor(weight: Any) -> Quantized:
    import torch

    scale = weight.abs().max() / _FP8_MOST
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def _fp8_blocks(weight: Any) -> Quantized:
    import torch

    rows, columns = weight.shape[0] // GROUP, weight.shape[1] // GROUP
    blocks = weight.view(rows, GROUP, columns, GROUP)
    scale = blocks.abs().amax((1, 3)) / _FP8_MOST
    stored = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * wide


def _int4(weight: Any) -> Quantized:
    import torch

    codes, scale = _symmetric(weight)
    scale = scale.to(torch.bfloat16)
    stored = {
        "weight_packed": _pack(codes, dim=1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, (codes - 8) * _wide(scale)


def _gptq(weight: Any) -> Quantized:
    """Quantizes a weight to symmetric GPTQ with 4 bits."""
    import torch

    codes, scale = _symmetric(weight)
    scale = scale.half()
    zeros = torch.full(scale.T.shape, 7)  # 8, less 1, because every reader adds 1
    stored = {
        "qweight": _pack(codes.T, dim=0),
        "qzeros": _pack(zeros, dim=1),
        "scales": scale.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return stored, (codes - 8) * _wide(scale)


def _awq(weight: Any) -> Quantized:
    """Quantizes a weight to AWQ with 4 bits and a zero point for each group."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    least, most = groups.amin(2), groups.amax(2)
    scale = ((most - least) / 15).half()
    zeros = (-least / scale).round().clamp(0, 15)
    codes = ((groups / scale[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15).view(weight.shape)
    stored = {
        "qweight": _pack(_interleave(codes.T), dim=1),
        "qzeros": _pack(_interleave(zeros.T), dim=1),
        "scales": scale.T.contiguous(),
    }
    return stored, (codes - _wide(zeros)) * _wide(scale)


def _wide(scale: Any) -> Any:
    """Returns the scale of each weight, float32 [out, in]."""
    return scale.float().repeat_interleave(GROUP, 1)


def _symmetric(weight: Any) -> tuple[Any, Any]:
    """Returns codes 0..15 around 8 and the scale of each group, [out, in] and [out, groups]."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(2) / 7
    codes = (groups / scale[:, :, None]).round().clamp(-8, 7) + 8
    return codes.view(weight.shape), scale


def _interleave(codes: Any) -> Any:
    """Returns columns in AWQ's order: of eight, first those with even numbers."""
    return codes.reshape(codes.shape[0], -1, _NIBBLES)[:, :, list(_AWQ_ORDER)].reshape(codes.shape)


def _pack(codes: Any, dim: int) -> Any:
    """Packs eight 4-bit codes along a dimension into each int32, the first code in the lowest bits."""
    import torch

    rows = codes.to(torch.int64) if dim else codes.T.to(torch.int64)
    packed = torch.zeros(rows.shape[0], rows.shape[1] // _NIBBLES, dtype=torch.int64)
    for nibble in range(_NIBBLES):
        packed |= rows[:, nibble::_NIBBLES] << (4 * nibble)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return (packed if dim else packed.T).contiguous()


_LINEAR: Final[Mapping[SchemeName, Callable[[Any], Quantized]]] = {
    SchemeName.INT8: _int8,
    SchemeName.FP8_CHANNEL: _fp8_channel,
    SchemeName.FP8_TENSOR: _fp8_tensor,
    SchemeName.FP8_BLOCK: _fp8_blocks,
    SchemeName.INT4: _int4,
    SchemeName.GPTQ: _gptq,
    SchemeName.AWQ: _awq,
}


def _experts_in_mxfp4(tensors: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
    """Returns GPT-OSS's tensors with random experts: [experts, in, out] as [experts, out, groups, 16]."""
    import torch

    found: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name], meant[name] = tensor, tensor.float()
            continue
        experts, inputs, outputs = tensor.shape
        groups = (experts, outputs, inputs // _MXFP4_GROUP)
        blocks = torch.randint(0, 256, (*groups, _MXFP4_GROUP // 2), dtype=torch.uint8)
        found[f"{name}_blocks"] = blocks
        found[f"{name}_scales"] = torch.full(groups, _MXFP4_EXPONENT, dtype=torch.uint8)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).view(experts, outputs, inputs).long()
        wide = torch.tensor(_FP4)[codes] * 2.0 ** (_MXFP4_EXPONENT - 127)
        meant[name] = wide.transpose(1, 2)
    return found, meant
