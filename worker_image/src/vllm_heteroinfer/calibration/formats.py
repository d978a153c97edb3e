"""Weight formats that a plan supports on CPU ranks, each with its values in config.json. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.model import SchemeName

GROUP: Final = 128
_WEIGHT: Final = {"dynamic": False, "symmetric": True, "observer": "minmax", "actorder": None}
_PER_TOKEN: Final = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A weight format and the parameters of its measurement.

    Attributes:
        method: `quant_method` in `quantization_config`, or "" for unquantized weights.
        linear: whether vLLM has a linear kernel for this format on CPUs.
        experts: whether vLLM has a kernel for experts in this format on CPUs.
        size: number of inputs and of columns of the measured linear layer.
        copy: whether the measurement copies a packed layer. If not, it packs each layer, which takes longer.
    """

    method: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    linear: bool = True
    experts: bool = True
    size: int = 4096
    copy: bool = True


def _compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**_WEIGHT, **weights}, "input_activations": inputs}
    return {"config_groups": {"group_0": group}, "format": layout, "ignore": []}


FORMATS: Final[Mapping[SchemeName, WeightFormat]] = MappingProxyType(
    {
        SchemeName.NONE: WeightFormat(copy=False),
        SchemeName.AWQ: WeightFormat(
            method="awq", config={"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
        ),
        SchemeName.FP8_BLOCK: WeightFormat(
            method="fp8", config={"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        ),
        SchemeName.GPTQ: WeightFormat(
            method="gptq", config={"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
        ),
        SchemeName.INT4: WeightFormat(
            method="compressed-tensors",
            config=_compressed(
                "pack-quantized",
                {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
                None,
            ),
        ),
        SchemeName.INT8: WeightFormat(
            method="compressed-tensors",
            config=_compressed(
                "int-quantized",
                {"num_bits": 8, "type": "int", "strategy": "channel"},
                {**_PER_TOKEN, "type": "int"},
            ),
            copy=False,
        ),
        SchemeName.MXFP4: WeightFormat(method="mxfp4", linear=False),
        SchemeName.FP8_CHANNEL: WeightFormat(
            method="compressed-tensors",
            config=_compressed(
                "float-quantized",
                {"num_bits": 8, "type": "float", "strategy": "channel"},
                {**_PER_TOKEN, "type": "float"},
            ),
            experts=False,
        ),
        SchemeName.FP8_TENSOR: WeightFormat(
            method="fp8", config={"activation_scheme": "dynamic"}, experts=False
        ),
    }
)
"""In the order of measurement. A test compares them with the operator's `vllm_support/cpu_ranks.py`."""
