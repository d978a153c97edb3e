"""Computes a layer's part on a CPU; input and output are in the slab. Imports vLLM; for CPU ranks only."""

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from heteroinfer_contract.column_shares import Span
from vllm_heteroinfer.feed_forward.skeleton import Skeleton
from vllm_heteroinfer.kernels.experts import experts
from vllm_heteroinfer.kernels.library import KernelLibrary
from vllm_heteroinfer.patches.cpu_experts import check_limit, library_of, packed_experts

MOST_VIEWS: Final = 256
"""Largest row count whose views of the slab are cached."""

Compute = Callable[[int], None]


class AskTensors(Protocol):
    """Inputs and outputs of asks, in a slab or for a measurement."""

    def of(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of the first `rows` rows."""


class Views:
    """Views of a lane's tensors with the rows of an ask; caches those of small asks."""

    def __init__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> None:
        """Takes tensors with the rows of the longest ask; `y` is this lane's answer."""
        self._whole, self.ids = (x, ids, weights, y), ids
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def of(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of the first `rows` rows."""
        views = self._kept.get(rows)
        if views is None:
            views = tuple(tensor[:rows] for tensor in self._whole)
            if rows <= MOST_VIEWS:
                self._kept[rows] = views
        return views


class OwnExperts:
    """Asks to a rank with whole experts; ignores choices of other ranks' experts.

    HeteroInfer's kernels skip such choices. Other kernels cannot, so each one is replaced by a choice with
    weight 0 of one of this rank's experts in the same row, whose weights are read anyway. In a row without
    an expert of this rank it is replaced by an arbitrary expert, and the row's answer is set to 0.
    """

    def __init__(self, asks: AskTensors, own: Span, rows: int) -> None:
        """Takes asks with ids of all ranks' experts; `rows` is the length of the longest ask."""
        self._asks, self._own = asks, own
        _, ids, weights, _ = asks.of(rows)
        self.ids, self._weights = torch.empty_like(ids), torch.empty_like(weights)

    def of(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of the first `rows` rows, ids counting from this rank's first."""
        x, ids, weights, y = self._asks.of(rows)
        local = ids - self._own.first
        here = (local >= 0) & (local < self._own.count)
        some = local.gather(1, here.to(torch.uint8).argmax(1, keepdim=True)).clamp_(0, self._own.count - 1)
        torch.where(here, local, some, out=self.ids[:rows])
        torch.mul(weights, here, out=self._weights[:rows])
        return x, self.ids[:rows], self._weights[:rows], y

    def chosen(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Returns the same as `of`, but with ids below 0 for other ranks' experts, and unchanged weights."""
        x, ids, weights, y = self._asks.of(rows)
        local = torch.sub(ids, self._own.first, out=self.ids[:rows])
        return x, local.masked_fill_(local >= self._own.count, -1), weights, y

    def computing(self, compute: Compute) -> Compute:
        """Wraps `compute` so that rows without an expert of this rank get the answer 0."""

        def computed(rows: int) -> None:
            compute(rows)
            *_, y = self._asks.of(rows)
            y.masked_fill_((self._weights[:rows] == 0).all(1, keepdim=True), 0.0)

        return computed


def computes(skeleton: Skeleton, asks: AskTensors) -> dict[int, Compute]:
    """Returns for each layer a function that computes an ask, given its number of rows."""
    return {layer: compute_of(part, asks) for layer, part in skeleton.parts.items()}


def compute_of(part: Any, asks: AskTensors) -> Compute:
    """Returns a function that computes an ask by a layer's part with its current weights."""
    compute = _any_part(part, asks)
    return asks.computing(compute) if isinstance(asks, OwnExperts) and library_of(part) is None else compute


def _any_part(part: Any, asks: AskTensors) -> Compute:
    if not isinstance(part, RoutedExperts):
        return _mlp(part, asks)
    kernel = part.quant_method.moe_kernel
    vllms = None if kernel is None else kernel.fused_experts
    if isinstance(vllms, CPUUnquantizedExperts | CPUExpertsFp8):
        check_limit(vllms)
    library = library_of(part)
    if library is not None:
        return _ours(part, vllms, library, asks)
    if isinstance(vllms, CPUUnquantizedExperts) and not vllms._use_zentorch:
        return _unquantized(part, vllms, asks)
    return _any_experts(part, asks)


def _unquantized(part: Any, vllms: Any, asks: AskTensors) -> Compute:
    """Does the same as `CPUUnquantizedExperts.apply`, but without a copy or an allocation."""
    call = torch.ops._C.cpu_fused_moe
    w13, w2 = part.w13_weight.data, part.w2_weight.data
    bias13, bias2 = vllms.w1_bias, vllms.w2_bias
    activation, isa = part.activation.value, vllms.isa

    def compute(rows: int) -> None:
        x, ids, weights, y = asks.of(rows)
        call(y, x, w13, w2, bias13, bias2, weights, ids, False, activation, isa)

    return compute


def _ours(part: Any, vllms: Any, library: KernelLibrary, asks: AskTensors) -> Compute:
    packed = packed_experts(vllms, part.w13_weight.data, part.w2_weight.data)
    of = asks.chosen if isinstance(asks, OwnExperts) else asks.of

    def compute(rows: int) -> None:
        x, ids, weights, y = of(rows)
        experts(library, y, x, packed, weights=weights, ids=ids)

    return compute


def _any_experts(part: Any, asks: AskTensors) -> Compute:
    method = part.quant_method

    def compute(rows: int) -> None:
        x, ids, weights, y = asks.of(rows)
        # Clones the input, because some kernels overwrite it and other lanes read it.
        y.copy_(
            method.apply(
                layer=part,
                x=x.clone(),
                topk_weights=weights,
                topk_ids=ids,
                shared_experts=None,
                shared_experts_input=None,
            )
        )

    return compute


def _mlp(part: Any, asks: AskTensors) -> Compute:
    def compute(rows: int) -> None:
        x, _, _, y = asks.of(rows)
        y.copy_(part(x))

    return compute
