"""Computes experts on the GPU with vLLM's kernel. Imports torch and vLLM.

The weights are in a slot: a part of the GPU's ring (weight_ring.py) with copies of some experts of a layer.

Source: vllm/model_executor/layers/fused_moe/fused_moe.py::fused_experts,
vllm/model_executor/layers/fused_moe/fused_moe.py::try_get_optimal_moe_config@v0.32.0.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn.functional import pad
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import _get_config_dtype_str
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts, try_get_optimal_moe_config

from vllm_heteroinfer.feed_forward.recipe import LayerRecipe
from vllm_heteroinfer.feed_forward.stream_balance import first_of_each_kind

ROW_UNIT: Final = 16
"""Rows are padded to a multiple of this number. For other numbers, Triton compiles the kernel again."""


def pad_rows(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Appends rows of zeros up to a multiple of ROW_UNIT rows. Returns rows, ids and weights.

    Added rows have weight 0, so they do not change the result.
    """
    num_added = -x.shape[0] % ROW_UNIT
    if not num_added:
        return x, ids, weights
    padding = (0, 0, 0, num_added)  # torch's order: columns before and after, rows before and after
    return pad(x, padding), pad(ids, padding), pad(weights, padding)


def compute_slot(
    recipe: LayerRecipe,
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    expert_map: torch.Tensor,
) -> torch.Tensor:
    """Returns each row's sum over the slot's experts, [padded rows, hidden].

    Args:
        rows: the result of `pad_rows`.
        expert_map: int32 [experts]: index of each expert of the layer in the slot; -1 if the slot lacks the
            expert.
    """
    x, ids, weights = rows
    return fused_experts(
        x,
        w13,
        w2,
        weights,
        ids,
        activation=MoEActivation.from_str(recipe.activation),
        global_num_experts=recipe.experts,
        expert_map=expert_map,
    )


def rows_of_each_kernel(
    recipe: LayerRecipe, slot_experts: int, dtype: torch.dtype, possible_rows: Sequence[int]
) -> list[int]:
    """Returns one number of rows for each kernel that vLLM would compile for the possible numbers.

    If a caller computes a slot once with each returned number, vLLM has compiled all kernels before requests
    need them.

    Args:
        slot_experts: number of experts in a slot.
        possible_rows: numbers of rows that a batch may have, multiples of ROW_UNIT.
    """

    def kernel_settings(num_rows: int) -> object:
        """Returns vLLM's settings of the kernel for a number of rows. Equal settings mean the same kernel."""
        settings: dict[str, object] = try_get_optimal_moe_config(
            (slot_experts, 2 * recipe.inner, recipe.hidden),  # shape of w13
            (slot_experts, recipe.hidden, recipe.inner),  # shape of w2
            recipe.topk,
            _get_config_dtype_str(dtype),
            num_rows,
        )
        return tuple(sorted(settings.items()))

    return first_of_each_kind(kernel_settings, possible_rows)
