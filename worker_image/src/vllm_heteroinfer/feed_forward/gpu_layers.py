"""Finds the layers whose experts a GPU can compute, with the places of the ranks' weights. Imports torch."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from heteroinfer_contract.gpu_experts import ACTIVATIONS
from vllm_heteroinfer.feed_forward.expert_reader import Range
from vllm_heteroinfer.feed_forward.offered_weights import (
    OfferedLayer,
    OfferedMatrix,
    OfferedWeights,
    dtype_of,
)
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe, Recipe
from vllm_heteroinfer.feed_forward.ring_slots import SlotContent, align

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankExperts:
    """The experts of a layer that a rank has, each with all columns or with some columns.

    Attributes:
        memory: the rank's memory, mapped by this process.
    """

    offered: OfferedLayer
    memory: torch.Tensor

    @property
    def matrices(self) -> tuple[OfferedMatrix, OfferedMatrix]:
        """w13 and w2."""
        return self.offered.w13, self.offered.w2

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in a slot."""
        return sum(matrix.expert_bytes + matrix.scale_bytes for matrix in self.matrices)

    @property
    def arrays(self) -> list[tuple[int, int]]:
        """Offset in `memory` and bytes per expert of each array: w13, w13 scales, w2, w2 scales.

        An array of scales has 0 bytes per expert if the matrix has no block scales.
        """
        arrays = []
        for matrix in self.matrices:
            scales_offset = matrix.block_scales_offset or 0
            arrays += [(matrix.offset, matrix.expert_bytes), (scales_offset, matrix.scale_bytes)]
        return arrays


@dataclass(frozen=True, slots=True)
class Load:
    """Experts that are copied into one slot, and the ranks that have them."""

    content: SlotContent
    ranks: tuple[RankExperts, ...]

    def slot_offsets(self, slot_experts: int) -> list[int]:
        """Returns where each array of each rank begins in a slot for `slot_experts` experts.

        The offsets do not depend on the number of experts in this load. So the slot of this load can also
        serve a shorter load that begins with the same expert.
        """
        offsets, next_offset = [], 0
        for rank in self.ranks:
            for _, expert_bytes in rank.arrays:
                offsets.append(next_offset)
                next_offset = align(next_offset + slot_experts * expert_bytes)
        return offsets


class GpuLayer:
    """A layer whose experts the GPU can compute."""

    def __init__(self, number: int, recipe: LayerRecipe, ranks: Sequence[RankExperts]) -> None:
        self.number, self.recipe = number, recipe
        self._ranks: dict[Range, tuple[RankExperts, ...]] = {}
        # Ranks divide a layer by columns (one span of all experts) or by experts (a span for each rank).
        for rank in ranks:
            span = (rank.offered.first_expert, rank.offered.first_expert + rank.offered.experts)
            self._ranks[span] = (*self._ranks.get(span, ()), rank)

    @property
    def spans(self) -> tuple[Range, ...]:
        """Ranges of the layer's experts. All experts of a range are on the same ranks."""
        return tuple(self._ranks)

    @property
    def kind(self) -> tuple[object, ...]:
        """Sizes, formats and the division by ranks. Layers of equal kind take the same time."""
        recipe = self.recipe
        parts = tuple(
            (span, rank.offered.first_column, *(matrix.kind for matrix in rank.matrices))
            for span, ranks in self._ranks.items()
            for rank in ranks
        )
        return (recipe.experts, recipe.inner, recipe.activation, parts)

    @property
    def expert_bytes(self) -> int:
        """Maximum number of bytes that one packed expert takes in a slot."""
        return max(sum(rank.expert_bytes for rank in ranks) for ranks in self._ranks.values())

    @property
    def max_arrays(self) -> int:
        """Maximum number of arrays that one load puts into a slot."""
        return max(sum(len(rank.arrays) for rank in ranks) for ranks in self._ranks.values())

    def dense_bytes(self, itemsize: int) -> int:
        """Bytes of an unpacked expert (gate, up and down), whose numbers have `itemsize` bytes."""
        return 3 * self.recipe.inner * self.recipe.hidden * itemsize

    def split_into_loads(self, ranges: Sequence[Range], slot_experts: int) -> Iterator[Load]:
        """Yields the experts of the ranges in loads that fit a slot.

        Args:
            ranges: a range for each of `spans`, in the same order.
        """
        for (first, end), ranks in zip(ranges, self._ranks.values(), strict=True):
            for begin in range(first, end, slot_experts):
                experts = min(slot_experts, end - begin)
                yield Load(SlotContent(layer=self.number, first=begin, experts=experts), ranks)


def find_obstacle(layer: LayerRecipe) -> str | None:
    """Returns why a GPU cannot compute a layer's experts with copied weights; None if it can."""
    if not layer.topk or layer.experts == 1:
        return "a dense layer has no experts to choose from"
    if layer.activation not in ACTIVATIONS:
        return f"the GPU's kernels compute only activations {', '.join(ACTIVATIONS)} (got {layer.activation})"
    if any(value is not None for value in (layer.limit, layer.alpha, layer.beta)):
        return f"the GPU's kernels do not compute activation {layer.activation} with limits or factors"
    return None


def _find_obstacle_of_weights(
    offered: Collection[OfferedLayer], num_ranks: int, dtype: torch.dtype
) -> str | None:
    """Returns why a GPU cannot compute a layer with the weights that ranks offer; None if it can.

    Args:
        offered: the layer's weights, of each rank that offers them.
        num_ranks: number of ranks that have a part of the layer.
        dtype: type of hidden states.
    """
    # Ranks offer every layer except those whose experts have biases or no gate (held_experts.py).
    if len(offered) < num_ranks:
        return "the experts have biases or no gate"
    matrices = [matrix for layer in offered for matrix in (layer.w13, layer.w2)]
    # Weights without a format are not packed, so nothing converts them to the type of hidden states.
    if any(matrix.format is None and dtype_of(matrix.dtype) != dtype for matrix in matrices):
        return "the experts and the hidden states have different types"
    return None


def find_gpu_layers(
    recipe: Recipe, offers: Mapping[int, OfferedWeights], map_memory: Callable[[int], torch.Tensor]
) -> dict[int, GpuLayer]:
    """Returns the layers whose experts the GPU can compute. Logs why CPUs alone compute the other layers.

    Args:
        offers: where each feed-forward rank has its weights, by rank.
        map_memory: maps a rank's memory for the GPU. Called only for ranks whose weights the GPU uses.
    """
    layers_by_rank = {rank: {layer.layer: layer for layer in offer.layers} for rank, offer in offers.items()}
    obstacles: dict[str, list[int]] = {}
    memories: dict[int, torch.Tensor] = {}
    layers = {}
    for number, layer in recipe.layers.items():
        offered = {
            rank: rank_layers[number] for rank, rank_layers in layers_by_rank.items() if number in rank_layers
        }
        obstacle = find_obstacle(layer) or _find_obstacle_of_weights(
            offered.values(), len(offers), dtype_of(recipe.dtype)
        )
        if obstacle is not None:
            obstacles.setdefault(obstacle, []).append(number)
            continue
        for rank in offered:
            if rank not in memories:
                memories[rank] = map_memory(rank)
        ranks = [RankExperts(rank_layer, memories[rank]) for rank, rank_layer in offered.items()]
        layers[number] = GpuLayer(number, layer, ranks)
    for obstacle, numbers in obstacles.items():
        _logger.warning(
            "layers %s: CPU ranks compute all experts, also of long batches, because the GPU cannot compute "
            "any (%s)",
            numbers,
            obstacle,
        )
    return layers
