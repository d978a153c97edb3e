"""Computes this rank's part of a layer on a CPU, from the slab into the slab. Imports torch, not vLLM."""

from collections.abc import Callable
from typing import Final, Protocol

import torch

from heteroinfer_contract.column_shares import Span
from vllm_heteroinfer.feed_forward.held import LoadedParts
from vllm_heteroinfer.feed_forward.held_experts import Experts

MAX_VIEWS: Final = 256
"""Views of the slab are cached for asks of at most this number of rows."""

Compute = Callable[[int], None]
"""Computes a layer for the given number of rows of the current ask."""


class AskTensors(Protocol):
    """Inputs and outputs of asks (requests to compute a layer): in a slab, or made for a measurement."""

    def first_rows(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of the first `rows` rows."""


class AskViews:
    """The slab's tensors, cut to the rows of an ask.

    Caches the views for asks of up to MAX_VIEWS rows, so that decode steps need not create views again.
    """

    def __init__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> None:
        """Takes tensors with the rows of the longest ask; `y` is this lane's answer."""
        self._longest, self.ids = (x, ids, weights, y), ids
        self._cached: dict[int, tuple[torch.Tensor, ...]] = {}

    def first_rows(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of the first `rows` rows."""
        views = self._cached.get(rows)
        if views is None:
            views = tuple(tensor[:rows] for tensor in self._longest)
            if rows <= MAX_VIEWS:
                self._cached[rows] = views
        return views


class OwnExpertAsks:
    """The asks of a rank that has some experts with all their columns.

    Experts of other ranks get ids below 0, which the kernels skip.
    """

    def __init__(self, asks: AskTensors, own: Span, rows: int) -> None:
        """Prepares memory for the ids of the longest ask.

        Args:
            asks: asks with the ids of all ranks' experts.
            own: this rank's experts.
            rows: number of rows of the longest ask.
        """
        self._asks, self._own = asks, own
        self.ids = torch.empty_like(asks.first_rows(rows)[1])

    def first_rows(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of the first `rows` rows.

        The ids count from this rank's first expert. Ids of other ranks' experts are below 0.
        """
        x, ids, weights, y = self._asks.first_rows(rows)
        # The subtraction makes the ids of earlier ranks' experts negative. The mask sets the ids of later
        # ranks' experts to -1.
        local_ids = torch.sub(ids, self._own.first, out=self.ids[:rows])
        return x, local_ids.masked_fill_(local_ids >= self._own.count, -1), weights, y


def build_compute_functions(held: LoadedParts, asks: AskTensors) -> dict[int, Compute]:
    """Returns for each layer a function that answers an ask for this layer.

    Args:
        asks: where the functions read the rows of an ask and write its answer.
    """

    def build_compute(part: Experts) -> Compute:
        """Returns a function that computes the experts `part` of one layer for an ask."""

        def compute(rows: int) -> None:
            """Computes the experts for the first `rows` rows of `asks`, and writes their sum into y."""
            x, ids, weights, y = asks.first_rows(rows)
            part.compute(y, x, weights, ids)

        return compute

    return {layer: build_compute(part) for layer, part in held.parts.items()}
