"""Loads the experts and MLPs that a feed-forward rank computes, by the recipe. Imports torch, not vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from heteroinfer_contract.column_shares import Span, share_columns, share_experts
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import FeedForwardShare
from vllm_heteroinfer.feed_forward.expert_reader import ExpertReader
from vllm_heteroinfer.feed_forward.held_experts import Experts, OwnPart, load_experts
from vllm_heteroinfer.feed_forward.recipe import Recipe
from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.weight_memory import WeightMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParts:
    """The experts and MLPs that this rank has loaded and computes.

    Attributes:
        parts: the experts of each layer; an MLP counts as one expert.
        own_parts: the columns and experts of each layer that this rank has.
        own_experts: this rank's experts, the same in each layer; None if the rank has columns of each expert.
        memory: memory of the packed weights.
    """

    parts: Mapping[int, Experts]
    own_parts: Mapping[int, OwnPart]
    own_experts: Span | None
    memory: WeightMemory

    @property
    def experts(self) -> int:
        """Number of experts that this rank has in all layers together."""
        return sum(part.count for part in self.parts.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights in the kernels' format."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def method(self) -> str:
        """Formats and kernels, for the log."""
        return ", ".join(sorted({part.method for part in self.parts.values()}))


def load_parts(
    recipe: Recipe, model: Path, own: FeedForwardShare, shares: Sequence[int], index: int
) -> LoadedParts:
    """Reads and packs this rank's part of the recipe's layers.

    Args:
        own: this rank's share in the plan. It states whether ranks divide layers by experts or by columns.
        shares: shares on which the feed-forward ranks of this recipe have agreed.
        index: index of this rank in `shares`.

    Raises:
        ContractError: a file differs from the file that the asking rank read, or no kernel computes a layer.
    """
    by_experts = own.by_experts and recipe.topk > 0  # ranks always divide MLPs (topk 0) by columns
    expert_counts = {layer.experts for layer in recipe.layers.values()}
    if by_experts and len(expert_counts) > 1:
        raise ContractError(
            "feed-forward ranks: all layers must have the same number of experts, because each rank has "
            f"whole experts (got {sorted(expert_counts)}). Set feedForward.ranks: 1, and give this "
            "rank the cores and memory of all ranks"
        )
    reader, memory = ExpertReader(recipe, model), WeightMemory()
    parts, own_parts, own_experts = {}, {}, None
    with weight_memory.place_weights_in(memory):
        for number, layer in sorted(recipe.layers.items()):
            columns = Span(total=layer.inner, first=0, end=layer.inner)
            experts = Span(total=layer.experts, first=0, end=layer.experts)
            if by_experts:
                # `own_experts` is the same in each layer, because all layers have as many experts.
                experts = own_experts = share_experts(layer.experts, shares)[index]
            else:
                columns = share_columns(layer.inner, shares, recipe.unit)[index]
            own_parts[number] = OwnPart(columns=columns, experts=experts)
            parts[number] = load_experts(reader.layer(layer), own_parts[number], getattr(torch, recipe.dtype))
    reader.check_unchanged()
    memory.move_all_to_huge_pages()
    return LoadedParts(parts=parts, own_parts=own_parts, own_experts=own_experts, memory=memory)
