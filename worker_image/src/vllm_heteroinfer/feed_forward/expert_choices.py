"""Which experts of a layer the GPU computes, by their number. Imports torch."""

from collections.abc import Sequence

import torch

from vllm_heteroinfer.feed_forward.expert_reader import Range


class ExpertChoices:
    """Which experts of a layer the GPU computes, by their number. Later calls copy nothing to the device.

    The GPU takes its experts evenly from all spans, of each span the first, and more with a higher number.
    """

    def __init__(self, spans: Sequence[Range], slot_experts: int, device: torch.device) -> None:
        """Takes the ranges of experts that the same ranks have, and the most experts of a slot."""
        self._spans, self._total = spans, sum(end - first for first, end in spans)
        order = sorted(
            ((expert - first + 0.5) / (end - first), expert)
            for first, end in spans
            for expert in range(first, end)
        )
        self._taken_from = {expert: number + 1 for number, (_, expert) in enumerate(order)}
        by_id = [0, *(self._taken_from[expert] for expert in range(self._total))]
        self._taken_by_id = torch.tensor(by_id, dtype=torch.int32).to(device)
        outside = torch.full((slot_experts + 1, self._total), -1, dtype=torch.int32)
        slots = torch.arange(slot_experts, dtype=torch.int32).repeat(slot_experts + 1, 1)
        counts = torch.arange(slot_experts + 1, dtype=torch.int32).unsqueeze(1)
        self._maps = torch.cat((outside, torch.where(slots < counts, slots, -1), outside), 1).to(device)

    def ranges(self, number: int) -> list[Range]:
        """Returns the experts of each span that the GPU computes."""
        return [
            (first, first + sum(self._taken_from[expert] <= number for expert in range(first, end)))
            for first, end in self._spans
        ]

    def left(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the ids of the ranks' experts, and -1 for the GPU's experts and for padding."""
        taken_from = self._taken_by_id.index_select(0, ids.reshape(-1) + 1).view(ids.shape)
        return torch.where(taken_from <= number, -1, ids)

    def expert_map(self, first: int, experts: int) -> torch.Tensor:
        """Returns the index in a slot by expert, -1 for others: int32 [experts]."""
        begin = self._total - first
        return self._maps[experts, begin : begin + self._total]
