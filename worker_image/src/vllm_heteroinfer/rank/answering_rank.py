"""A feed-forward rank: loads its part of experts or MLPs, and answers asks until its group ends.

The rank has no attention, KV cache or scheduler, and no configuration of vLLM. Asks arrive only through its
line (`answering_line`): shared memory with the rank that has attention, or a connection from another pod.
Imports torch, not vLLM.
"""

import ctypes
import logging
import time
from pathlib import Path
from typing import Final, NoReturn

import torch

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.feed_forward import read_rate
from vllm_heteroinfer.feed_forward.compute import AskViews, Compute, OwnExpertAsks, build_compute_functions
from vllm_heteroinfer.feed_forward.exchange import PROBE_LAYER
from vllm_heteroinfer.feed_forward.held import LoadedParts, load_parts
from vllm_heteroinfer.feed_forward.offered_weights import offer_weights, weights_key
from vllm_heteroinfer.feed_forward.recipe import Recipe, recipe_key
from vllm_heteroinfer.feed_forward.slab import Shape, shape_of
from vllm_heteroinfer.rank.answering_line import open_line
from vllm_heteroinfer.rank.context import RankContext
from vllm_heteroinfer.rank.lane_meter import LaneMeter

_logger = logging.getLogger(__name__)

LIMIT_NS: Final = 1_000_000_000
"""Longest single wait for an ask, in nanoseconds. Then the rank counts this idle time, and waits again."""
FAILED: Final = 1
"""Status of an answer whose computation raised an exception."""


def serve(context: RankContext) -> NoReturn:
    """Loads this rank's weights by the recipe, reports the rank as ready, and answers asks.

    Raises:
        ContractError: feed-forward ranks cannot compute this model, or a file is not as the recipe says.
        TimeoutError: the asking rank did not share its slab (the memory for asks) by the start-up deadline.
        PeerGoneError: the asking rank has ended.
        RuntimeError: a computation failed.
    """
    plan, rank, reporter = context.plan, context.rank, context.reporter
    assert rank.feed_forward is not None
    reporter.set_phase(RankPhase.LOADING, 0, rank.weight_bytes)
    shares = read_rate.agreed_shares(plan, rank, context.store, context.startup)
    asking = plan.asking_rank(rank)
    wait_began = time.perf_counter()
    text = context.store.get(
        recipe_key(asking.rank), context.startup, awaited=f"recipe of rank {asking.rank}", rank=asking.rank
    )
    load_began = time.perf_counter()
    recipe = Recipe.from_text(text)
    index = plan.feed_forward_ranks_of(asking).index(rank)
    loaded_parts = load_parts(recipe, Path(plan.engine.model), rank.feed_forward, shares, index)
    context.metrics.weight_bytes.set(loaded_parts.stored_bytes)
    reporter.set_phase(RankPhase.WARMING_UP, loaded_parts.stored_bytes, loaded_parts.stored_bytes)
    _logger.info(
        "feed-forward rank %d: loaded %d layers (%s, %s). It waited %.1f s for the recipe, then read weights "
        "for %.1f s",
        rank.rank,
        len(loaded_parts.parts),
        loaded_parts.method,
        format_bytes(loaded_parts.stored_bytes),
        load_began - wait_began,
        time.perf_counter() - load_began,
    )
    # `open_line` sets the number of lanes.
    AnsweringRank(context, shape_of(recipe, context.launch.epoch, lanes=1), loaded_parts).run()


class AnsweringRank:
    """Computes layers for the asking rank. This rank's lane is its place for answers in the slab."""

    def __init__(self, context: RankContext, shape: Shape, loaded_parts: LoadedParts) -> None:
        """Warms up, opens the line to the asking rank, and reports this rank as ready.

        If the asking rank is in this pod and its GPU also computes experts, offers the weights to this GPU.
        """
        self._context, self._loaded_parts = context, loaded_parts
        ask_s, row_s = self._warm_up(shape)
        self._line = open_line(context, shape)
        slab = self._line.slab
        # The asking rank writes no choices for MLPs: each row chooses the only expert.
        ids = slab.ids if shape.topk else torch.zeros_like(slab.ids)
        weights = slab.weights if shape.topk else torch.ones_like(slab.weights)
        views = AskViews(slab.x, ids, weights, slab.y[self._line.lane])
        asks = self._limit_to_own_experts(views, shape.max_rows)
        self._ids_address = asks.ids.data_ptr()
        self._compute_by_layer = build_compute_functions(loaded_parts, asks)
        self._meter = LaneMeter(context, slab, self._line.lane, loaded_parts)
        asking = context.plan.asking_rank(context.rank)
        if asking.ring_bytes and asking.pod == context.rank.pod:
            context.store.put(weights_key(context.rank.rank), offer_weights(loaded_parts).to_json())
        self._line.report_ready(ask_s, row_s)
        context.metrics.report_locked_memory()
        context.reporter.set_phase(RankPhase.READY, loaded_parts.stored_bytes, loaded_parts.stored_bytes)

    def _warm_up(self, shape: Shape) -> tuple[float, float]:
        """Runs all layers with one row, and one layer with the largest batch.

        Returns:
            Seconds of the slowest layer with one row, and seconds per row of the largest batch.
        """
        dtype, rows, topk = getattr(torch, shape.dtype), shape.max_rows, max(1, shape.topk)
        experts = max(part.count for part in self._loaded_parts.parts.values())
        own = self._loaded_parts.own_experts
        # As a router does, chooses distinct experts for each row: the positions of its largest numbers.
        ids = torch.rand((rows, max(experts, topk))).topk(topk).indices.to(torch.int32)
        views = AskViews(
            torch.randn((rows, shape.hidden)).to(dtype),
            ids + (own.first if own else 0),
            torch.full((rows, topk), 1 / topk),
            torch.empty((rows, shape.hidden), dtype=dtype),
        )
        all_computes = build_compute_functions(self._loaded_parts, self._limit_to_own_experts(views, rows))
        with torch.inference_mode():
            for compute in all_computes.values():
                compute(1)  # not measured: a layer's first run is slower
            ask_s = max(_measure_s(compute, 1) for compute in all_computes.values())
            row_s = _measure_s(next(iter(all_computes.values())), rows) / rows
        return ask_s, row_s

    def _limit_to_own_experts(self, views: AskViews, rows: int) -> AskViews | OwnExpertAsks:
        """Returns the asks in `views`. If this rank has whole experts, other ranks' experts are left out.

        A rank that has a part of each expert computes all chosen experts.
        """
        own = self._loaded_parts.own_experts
        return views if own is None else OwnExpertAsks(views, own, rows)

    def run(self) -> NoReturn:
        """Answers asks until the asking rank has ended or a computation raises.

        Raises:
            PeerGoneError: the asking rank has ended.
        """
        line = self._line
        layer, rows = ctypes.c_uint32(), ctypes.c_uint32()
        layer_pointer, rows_pointer = ctypes.byref(layer), ctypes.byref(rows)
        topk = line.slab.shape.topk
        ids = self._ids_address if topk else None  # an MLP has no experts to count
        self._meter.start()
        with torch.inference_mode():
            while True:
                # Raises PeerGoneError after the end of the asking rank, which ends this loop.
                if not line.next(LIMIT_NS, layer_pointer, rows_pointer):
                    continue
                start = time.perf_counter_ns()
                try:
                    if rows.value:  # 0 if all rows of the batch are padding
                        self._compute_of_layer(layer.value)(rows.value)
                except BaseException:
                    line.answer(FAILED, rows=0, ids=None, topk=0, busy_ns=0)
                    raise
                # The probe reads no weights, and arrives before any experts are chosen.
                counted_rows = 0 if layer.value == PROBE_LAYER else rows.value
                line.answer(0, counted_rows, ids, topk, time.perf_counter_ns() - start)

    def _compute_of_layer(self, layer: int) -> Compute:
        """Returns the function that answers asks for a layer.

        The probe's layer is answered with its input.
        """
        compute = self._compute_by_layer.get(layer)
        if compute is not None:
            return compute
        if layer == PROBE_LAYER:
            return self._answer_with_input
        raise ContractError(
            f"feed-forward rank {self._context.rank.rank}: the requested layer must be one of "
            f"{sorted(self._compute_by_layer)} (got {layer}). Report this defect of HeteroInfer"
        )

    def _answer_with_input(self, rows: int) -> None:
        """Answers the probe by copying the input to this lane's answer."""
        slab = self._line.slab
        slab.y[self._line.lane][:rows].copy_(slab.x[:rows])


def _measure_s(compute: Compute, rows: int) -> float:
    """Returns the seconds that a computation of `rows` rows takes."""
    start = time.perf_counter()
    compute(rows)
    return time.perf_counter() - start
