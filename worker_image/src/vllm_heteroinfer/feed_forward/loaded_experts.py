"""A layer's routed experts that vLLM's own loader has loaded, packed for our kernels. Imports vLLM.

A CPU stage takes its experts as a feed-forward rank does, but from the parameters of vLLM's method instead of
from the checkpoint's files.
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
        self.recipe = RemoteExperts(module, module.quant_method).describe(
            {
                name: ExpertParameter(shape=tuple(each.shape), dtype=str(each.dtype).removeprefix("torch."))
                for name, each in module.named_parameters(recurse=False)
            }
        )
        self.read_bytes, self._module = 0, module

    def has(self, name: str) -> bool:
        """Returns whether the layer has a parameter, except for an order of inputs that the format lacks."""
        if name.endswith("_g_idx"):
            return _is_reordered(self._module.quant_method)
        return self._module._parameters.get(name) is not None

    def read(self, name: str, expert: int, *ranges: Range | None) -> torch.Tensor:
        """Returns a region of an expert's parameter: a view.

        Args:
            ranges: of each dimension of the parameter; None or omitted for all indices.
        """
        found: torch.Tensor = self._module._parameters[name].data[expert]
        for dim, wanted in enumerate(ranges):
            if wanted is not None:
                found = found.narrow(dim, wanted[0], wanted[1] - wanted[0])
        return found


def hold(module: Any, dtype: torch.dtype) -> held_experts.Experts:
    """Packs the loaded experts of a layer.

    Args:
        dtype: of inputs and outputs.

    Raises:
        ContractError: no kernel computes the format or the activation.
    """
    reader = LoadedReader(module)
    inner, experts = reader.recipe.inner, reader.recipe.experts
    part = held_experts.OwnPart(
        columns=Span(total=inner, first=0, end=inner), experts=Span(total=experts, first=0, end=experts)
    )
    return held_experts.load(reader, part, dtype)


def _is_reordered(method: Any) -> bool:
    """Returns whether a checkpoint of 4 bits orders its inputs by their activations."""
    config = getattr(method, "quant_config", None)
    ordered = getattr(getattr(method, "weight_quant", None), "actorder", None)
    return bool(getattr(config, "desc_act", False)) or ordered == "group"
