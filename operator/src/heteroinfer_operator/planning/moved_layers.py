"""Orders the layers whose experts or MLPs feed-forward ranks may compute, and spreads the choice. Pure."""

from collections.abc import Sequence
from itertools import chain, groupby

from heteroinfer_contract.model_profile import ModelProfile


def group_by_cost(profile: ModelProfile) -> list[list[int]]:
    """Returns the layers with experts or an MLP in groups of equal cost, the cheapest group first.

    The cost of a layer is the part of its weights that a step of one token reads. A model with experts
    contributes only its layers with experts, because feed-forward ranks do not support its dense MLPs
    (vllm_heteroinfer/feed_forward/held.py).
    """

    def cost(index: int) -> float:
        kind = profile.layer(index)
        bytes_read = kind.expected_experts(1) * kind.expert_bytes if kind.experts else kind.mlp_bytes
        return bytes_read / kind.feed_forward_bytes

    indices = [index for index, kind in enumerate(profile.layers) if kind.feed_forward_bytes]
    with_experts = [index for index in indices if profile.layer(index).experts]
    return [list(group) for _, group in groupby(sorted(with_experts or indices, key=cost), key=cost)]


def choose_layers(groups: Sequence[Sequence[int]], count: int | None = None) -> list[int]:
    """Returns `count` layers: all layers of the cheapest groups, and layers spread over the next group.

    In long prompts the GPU copies experts of these layers, and it can copy while it computes the layers in
    between. So each layer in the result is the last of an equal part of its group: the distances differ by at
    most one layer, also from the last layer of a step to the first layer of the next step. A smaller `count`
    may therefore give layers that a larger `count` does not give.

    Args:
        groups: the result of `group_by_cost`.
        count: at most the number of layers in all groups; None for all layers.
    """
    if count is None:
        return list(chain.from_iterable(groups))
    chosen: list[int] = []
    for group in groups:
        chosen += spread_evenly(group, min(count - len(chosen), len(group)))
    return chosen


def spread_evenly(layers: Sequence[int], count: int) -> list[int]:
    """Returns the last layer of each of `count` equal parts of a sequence."""
    return [layers[(part + 1) * len(layers) // count - 1] for part in range(count)]
