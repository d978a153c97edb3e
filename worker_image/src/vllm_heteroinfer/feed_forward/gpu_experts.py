"""Computes a part of the experts on the GPU, with weights that it copies from feed-forward ranks of its pod.

The GPU copies some experts of a layer through a ring of slots, unpacks and computes them. The ranks compute
the other experts at the same time. The number of copied experts depends on the number of rows only. So no
host thread waits for the router, and copies start before it has chosen experts.

Imports torch and vLLM's kernels for experts.
Source: vllm/model_executor/layers/fused_moe/fused_moe.py::fused_experts@v0.32.0.
"""

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import MAX_LANES
from vllm_heteroinfer.feed_forward.cuda_exchange import Kernels, register_memory
from vllm_heteroinfer.feed_forward.expert_reader import Range
from vllm_heteroinfer.feed_forward.offered_weights import (
    OfferedLayer,
    OfferedMatrix,
    OfferedWeights,
    map_weights,
)
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe, Recipe
from vllm_heteroinfer.feed_forward.slab import DTYPES
from vllm_heteroinfer.feed_forward.stream_balance import Balance, LayerTimes, measure
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, code_places, packed_layout
from vllm_heteroinfer.kernels.library import load

_logger = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).parent / "unpack.cu"
SLOTS: Final = 3
"""Copies that are in flight or wait to be unpacked."""
ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
"""Gated activations that vLLM's kernel supports, too."""
LEAST_ROWS: Final = 64
_UNITS: Final = 4
"""Units that a thread block of unpack.cu writes: kUnits."""
_BLOCK: Final = 128
_ALIGNED: Final = 256


class _UnpackParams(ctypes.Structure):
    """The same fields as `Params` in unpack.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "blocks", "out", "places")),
        *(
            (name, ctypes.c_uint64)
            for name in ("expert_bytes", "block_bytes", "blocks_stride", "expert_stride", "row_stride")
        ),
        *(
            (name, ctypes.c_uint32)
            for name in (
                *("units", "header", "unit_bytes", "scales", "scale_bytes", "zeros", "group"),
                *("code", "scale", "has_zeros", "gate_rows", "block_rows", "block_columns", "dtype"),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A rank's w13 or w2 of a layer.

    Attributes:
        memory: the rank's mapped memory.
        places: of the codes in a unit; None if the weights are not packed.
        gated: whether this is w13.
    """

    offered: OfferedMatrix
    memory: torch.Tensor
    places: torch.Tensor | None
    gated: bool

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Rows and columns of an expert's block scales."""
        halves, columns = (2, self.offered.columns // 2) if self.gated else (1, self.offered.columns)
        return halves * -(-columns // _BLOCK), -(-self.offered.inputs // _BLOCK)

    @property
    def scale_bytes(self) -> int:
        """Bytes of an expert's block scales."""
        rows, columns = self.scale_shape
        return 0 if self.offered.block_scales is None else 4 * rows * columns

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in a slot."""
        return self.offered.expert_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a layer."""

    layer: OfferedLayer
    w13: _Matrix
    w2: _Matrix

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in a slot."""
        return self.w13.expert_bytes + self.w2.expert_bytes


@dataclass(frozen=True, slots=True)
class _Group:
    """Experts that are copied into one slot, and the ranks that have them."""

    first: int
    count: int
    parts: tuple[_Part, ...]


class _SharedLayer:
    """A layer whose experts the GPU can compute."""

    def __init__(self, recipe: LayerRecipe, parts: Sequence[_Part]) -> None:
        self.recipe = recipe
        self._parts: dict[Range, tuple[_Part, ...]] = {}
        for part in parts:  # ranks have columns of all experts, or all columns of some experts
            span = (part.layer.first_expert, part.layer.first_expert + part.layer.experts)
            self._parts[span] = (*self._parts.get(span, ()), part)

    @property
    def spans(self) -> tuple[Range, ...]:
        """Ranges of experts that the same ranks have."""
        return tuple(self._parts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the largest expert in a slot."""
        return max(sum(part.expert_bytes for part in parts) for parts in self._parts.values())

    def dense_bytes(self, itemsize: int) -> int:
        """Bytes of an expert as plain matrices."""
        return 3 * self.recipe.inner * self.recipe.hidden * itemsize

    def groups(self, ranges: Sequence[Range], per_slot: int) -> Iterator[_Group]:
        """Yields the experts of the ranges in groups that fit a slot. Each span has one range."""
        for (first, end), parts in zip(ranges, self._parts.values(), strict=True):
            for begin in range(first, end, per_slot):
                yield _Group(begin, min(per_slot, end - begin), parts)


class _Ring:
    """Slots on the device through which packed weights pass, and room for unpacked ones."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[_SharedLayer], num_bytes: int, dtype: torch.dtype
    ) -> None:
        """Divides `num_bytes` of the current device into slots and room for the unpacked experts of one."""
        self._kernels, self._unpack = kernels, kernels.function("ff_unpack")
        packed = max(layer.expert_bytes for layer in layers)
        dense = max(layer.dense_bytes(dtype.itemsize) for layer in layers)
        self.per_slot = max(1, num_bytes // (SLOTS * packed + dense))
        slot_bytes = _align(self.per_slot * packed) + 4 * MAX_LANES * _ALIGNED  # each copy is aligned
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(SLOTS)]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]
        self._unpacked = [torch.cuda.Event() for _ in range(SLOTS)]
        self._room = torch.empty(self.per_slot * dense // dtype.itemsize, dtype=dtype, device="cuda")
        self._copies, self._next = torch.cuda.Stream(), 0
        self.num_bytes = SLOTS * slot_bytes + self._room.nbytes
        self.copied_bytes = 0

    def copy(self, group: _Group) -> int:
        """Begins to copy a group's experts, once its slot is free, and returns the slot."""
        index = self._next
        self._next = (index + 1) % SLOTS
        slot, at = self._slots[index], 0
        self._copies.wait_event(self._unpacked[index])
        with torch.cuda.stream(self._copies):
            for part in group.parts:
                skipped = group.first - part.layer.first_expert
                for matrix in (part.w13, part.w2):
                    for offset, each in (
                        (matrix.offered.offset, matrix.offered.expert_bytes),
                        (matrix.offered.block_scales, matrix.scale_bytes),
                    ):
                        length = group.count * each
                        if offset is not None:
                            begin = offset + skipped * each
                            source = matrix.memory[begin : begin + length]
                            slot[at : at + length].copy_(source, non_blocking=True)
                            self.copied_bytes += length
                        at = _align(at + length)
            self._copied[index].record(self._copies)
        return index

    def unpack(self, index: int, group: _Group, recipe: LayerRecipe) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns w13 [count, 2 * inner, hidden] and w2 [count, hidden, inner], valid until the next call."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._copied[index])
        hidden, inner, count = recipe.hidden, recipe.inner, group.count
        elements = count * 2 * inner * hidden
        w13 = self._room[:elements].view(count, 2 * inner, hidden)
        w2 = self._room[elements : elements + elements // 2].view(count, hidden, inner)
        at, slot = 0, self._slots[index]
        for part in group.parts:
            first, end = part.layer.first_column, part.layer.first_column + part.w2.offered.inputs
            for matrix, out in (
                (part.w13, w13.view(count, 2, inner, hidden)[:, :, first:end]),
                (part.w2, w2.unsqueeze(1)[:, :, :, first:end]),
            ):
                length = count * matrix.offered.expert_bytes
                if matrix.places is None:
                    out.copy_(slot[at : at + length].view(out.dtype).view(out.shape))
                else:
                    self._launch(matrix, slot.data_ptr() + at, out, stream.cuda_stream)
                at = _align(_align(at + length) + count * matrix.scale_bytes)
        self._unpacked[index].record(stream)
        return w13, w2

    def _launch(self, matrix: _Matrix, address: int, out: torch.Tensor, stream: int) -> None:
        """Unpacks a rank's matrix in a slot into `out`, [experts, 2 for w13, columns, inputs]."""
        offered, count = matrix.offered, len(out)
        assert offered.format is not None
        assert matrix.places is not None
        layout = packed_layout(load(), offered.format, offered.columns, offered.inputs)
        header = layout.header if offered.has_headers else 0
        units = -(-offered.inputs // SHARED_COLUMNS)
        rows, columns = matrix.scale_shape
        params = _UnpackParams(
            packed=address,
            blocks=_align(address + count * offered.expert_bytes)
            if offered.block_scales is not None
            else None,
            out=out.data_ptr(),
            places=matrix.places.data_ptr(),
            expert_bytes=offered.expert_bytes,
            block_bytes=header + units * layout.unit_bytes,
            blocks_stride=rows * columns,
            expert_stride=out.stride(0),
            row_stride=out.stride(2),
            units=units,
            header=header,
            unit_bytes=layout.unit_bytes,
            scales=layout.scales,
            scale_bytes=layout.scale_bytes,
            zeros=layout.zeros,
            group=offered.group,
            code=offered.code,
            scale=offered.scale,
            has_zeros=offered.zeros,
            gate_rows=out.stride(1) // out.stride(2) if matrix.gated else 0,
            block_rows=rows // 2 if matrix.gated else rows,
            block_columns=columns,
            dtype=DTYPES[str(out.dtype).removeprefix("torch.")],
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        grid = (-(-units // _UNITS), offered.columns // SHARED_COLUMNS, count)
        self._kernels.launch(self._unpack, grid, arguments, stream)


def _align(address: int) -> int:
    return -(-address // _ALIGNED) * _ALIGNED


def find_obstacle(recipe: LayerRecipe) -> str | None:
    """Returns why a GPU cannot compute a layer's experts with copied weights; None if it can."""
    if not recipe.topk or recipe.experts == 1:
        return "MLPs of dense layers are not copied"
    if recipe.activation not in ACTIVATIONS or (recipe.limit, recipe.alpha, recipe.beta) != (None,) * 3:
        return f"activation {recipe.activation} with limits or factors, or without a gate"
    return None


class SharedExchange:
    """Sends asks like `CudaExchange`, and computes a part of the experts of long asks on the GPU."""

    def __init__(
        self,
        exchange: Any,
        recipe: Recipe,
        offers: Mapping[int, OfferedWeights],
        *,
        ring_bytes: int,
        captured_rows: int,
        device: torch.device,
        count: Callable[[int, int], None],
    ) -> None:
        """Maps the weights, creates the ring and measures.

        Args:
            offers: of all feed-forward ranks, which are in this pod, in their order.
            ring_bytes: memory of the device for copied and unpacked experts. The ring has room for one expert
                at least.
            captured_rows: the most rows of a captured CUDA graph. CPUs compute all experts of shorter asks,
                because a graph holds such asks.
            count: counts the rows of an ask whose experts the GPU computed in part, and the bytes copied.

        Raises:
            ContractError: this process cannot map the weights of a rank.
            CudaError: the device cannot copy from them.
        """
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        self._exchange, self._fused, self._activations = exchange, fused_experts, MoEActivation
        self._captured_rows, self._count, self._device = captured_rows, count, device
        self._fixed_part = _read_fixed_part(os.environ)
        self._choices: dict[tuple[Range, ...], ExpertChoices] = {}
        started = time.perf_counter()
        _logger.info("maps the experts of feed-forward ranks and measures both sides")
        with torch.cuda.device(device):
            self._layers = self._find_layers(recipe, offers)
            if not self._layers:
                _logger.warning(
                    "the plan lets the GPU compute experts of long asks, but the GPU can compute none"
                )
                return
            layers = list(self._layers.values())
            self._ring = _Ring(Kernels(device, SOURCE), layers, ring_bytes, getattr(torch, recipe.dtype))
            self._balance = None if self._fixed_part is not None else self._measure(recipe)
        _logger.info(
            "the GPU computes experts of %d layers (%s). A copy has up to %d experts, the ring %d bytes. "
            "Started in %.1f s",
            len(self._layers),
            f"always {self._fixed_part}" if self._balance is None else _describe(self._balance),
            self._ring.per_slot,
            self._ring.num_bytes,
            time.perf_counter() - started,
        )

    def _find_layers(self, recipe: Recipe, offers: Mapping[int, OfferedWeights]) -> dict[int, _SharedLayer]:
        """Returns the layers that all ranks have offered and this GPU can compute; maps their memory."""
        by_rank = {rank: {each.layer: each for each in offer.layers} for rank, offer in offers.items()}
        places: dict[int, torch.Tensor] = {}
        memories: dict[int, torch.Tensor] = {}
        obstacles: dict[str, list[int]] = {}
        dtype: torch.dtype = getattr(torch, recipe.dtype)

        def matrix(rank: int, offered: OfferedMatrix, *, gated: bool) -> _Matrix:
            if offered.format and offered.code not in places:
                places[offered.code] = code_places(load(), offered.format.code).to(self._device)
            if rank not in memories:
                memories[rank] = map_weights(offers[rank], rank)
                register_memory(memories[rank])
            return _Matrix(offered, memories[rank], places.get(offered.code), gated)

        layers = {}
        for number, layer in recipe.layers.items():
            obstacle = find_obstacle(layer)
            if obstacle is None and any(number not in offered for offered in by_rank.values()):
                obstacle = "its biases, or experts without a gate"
            plain = [
                w2
                for offered in by_rank.values()
                if number in offered and not (w2 := offered[number].w2).format
            ]
            if any(each.expert_bytes != each.columns * each.inputs * dtype.itemsize for each in plain):
                obstacle = "weights of another type than the rows"
            if obstacle is not None:
                obstacles.setdefault(obstacle, []).append(number)
                continue
            parts = [
                _Part(
                    offered[number],
                    matrix(rank, offered[number].w13, gated=True),
                    matrix(rank, offered[number].w2, gated=False),
                )
                for rank, offered in by_rank.items()
            ]
            layers[number] = _SharedLayer(layer, parts)
        for obstacle, numbers in obstacles.items():
            _logger.warning("CPUs compute all experts of layers %s in long asks, too: %s", numbers, obstacle)
        return layers

    def _choices_of(self, layer: _SharedLayer) -> "ExpertChoices":
        """Returns the choices of experts for a layer; equal layers have the same."""
        if layer.spans not in self._choices:
            self._choices[layer.spans] = ExpertChoices(layer.spans, self._ring.per_slot, self._device)
        return self._choices[layer.spans]

    def ask(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sends an ask like `remote.Asks`; the answer is valid once the stream has reached it."""
        shared, rows = self._layers.get(layer), x.shape[0]
        # A graph's warm-up passes run outside of the capture, with the same numbers of rows.
        if shared is None or ids is None or weights is None or rows <= self._captured_rows:
            return self._exchange.ask(layer, x, ids, weights, padding)
        part = self._fixed_part if self._balance is None else self._balance.gpu_part(rows)
        assert part is not None
        number = round(part * shared.recipe.experts)
        if not number:
            return self._exchange.ask(layer, x, ids, weights, padding)
        copied = self._ring.copied_bytes
        answer = self._compute_and_ask(layer, number, x, ids, weights, padding)
        self._count(rows, self._ring.copied_bytes - copied)
        return answer

    def _compute_and_ask(
        self,
        layer: int,
        number: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes `number` experts on the GPU while ranks compute the others, and returns the sum."""
        shared = self._layers[layer]
        choices = self._choices_of(shared)
        if number == shared.recipe.experts:
            return self._compute(shared, number, x, ids, weights).to(x.dtype)
        left = choices.left(ids, number)
        receive = self._exchange.send(layer, x, left, weights, padding, beside_copies=True)
        total = self._compute(shared, number, x, ids, weights)
        return total.add_(receive()).to(x.dtype)

    def _compute(
        self, layer: _SharedLayer, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the sum of `number` experts on the GPU, [rows, hidden] float32."""
        choices, total = self._choices_of(layer), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for group in layer.groups(choices.ranges(number), self._ring.per_slot):
            index = self._ring.copy(group)
            w13, w2 = self._ring.unpack(index, group, layer.recipe)
            total += self._fused(
                x,
                w13,
                w2,
                weights,
                ids,
                activation=self._activations.from_str(layer.recipe.activation),
                global_num_experts=layer.recipe.experts,
                expert_map=choices.expert_map(group.first, group.count),
            )
        return total

    # Measurement at start

    def _measure(self, recipe: Recipe) -> Balance:
        """Measures both sides on the first layer, with random rows."""
        number, layer = next(iter(self._layers.items()))
        experts, most = layer.recipe.experts, recipe.max_rows
        x = torch.randn((most, recipe.hidden), device=self._device).to(getattr(torch, recipe.dtype))
        ids = torch.rand((most, experts), device=self._device).topk(recipe.topk).indices.int()
        weights = torch.full((most, recipe.topk), 1 / recipe.topk, device=self._device)
        choices = self._choices_of(layer)

        def run(rows: int, on_gpu: int) -> LayerTimes:
            begin, computed, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            row_ids = ids[:rows]
            torch.cuda.synchronize()
            before = self._read_busy_ns()
            begin.record()
            if on_gpu < experts:
                left = choices.left(row_ids, on_gpu)
                receive = self._exchange.send(
                    number, x[:rows], left, weights[:rows], None, beside_copies=True
                )
            self._compute(layer, on_gpu, x[:rows], row_ids, weights[:rows])
            computed.record()
            if on_gpu < experts:
                receive()
            end.record()
            torch.cuda.synchronize()
            busy_ns = max(b - a for a, b in zip(before, self._read_busy_ns(), strict=True))
            return LayerTimes(
                wall_s=begin.elapsed_time(end) / 1e3,
                cpu_s=busy_ns / 1e9,
                gpu_s=begin.elapsed_time(computed) / 1e3,
            )

        return Balance(measure(run, list(_measured_sizes(self._captured_rows, most)), experts))

    def _read_busy_ns(self) -> list[int]:
        """Returns the nanoseconds that each rank has computed so far."""
        slab = self._exchange.slab
        return [slab.read_lane(lane).busy_ns for lane in range(slab.shape.lanes)]


class ExpertChoices:
    """Which experts of a layer the GPU computes, by their number. Later calls copy nothing to the device.

    The GPU takes its experts evenly from all spans, of each span the first, and more with a higher number.
    """

    def __init__(self, spans: Sequence[Range], per_slot: int, device: torch.device) -> None:
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
        outside = torch.full((per_slot + 1, self._total), -1, dtype=torch.int32)
        slots = torch.arange(per_slot, dtype=torch.int32).repeat(per_slot + 1, 1)
        counts = torch.arange(per_slot + 1, dtype=torch.int32).unsqueeze(1)
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

    def expert_map(self, first: int, count: int) -> torch.Tensor:
        """Returns the index in a slot by expert, -1 for others: int32 [experts]."""
        begin = self._total - first
        return self._maps[count, begin : begin + self._total]


def _read_fixed_part(env: Mapping[str, str]) -> float | None:
    """Returns the part of experts that the environment sets; raises ContractError for other text."""
    text = env.get(names.ENV_GPU_PART)
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise ContractError(
        f"{names.ENV_GPU_PART}: must be a number from 0 to 1 (got {text!r}). Change engine.env"
    )


def _measured_sizes(captured_rows: int, most: int) -> Iterator[int]:
    """Yields the numbers of rows to measure: powers of two above captured graphs, and the most rows."""
    rows = LEAST_ROWS
    while rows < most:
        if rows > captured_rows:
            yield rows
        rows *= 2
    yield most


def _describe(balance: Balance) -> str:
    """Returns the measurements as text for the log."""
    return "; ".join(
        f"{each.rows} rows: {each.part:.0%}, CPUs alone {each.cpu_alone_s * 1e3:.1f} ms with an exchange of "
        f"{each.exchange_s * 1e3:.1f} ms, GPU alone {each.gpu_alone_s * 1e3:.1f} ms, both at once: CPUs "
        f"{each.cpu_s * 1e3:.1f} ms and GPU {each.gpu_s * 1e3:.1f} ms"
        for each in balance.measured
    )
