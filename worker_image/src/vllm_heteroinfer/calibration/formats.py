"""Weight formats that plans support on CPU ranks: values in config.json, parameters of experts. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.model import SchemeName
from vllm_heteroinfer.feed_forward.recipe import ExpertParameter, LayerRecipe

GROUP_SIZE: Final = 128
"""Inputs that share a scale in AWQ, GPTQ and int4."""
SIZE: Final = 4096
"""Inputs and columns of the measured linear layers."""
_WEIGHT: Final = {"dynamic": False, "symmetric": True, "observer": "minmax", "actorder": None}
"""Values of compressed-tensors' configuration that all measured weights have."""
_PER_TOKEN: Final = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
"""compressed-tensors' configuration of inputs with a scale for each token."""
_FP8: Final = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one expert's w13 or w2, as vLLM's method for the format creates it.

    Attributes:
        name: the part of the name after `w13_` or `w2_`.
        columns_per_element: columns that one element covers; 0 if the parameter is a scalar for the whole
            matrix.
        inputs_per_element: inputs that one element covers; 0 if one element covers all inputs.
    """

    name: str
    dtype: str
    columns_per_element: int = 1
    inputs_per_element: int = 1

    def shape(self, columns: int, inputs: int) -> tuple[int, ...]:
        """Returns the parameter's shape for a matrix with these columns and inputs; () for a scalar."""
        if not self.columns_per_element:
            return ()
        num_inputs = (inputs // self.inputs_per_element) if self.inputs_per_element else 1
        return columns // self.columns_per_element, num_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A weight format and the parameters of its measurement.

    Attributes:
        method: `quant_method` in `quantization_config`, or "" for unquantized weights.
        experts: parameters of experts (feed_forward/expert_formats.py).
        transposed: whether the experts' parameters have inputs before columns.
        config: further values of `quantization_config`.
        copy: whether the measurement copies a packed layer. If not, it packs each layer again, which takes
            longer.
    """

    method: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    experts: tuple[Parameter, ...]
    transposed: bool = False
    copy: bool = True

    def layer(self, experts: int, topk: int, hidden: int, inner: int) -> LayerRecipe:
        """Returns the recipe of a layer's experts in this format, without values."""
        parameters = {}
        for part, columns, inputs in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            for parameter in self.experts:
                shape = parameter.shape(columns, inputs)
                if self.transposed:
                    shape = shape[::-1]
                parameters[f"{part}_{parameter.name}"] = ExpertParameter(
                    shape=(experts, *shape), dtype=parameter.dtype
                )
        return LayerRecipe(
            experts=experts,
            topk=topk,
            hidden=hidden,
            inner=inner,
            activation="silu",
            limit=None,
            alpha=None,
            beta=None,
            method=self.method,
            parameters=parameters,
        )


def _compressed_tensors_config(
    layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns compressed-tensors' configuration of all linear layers in one format."""
    group = {"targets": ["Linear"], "weights": {**_WEIGHT, **weights}, "input_activations": inputs}
    return {"config_groups": {"group_0": group}, "format": layout, "ignore": []}


def _grouped_weights(bits: int, kind: str, group: int, **more: Any) -> dict[str, Any]:
    """Returns compressed-tensors' description of weights that share scales in groups."""
    return {"num_bits": bits, "type": kind, "strategy": "group", "group_size": group, **more}


FORMATS: Final[Mapping[SchemeName, WeightFormat]] = MappingProxyType(
    {
        SchemeName.NONE: WeightFormat(copy=False, experts=(Parameter("weight", "bfloat16"),)),
        SchemeName.FP8_BLOCK: WeightFormat(
            method="fp8",
            config={"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            experts=(Parameter("weight", _FP8), Parameter("weight_scale_inv", "float32", 128, 128)),
        ),
        SchemeName.AWQ: WeightFormat(
            method="awq",
            config={"bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"},
            experts=(
                Parameter("qweight", "int32", 8),
                Parameter("qzeros", "int32", 8, GROUP_SIZE),
                Parameter("scales", "bfloat16", 1, GROUP_SIZE),
            ),
            transposed=True,
        ),
        SchemeName.INT4: WeightFormat(
            method="compressed-tensors",
            config=_compressed_tensors_config("pack-quantized", _grouped_weights(4, "int", GROUP_SIZE), None),
            experts=(
                Parameter("weight_packed", "int32", 1, 8),
                Parameter("weight_scale", "bfloat16", 1, GROUP_SIZE),
            ),
        ),
        SchemeName.MXFP4: WeightFormat(
            method="compressed-tensors",
            config=_compressed_tensors_config("mxfp4-pack-quantized", _grouped_weights(4, "float", 32), None),
            experts=(Parameter("weight", "uint8", 1, 2), Parameter("weight_scale", "uint8", 1, 32)),
        ),
        SchemeName.NVFP4: WeightFormat(
            method="compressed-tensors",
            config=_compressed_tensors_config(
                "nvfp4-pack-quantized",
                _grouped_weights(4, "float", 16) | {"strategy": "tensor_group"},
                _grouped_weights(4, "float", 16) | {"strategy": "tensor_group", "dynamic": "local"},
            ),
            experts=(
                Parameter("weight", "uint8", 1, 2),
                Parameter("weight_scale", _FP8, 1, 16),
                Parameter("weight_scale_2", "float32", 0),
            ),
        ),
        SchemeName.FP8_CHANNEL: WeightFormat(
            method="compressed-tensors",
            config=_compressed_tensors_config(
                "float-quantized",
                {"num_bits": 8, "type": "float", "strategy": "channel"},
                {**_PER_TOKEN, "type": "float"},
            ),
            experts=(Parameter("weight", _FP8), Parameter("weight_scale", "float32", 1, 0)),
        ),
        SchemeName.FP8_TENSOR: WeightFormat(
            method="fp8",
            config={"activation_scheme": "dynamic"},
            experts=(Parameter("weight", _FP8), Parameter("weight_scale", "float32", 0)),
        ),
        SchemeName.MXFP8: WeightFormat(
            method="compressed-tensors",
            config=_compressed_tensors_config(
                "mxfp8-quantized",
                _grouped_weights(8, "float", 32, scale_dtype="torch.uint8"),
                _grouped_weights(8, "float", 32, scale_dtype="torch.uint8", dynamic=True),
            ),
            experts=(Parameter("weight", _FP8), Parameter("weight_scale", "uint8", 1, 32)),
        ),
        SchemeName.GPTQ: WeightFormat(
            method="gptq",
            config={"bits": 4, "group_size": GROUP_SIZE, "desc_act": False, "sym": True},
            experts=(Parameter("qweight", "int32", 1, 8), Parameter("scales", "bfloat16", 1, GROUP_SIZE)),
            transposed=True,
        ),
        SchemeName.INT8: WeightFormat(
            method="compressed-tensors",
            config=_compressed_tensors_config(
                "int-quantized",
                {"num_bits": 8, "type": "int", "strategy": "channel"},
                {**_PER_TOKEN, "type": "int"},
            ),
            experts=(Parameter("weight", "int8"), Parameter("weight_scale", "float32", 1, 0)),
            copy=False,
        ),
    }
)
"""Formats in the order of measurement. A test compares them with the operator's
`vllm_support/cpu_kernels.py`."""
