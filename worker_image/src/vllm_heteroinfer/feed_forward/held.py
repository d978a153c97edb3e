"""The feed-forward parts that a rank holds: experts by the recipe, or MLPs. Imports torch, not vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteroinfer_contract.column_shares import Span, share_experts, share_out, unit_of
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model.scheme import find_quantization
from heteroinfer_contract.plan import FeedForwardShare
from vllm_heteroinfer.feed_forward.expert_reader import ExpertReader
from vllm_heteroinfer.feed_forward.held_experts import OwnPart, load
from vllm_heteroinfer.feed_forward.recipe import Recipe
from vllm_heteroinfer.feed_forward.remote_parts import check_one_size
from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.weight_memory import WeightMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParts:
    """The parts of a model that this rank computes.

    Attributes:
        parts: layer -> its `held_experts.Experts`, or its MLP.
        experts: experts that this rank has in all layers together; 0 for MLPs.
        hidden: elements per row.
        topk: experts per row; 0 without experts.
        stored_bytes: bytes of all weights in the kernels' format.
        own_experts: this rank's experts in each layer; None if it has a part of each expert.
        method: formats and kernels, for the log.
    """

    parts: Mapping[int, Any]
    experts: int
    hidden: int
    topk: int
    stored_bytes: int
    own_experts: Span | None
    method: str
    memory: WeightMemory


def column_unit(config: Any) -> int:
    """Returns the columns of an expert or MLP that must stay together, by vLLM's configuration."""
    model = config.model_config
    return unit_of(find_quantization(vars(model.hf_config), vars(model.hf_text_config)))


def hold_experts(
    config: Any, recipe: Recipe, own: FeedForwardShare, shares: Sequence[int], lane: int
) -> HeldParts:
    """Reads and packs this rank's part of the recipe's layers.

    Args:
        config: vLLM's configuration.
        shares: agreed shares of the stage's feed-forward ranks.
        lane: number of this rank among them.

    Raises:
        ContractError: the recipe lacks a planned layer, a file differs from the asking rank's file, or no
            kernel computes the experts.
    """
    planned = set(own.layers)
    if planned != set(recipe.layers):
        raise ContractError(
            f"feed-forward ranks: the plan gives them layers {sorted(planned)}, but layers "
            f"{sorted(recipe.layers)} have routed experts. Give them layers of one kind"
        )
    layers = list(recipe.layers.values())
    check_one_size({layer.hidden for layer in layers}, {layer.topk for layer in layers})
    counts = {layer.experts for layer in layers}
    if own.by_experts and len(counts) > 1:
        raise ContractError(
            f"feed-forward ranks: layers have {sorted(counts)} experts, but ranks with whole experts need "
            "one number. Set feedForward.ranks: 1, with the cores and memory of all"
        )
    reader, memory, unit = (
        ExpertReader(recipe, Path(config.model_config.model)),
        WeightMemory(),
        column_unit(config),
    )
    parts, own_experts = {}, None
    with weight_memory.used(memory):
        for number, layer in sorted(recipe.layers.items()):
            every, whole = Span(total=layer.inner, first=0, end=layer.inner), None
            if own.by_experts:
                whole = own_experts = share_experts(layer.experts, shares)[lane]
            else:
                every = share_out(layer.inner, shares, unit)[lane]
            part = OwnPart(
                columns=every, experts=whole or Span(total=layer.experts, first=0, end=layer.experts)
            )
            parts[number] = load(reader.layer(layer), part, config.model_config.dtype)
    memory.gather_all_pages()
    return HeldParts(
        parts=parts,
        experts=sum(part.count for part in parts.values()),
        hidden=layers[0].hidden,
        topk=layers[0].topk,
        stored_bytes=sum(part.num_bytes for part in parts.values()),
        own_experts=own_experts,
        method=", ".join(sorted({part.method for part in parts.values()})),
        memory=memory,
    )
