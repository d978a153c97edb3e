"""A layer's routed experts that vLLM's own loader has loaded, packed for our kernels. Imports vLLM.

A CPU stage packs its experts like a feed-forward rank. But it reads them from the parameters of vLLM's method
instead of the checkpoint's files.
"""

from typing import Any

import torch

from heteroinfer_contract.column_shares import Span
from vllm_heteroinfer.feed_forward import held_experts
from vllm_heteroinfer.feed_forward.expert_reader import LayerReader, Range
from vllm_heteroinfer.feed_forward.recipe import ExpertParameter
from vllm_heteroinfer.feed_forward.recording import RemoteExperts


class LoadedReader(LayerReader):
    """Reads the parameters of a RoutedExperts of vLLM, as its method created them."""

    def __init__(self, module: Any) -> None:
        # Used only to describe the format. These experts are not remote, but in this process.
        self.recipe = RemoteExperts(module, module.quant_method).describe(
            {
                name: ExpertParameter(shape=tuple(each.shape), dtype=str(each.dtype).removeprefix("torch."))
                for name, each in module.named_parameters(recurse=False)
            }
        )
        self.read_bytes, self._module = 0, module

    def has(self, name: str) -> bool:
        """Returns whether the layer has a parameter that its format uses.

        vLLM creates the parameter for the order of inputs (`_g_idx`) even if the checkpoint has no such
        order. So the answer for this parameter comes from the method's configuration.
        """
        if name.endswith("_g_idx"):
            return _orders_inputs(self._module.quant_method)
        return self._module._parameters.get(name) is not None

    def read(self, name: str, expert: int, *ranges: Range | None) -> torch.Tensor:
        """Returns a view of a region of an expert's parameter.

        Args:
            ranges: range of indices for each dimension of the parameter; None or omitted for all indices.
        """
        values: torch.Tensor = self._module._parameters[name].data[expert]
        for dim, indices in enumerate(ranges):
            if indices is not None:
                values = values.narrow(dim, indices[0], indices[1] - indices[0])
        return values


def pack_loaded_experts(module: Any, dtype: torch.dtype) -> held_experts.Experts:
    """Packs the experts of a layer that vLLM has loaded.

    Args:
        module: vLLM's RoutedExperts.
        dtype: type of inputs and outputs.

    Raises:
        ContractError: no kernel computes the format or the activation.
    """
    reader = LoadedReader(module)
    inner, experts = reader.recipe.inner, reader.recipe.experts
    whole_layer = held_experts.OwnPart(
        columns=Span(total=inner, first=0, end=inner), experts=Span(total=experts, first=0, end=experts)
    )
    return held_experts.load_experts(reader, whole_layer, dtype)


def _orders_inputs(method: Any) -> bool:
    """Returns whether a 4-bit checkpoint orders its inputs by their activations (GPTQ's act-order)."""
    config = getattr(method, "quant_config", None)  # GPTQ has `desc_act`
    compressed_order = getattr(getattr(method, "weight_quant", None), "actorder", None)  # compressed-tensors
    return bool(getattr(config, "desc_act", False)) or compressed_order == "group"
