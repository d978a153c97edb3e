"""Selects the experts of a layer that the GPU computes, for each number of experts. Imports torch."""

from collections.abc import Sequence

import torch

from vllm_heteroinfer.feed_forward.expert_reader import Range


class ExpertChoices:
    """Selects the experts of a layer that the GPU computes, for each number of experts.

    The GPU takes the first experts of each span (a range of experts), in proportion to the span's length. A
    larger number of experts includes the experts of each smaller number. Tables for all numbers are on the
    device from the start, so that no call copies to the device.
    """

    def __init__(self, spans: Sequence[Range], slot_experts: int, device: torch.device) -> None:
        """Builds the tables for each possible number of GPU experts, and copies them to the device.

        Args:
            spans: ranges of experts, which together are all experts of the layer. The experts of a range are
                on the same ranks.
            slot_experts: maximum number of experts in a slot of the ring.
        """
        self._spans, self._total = spans, sum(end - first for first, end in spans)
        # Sorted by the relative place in the span (0 to 1). So the first n experts of this list are about the
        # same share (n / total) of every span.
        places_in_spans = sorted(
            ((expert - first + 0.5) / (end - first), expert)
            for first, end in spans
            for expert in range(first, end)
        )
        # Expert -> smallest number of GPU experts with which the GPU computes this expert.
        self._least_number = {expert: number for number, (_, expert) in enumerate(places_in_spans, 1)}
        # The first entry is for the id of padding, -1. Its least number is 0, so padding is always masked.
        by_id = [0, *(self._least_number[expert] for expert in range(self._total))]
        self._least_number_by_id = torch.tensor(by_id, dtype=torch.int32).to(device)
        self._maps = _build_maps(slot_experts, self._total).to(device)

    def gpu_ranges(self, gpu_experts: int) -> list[Range]:
        """Returns for each span the experts that the GPU computes, if it computes `gpu_experts` in all."""
        return [
            (first, first + sum(self._least_number[expert] <= gpu_experts for expert in range(first, end)))
            for first, end in self._spans
        ]

    def mask_gpu_experts(self, ids: torch.Tensor, gpu_experts: int) -> torch.Tensor:
        """Returns the ids for the ranks: -1 for the `gpu_experts` experts of the GPU, and for padding."""
        least_number = self._least_number_by_id.index_select(0, ids.reshape(-1) + 1).view(ids.shape)
        return torch.where(least_number <= gpu_experts, -1, ids)

    def expert_map(self, first: int, experts: int) -> torch.Tensor:
        """Returns each expert's index in a slot with `experts` experts from `first` on; -1 for others.

        The result is int32 [experts of the layer].
        """
        begin = self._total - first  # so that index 0 is at the slot's first expert
        return self._maps[experts, begin : begin + self._total]


def _build_maps(slot_experts: int, num_experts: int) -> torch.Tensor:
    """Returns the rows of which `expert_map` returns a part.

    Row n is for a slot with n experts: the indices 0 to n - 1, with -1 before and after them.

    Args:
        slot_experts: maximum number of experts in a slot.
        num_experts: number of experts in the layer.
    """
    outside = torch.full((slot_experts + 1, num_experts), -1, dtype=torch.int32)
    indices = torch.arange(slot_experts, dtype=torch.int32).repeat(slot_experts + 1, 1)
    counts = torch.arange(slot_experts + 1, dtype=torch.int32).unsqueeze(1)
    return torch.cat((outside, torch.where(indices < counts, indices, -1), outside), 1)
