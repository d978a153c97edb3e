"""Computes some experts of long batches on the GPU, with weights copied from feed-forward ranks of its pod.

The GPU copies the packed weights of these experts into the slots of a ring (a part of its memory), unpacks
them, and computes. At the same time, the ranks compute the layer's other experts. The number of experts on
the GPU depends only on the number of rows. So no host thread waits for the router's choice of experts, and
copies start before this choice.

| module | content |
|---|---|
| `gpu_layers` | layers whose experts the GPU can compute |
| `expert_choices` | selects the experts that the GPU computes, for each number of experts |
| `weight_ring`, `ring_slots` | copies packed experts to the GPU |
| `unpacking`, `unpack.cu` | unpacks these copies to plain matrices |
| `slot_experts` | computes unpacked experts with vLLM's kernel |
| `stream_balance`, `stream_times` | chooses the number of experts on the GPU, by measured times |

Imports torch and vLLM.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.gpu_experts import SLOTS
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.feed_forward import slot_experts
from vllm_heteroinfer.feed_forward.cuda_exchange import CudaError, register_memory
from vllm_heteroinfer.feed_forward.expert_choices import ExpertChoices
from vllm_heteroinfer.feed_forward.expert_reader import Range
from vllm_heteroinfer.feed_forward.gpu_layers import GpuLayer, find_gpu_layers
from vllm_heteroinfer.feed_forward.offered_weights import OfferedWeights, map_weights
from vllm_heteroinfer.feed_forward.recipe import Recipe
from vllm_heteroinfer.feed_forward.stream_balance import Balance, LayerTimes, measure, rows_to_measure
from vllm_heteroinfer.feed_forward.stream_times import GapTimes, StreamTimes, total_s
from vllm_heteroinfer.feed_forward.unpacking import Unpacker
from vllm_heteroinfer.feed_forward.weight_ring import COPY, UNPACK, WeightRing

_logger = logging.getLogger(__name__)

COMPUTE: Final = "compute"
"""Name of the GPU's computing in `StreamTimes`. The ring records its work as COPY and UNPACK."""
REPEATS: Final = 3
"""Number of times that one measurement computes the same layer, without a pause."""


class GpuExpertMeter(Protocol):
    """Counts layers in which the GPU computed some experts.

    Attributes:
        is_users_step: whether the present step computes requests of users.
    """

    is_users_step: bool

    def count(self, rows: int, copied_bytes: int) -> None:
        """Counts a layer: its rows, and the bytes that were copied to the GPU."""


def let_gpu_compute_experts(
    exchange: Any,
    recipe: Recipe,
    offers: Mapping[int, OfferedWeights],
    report: Callable[[int], None],
    **options: Any,
) -> Any:
    """Returns a SharedExchange, or `exchange` if the GPU cannot copy the ranks' weights.

    Some machines cannot pin memory of this size for the GPU. CPU ranks then compute all experts, as in short
    batches.

    Args:
        report: called with the minimum number of rows with which the GPU computes some experts; with 0 if the
            GPU computes no experts.
        **options: keyword arguments of SharedExchange.
    """
    try:
        shared = SharedExchange(exchange, recipe, offers, **options)
    except (ContractError, CudaError) as error:
        _logger.warning(
            "CPU ranks compute all experts, also of long batches, because the GPU cannot copy the ranks' "
            "weights (%s)",
            error,
        )
        report(0)
        return exchange
    report(shared.min_gpu_rows)
    return shared


class SharedExchange:
    """Computes layers like `CudaExchange`, but some experts of long batches on the GPU.

    Attributes:
        min_gpu_rows: minimum number of rows with which the GPU computes some experts, as measured; 0 if the
            GPU computes no experts.
    """

    def __init__(
        self,
        exchange: Any,
        recipe: Recipe,
        offers: Mapping[int, OfferedWeights],
        *,
        ring_bytes: int,
        captured_rows: int,
        device: torch.device,
        meter: GpuExpertMeter,
    ) -> None:
        """Maps the ranks' weights, creates the ring, and measures the speed of the GPU and of the ranks.

        Args:
            offers: where each feed-forward rank has its weights, in the order of ranks. All run in this pod.
            ring_bytes: GPU memory for copied and unpacked experts. The ring takes more if one expert needs
                more.
            captured_rows: maximum number of rows of a captured CUDA graph. CPUs compute all experts of
                batches up to this size, because a graph contains asks to the ranks only.
            meter: counts each layer of users' steps in which the GPU computed some experts. Gaps between
                layers are measured in users' steps only, because compilers may run in vLLM's warm-up.

        Raises:
            ContractError: this process cannot map the weights of a rank.
            CudaError: the device cannot copy from these weights.
        """
        self._exchange, self._recipe, self._meter, self._device = exchange, recipe, meter, device
        self._captured_rows, self._dtype = captured_rows, getattr(torch, recipe.dtype)
        self._choices: dict[tuple[Range, ...], ExpertChoices] = {}
        self._balances: dict[object, Balance] = {}
        self.times, self._gaps = StreamTimes(), GapTimes()
        self.min_gpu_rows = 0
        started = time.perf_counter()
        _logger.info("mapping the weights of the feed-forward ranks and measuring the speed of GPU and CPUs")

        memories = {rank: map_weights(offer, rank) for rank, offer in offers.items()}
        with torch.cuda.device(device):
            self._layers = self._find_layers(offers, memories)
            if not self._layers:
                return  # no ring is needed
            layers = list(self._layers.values())
            self._first_layer, self._last_layer = layers[0], layers[-1]
            self._ring = WeightRing(layers, ring_bytes, self._dtype, Unpacker(device), self.times)
            for layer in layers:
                if layer.kind not in self._balances:
                    self._balances[layer.kind] = self._measure(layer)
        min_rows = [balance.min_gpu_rows(self._ahead, recipe.max_rows) for balance in self._balances.values()]
        self.min_gpu_rows = min((rows for rows in min_rows if rows), default=0)
        _logger.info(
            "the GPU can compute experts of %d layers of %d kinds. It copies at most %d experts at a time "
            "into a ring of %s. Measuring took %.1f s",
            len(self._layers),
            len(self._balances),
            self._ring.slot_experts,
            format_bytes(self._ring.num_bytes),
            time.perf_counter() - started,
        )

    def _find_layers(
        self, offers: Mapping[int, OfferedWeights], memories: Mapping[int, torch.Tensor]
    ) -> dict[int, GpuLayer]:
        """Returns the layers whose experts the GPU can compute, and lets the GPU copy their weights.

        Args:
            memories: mapped weights of each rank.
        """

        def register(rank: int) -> torch.Tensor:
            """Lets the GPU copy a rank's weights. Returns the memory of the weights."""
            register_memory(memories[rank])
            return memories[rank]

        layers = find_gpu_layers(self._recipe, offers, register)
        if not layers:
            _logger.warning(
                "the plan lets the GPU compute experts of long batches, but the GPU cannot compute the "
                "experts of any layer, so CPU ranks compute all. The warnings above contain the reasons"
            )
        return layers

    def ask(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the output of a layer's experts, as `remote.Asks.ask` does.

        The result is valid once the current stream has done its work so far.
        """
        gpu_layer, rows = self._layers.get(layer), x.shape[0]
        # CPU ranks compute short batches alone, even if no graph is being captured: the warm-up passes before
        # a capture must compute in the same way as the captured graph.
        if gpu_layer is None or ids is None or weights is None or rows <= self._captured_rows:
            return self._exchange.ask(layer, x, ids, weights, padding)
        is_users_step = self._meter.is_users_step
        if is_users_step:
            self._gaps.note_ask(layer, rows)
        gpu_experts = self._balances[gpu_layer.kind].gpu_experts(rows, self._gaps.gap_s(rows), self._ahead)
        if gpu_experts:
            copied_before = self._ring.copied_bytes
            answer = self._compute_with_ranks(gpu_layer, gpu_experts, x, ids, weights, padding)
            if gpu_layer is self._last_layer:
                self._copy_first_layer_early(gpu_experts)
            if is_users_step:
                self._meter.count(rows, self._ring.copied_bytes - copied_before)
        else:
            answer = self._exchange.ask(layer, x, ids, weights, padding)
        if is_users_step:
            self._gaps.note_answer(layer, rows)
        return answer

    @property
    def _ahead(self) -> int:
        """Maximum number of experts that the ring can take before their layer's rows exist."""
        return SLOTS * self._ring.slot_experts

    def _expert_choices(self, layer: GpuLayer) -> ExpertChoices:
        """Returns a layer's `ExpertChoices`; layers with the same spans share one object."""
        if layer.spans not in self._choices:
            self._choices[layer.spans] = ExpertChoices(layer.spans, self._ring.slot_experts, self._device)
        return self._choices[layer.spans]

    def _compute_with_ranks(
        self,
        layer: GpuLayer,
        gpu_experts: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the sum of all experts. The GPU computes `gpu_experts` experts, the ranks the others."""
        if gpu_experts == layer.recipe.experts:
            return self._compute(layer, gpu_experts, x, ids, weights).to(x.dtype)
        rank_ids = self._expert_choices(layer).mask_gpu_experts(ids, gpu_experts)
        # The ranks compute their experts while the GPU computes its own.
        receive = self._exchange.send(layer.number, x, rank_ids, weights, padding, beside_copies=True)
        total = self._compute(layer, gpu_experts, x, ids, weights)
        return total.add_(receive()).to(x.dtype)

    def _compute(
        self, layer: GpuLayer, gpu_experts: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes `gpu_experts` experts on the GPU. Returns each row's sum, [rows, hidden] float32."""
        choices = self._expert_choices(layer)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        padded = slot_experts.pad_rows(x, ids, weights)
        for load in layer.split_into_loads(choices.gpu_ranges(gpu_experts), self._ring.slot_experts):
            w13, w2 = self._ring.unpack(self._ring.start_copy(load), load, layer.recipe)
            with self.times.span(COMPUTE, torch.cuda.current_stream()):
                expert_map = choices.expert_map(load.content.first, load.content.experts)
                total += slot_experts.compute_slot(layer.recipe, w13, w2, padded, expert_map)[: len(x)]
        return total

    def _copy_first_layer_early(self, gpu_experts: int) -> None:
        """Starts to copy the first layer's experts for the next step, while the link is free.

        The next step probably needs as many experts on the GPU as this step.
        """
        layer = self._first_layer
        ranges = self._expert_choices(layer).gpu_ranges(min(gpu_experts, layer.recipe.experts))
        loads = layer.split_into_loads(ranges, self._ring.slot_experts)
        for load in itertools.islice(loads, SLOTS):  # the ring has one slot for each of these loads
            self._ring.start_early_copy(load)

    # Measurement at start

    def _measure(self, layer: GpuLayer) -> Balance:
        """Measures the speed of the GPU and of the ranks on a layer, with random rows.

        First compiles vLLM's kernels for all numbers of rows, so that no measurement includes a compilation.
        """
        experts, topk, most = layer.recipe.experts, self._recipe.topk, self._recipe.max_rows
        x = torch.randn((most, self._recipe.hidden), device=self._device).to(self._dtype)
        ids = torch.rand((most, experts), device=self._device).topk(topk).indices.int()
        weights = torch.full((most, topk), 1 / topk, device=self._device)

        def run(rows: int, gpu_experts: int) -> LayerTimes:
            """Returns the times of the layer with this number of rows and of experts on the GPU."""
            return self._time_layer(layer, gpu_experts, x[:rows], ids[:rows], weights[:rows])

        started = time.perf_counter()
        self._compile_kernels(layer, x, ids, weights)
        compiled = time.perf_counter()
        balance = Balance(measure(run, list(rows_to_measure(self._captured_rows, most)), experts))
        _logger.info(
            "layer %d and equal layers: compiled kernels in %.1f s, measured speeds in %.1f s: %s",
            layer.number,
            compiled - started,
            time.perf_counter() - compiled,
            balance.describe(),
        )
        return balance

    def _time_layer(
        self, layer: GpuLayer, gpu_experts: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerTimes:
        """Computes a layer REPEATS times with `gpu_experts` experts on the GPU. Returns its average times."""
        torch.cuda.synchronize()
        busy_before_ns = self._read_busy_ns()
        answer_events = []
        with self.times.recording() as spans:
            for _ in range(REPEATS):
                if gpu_experts:
                    self._compute_with_ranks(layer, gpu_experts, x, ids, weights, None)
                else:
                    self._exchange.ask(layer.number, x, ids, weights, None)
                answer_events.append(torch.cuda.Event(enable_timing=True))
                answer_events[-1].record()
            torch.cuda.synchronize()
        slowest_busy_ns = max(
            after_ns - before_ns
            for before_ns, after_ns in zip(busy_before_ns, self._read_busy_ns(), strict=True)
        )
        first_to_last_s = answer_events[0].elapsed_time(answer_events[-1]) / 1e3
        return LayerTimes(
            period_s=first_to_last_s / (REPEATS - 1),  # REPEATS answers have one interval less
            cpu_s=slowest_busy_ns / 1e9 / REPEATS,
            copy_s=total_s(spans.get(COPY, [])) / REPEATS,
            compute_s=total_s([*spans.get(UNPACK, []), *spans.get(COMPUTE, [])]) / REPEATS,
        )

    def _compile_kernels(
        self, layer: GpuLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Computes one expert with each kernel that batches need, so that no request waits for a compiler."""
        unit = slot_experts.ROW_UNIT
        # Number of rows, with padding, of the shortest batch for which the GPU may compute experts.
        first = (self._captured_rows // unit + 1) * unit
        possible_rows = range(first, max(first, len(x)) + unit, unit)
        for rows in slot_experts.rows_of_each_kernel(
            layer.recipe, self._ring.slot_experts, self._dtype, possible_rows
        ):
            self._compute(layer, 1, *(each[:rows] for each in (x, ids, weights)))
        torch.cuda.synchronize()

    def _read_busy_ns(self) -> list[int]:
        """Returns for each rank how many nanoseconds it has computed so far."""
        slab = self._exchange.slab
        return [slab.read_lane(lane).busy_ns for lane in range(slab.shape.lanes)]
