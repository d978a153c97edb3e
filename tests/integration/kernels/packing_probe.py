"""Returns the bytes of vLLM's layers after their 4-bit weights are packed. `layers_probe` calls it."""

from itertools import product
from typing import Any

import torch

from heteroinfer_contract.model import SchemeName
from tests.integration.kernels.reverting import revert
from tests.integration.served_models.quantized import CONFIGS, GROUP
from tests.shapes.kernels import cpu_with
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.patches import cpu_coded, cpu_packing

INPUTS, OUTPUTS, EXPERTS = 1024, 512, 4
GROUPS = (32, 64, 128)


def packed_bytes() -> list[tuple[str, int, str, float]]:
    """Returns each case's format, group, kind of layer, and packed bytes as a share of its loaded bytes.

    vLLM builds the layers from a checkpoint's configuration, and they are packed as on a CPU rank.
    """
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.utils.torch_utils import set_default_torch_dtype

    cpu_packing.install()
    cpu_coded.install()
    found = []
    with set_default_torch_dtype(torch.bfloat16):
        for name, group in product((SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4), GROUPS):
            config, prefix = build_config(name, group), f"{name.name}.{group}"
            linear = ReplicatedLinear(
                INPUTS, OUTPUTS, bias=False, quant_config=config, prefix=f"{prefix}.up_proj"
            )
            found.append((name.value, group, "linear", part_of_loaded(linear)))
            if True in kernels_of_4_bits() and group == GROUP:  # as a rank with experts only serves them
                with cpu_with(amx=True):
                    experts = build_experts(config, prefix)
                    found.append((name.value, group, "experts", part_of_loaded(experts)))
    revert("cpu_packing")
    revert("cpu_coded")
    return found


def kernels_of_4_bits() -> tuple[bool, ...]:
    """Returns for each kernel of packed weights whether it is for AMX.

    vLLM's build for AVX2 has one kernel.
    """
    return (False, True) if hasattr(torch.ops._C, "convert_weight_packed_scale_zp") else (False,)


def build_config(name: SchemeName, group: int) -> Any:
    """Returns vLLM's configuration of a format, as vLLM makes it from config.json."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    given = dict(CONFIGS[name])
    if "config_groups" in given:
        (of_linear,) = given["config_groups"].values()
        weights = {**of_linear["weights"], "group_size": group}
        given["config_groups"] = {"group_0": {**of_linear, "weights": weights}}
    else:
        given["group_size"] = group
    methods = {SchemeName.AWQ: "auto_awq", SchemeName.GPTQ: "auto_gptq"}
    return get_quantization_config(methods.get(name, given["quant_method"])).from_config(given)


def build_experts(config: Any, prefix: str) -> Any:
    """Builds vLLM's experts of a layer."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    runner = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=INPUTS,
        intermediate_size=OUTPUTS,
        quant_config=config,
        prefix=f"{prefix}.experts",
        params_dtype=torch.bfloat16,
    )
    return runner.routed_experts


def part_of_loaded(layer: Any) -> float:
    """Returns a layer's bytes after packing, as a share of its bytes that come from a checkpoint."""
    for parameter in layer.parameters():
        parameter.data.zero_()
    # Biases of experts that no checkpoint has are dropped, and shapes are not read.
    unread = ("_bias", "weight_shape")
    loaded = sum(each.nbytes for name, each in layer.named_parameters() if not name.endswith(unread))
    layer.quant_method.process_weights_after_loading(layer)
    return weight_bytes(layer) / loaded
