"""Computes a part of the experts on the GPU, with weights that it copies from feed-forward ranks of its pod.

The GPU copies some experts of a layer through a ring of slots, unpacks and computes them. The ranks compute
the other experts at the same time. The number of copied experts depends on the number of rows only. So no
host thread waits for the router, and copies start before it has chosen experts.

Imports torch and vLLM's kernels for experts.
Source: vllm/model_executor/layers/fused_moe/fused_moe.py::fused_experts@v0.32.0.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from heteroinfer_contract import names
from heteroinfer_contract.plan import MAX_LANES
from vllm_heteroinfer.feed_forward.cuda_exchange import Kernels, register_memory
from vllm_heteroinfer.feed_forward.offered_weights import (
    OfferedLayer,
    OfferedMatrix,
    OfferedWeights,
    map_weights,
)
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe, Recipe
from vllm_heteroinfer.feed_forward.slab import DTYPES
from vllm_heteroinfer.feed_forward.stream_balance import Balance, Measured
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, code_places, packed_layout
from vllm_heteroinfer.kernels.library import load

_logger = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).parent / "unpack.cu"
SLOTS: Final = 3
"""Copies that are in flight or wait to be unpacked."""
ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
"""Gated activations that vLLM's kernel supports, too."""
LEAST_ROWS: Final = 64
_MOST: Final = 0.95
"""Largest part of either side in a measurement."""
_TRIES: Final = 3
_UNITS: Final = 4
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
                *("num_blocks", "units", "header", "unit_bytes", "scales", "scale_bytes", "zeros", "group"),
                *("code", "scale", "has_zeros", "gate_rows", "block_rows", "block_columns", "dtype"),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A rank's w13 or w2 of a layer.

    Attributes:
        copied: bytes of an expert in a slot: its packed weights, then its block scales.
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
    """Experts that are copied into one slot.

    Attributes:
        expert_map: index in the slot by expert, -1 for others; int32 on the device.
    """

    first: int
    count: int
    parts: tuple[_Part, ...]
    expert_map: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Choice:
    """The experts of a layer that the GPU computes, and those that are left for ranks.

    Attributes:
        left: by id + 1: the id, or -1 for an expert of the GPU and for the id -1 of padding; int32 on the
            device.
    """

    groups: tuple[_Group, ...]
    left: torch.Tensor


class _SharedLayer:
    """A layer whose experts the GPU can compute."""

    def __init__(self, recipe: LayerRecipe, parts: Sequence[_Part], device: torch.device) -> None:
        self.recipe, self._device = recipe, device
        self._spans: list[tuple[int, int, tuple[_Part, ...]]] = []
        for part in parts:  # ranks have columns of all experts, or all columns of some experts
            span = (part.layer.first_expert, part.layer.experts)
            if self._spans and self._spans[-1][:2] == span:
                self._spans[-1] = (*span, (*self._spans[-1][2], part))
            else:
                self._spans.append((*span, (part,)))
        self._choices: dict[int, _Choice] = {}

    @property
    def expert_bytes(self) -> int:
        """Bytes of the largest expert in a slot."""
        return max(sum(part.expert_bytes for part in parts) for _, _, parts in self._spans)

    def dense_bytes(self, itemsize: int) -> int:
        """Bytes of an expert as plain matrices."""
        return 3 * self.recipe.inner * self.recipe.hidden * itemsize

    def choose(self, part: float, per_slot: int) -> _Choice:
        """Returns the experts for this part of the layer; the GPU takes the first of each rank."""
        number = round(part * self.recipe.experts)
        if number not in self._choices:
            self._choices[number] = self._build(number, per_slot)
        return self._choices[number]

    def _build(self, number: int, per_slot: int) -> _Choice:
        total = self.recipe.experts
        left, groups = list(range(total)), []
        for first, count, parts in self._spans:
            end = first + round(number * count / total)
            for begin in range(first, end, per_slot):
                size = min(per_slot, end - begin)
                expert_map = [-1] * total
                expert_map[begin : begin + size] = range(size)
                groups.append(_Group(begin, size, parts, self._numbers(expert_map)))
            left[first:end] = [-1] * (end - first)
        return _Choice(tuple(groups), self._numbers([-1, *left]))

    def _numbers(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self._device)


class _Ring:
    """Slots on the device through which packed weights pass, and room for unpacked ones."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[_SharedLayer], num_bytes: int, dtype: torch.dtype
    ) -> None:
        """Divides `num_bytes` of the current device into slots and room for the unpacked experts of one."""
        self._kernels, self._unpack = kernels, kernels.function("ff_unpack")
        self._dtype = dtype
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
            num_blocks=offered.columns // SHARED_COLUMNS,
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
    if not recipe.topk:
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
        device: torch.device,
        count: Callable[[int, int], None],
    ) -> None:
        """Maps the weights, creates the ring and measures.

        Args:
            offers: of all feed-forward ranks, which are in this pod, in their order.
            ring_bytes: memory of the device for copied and unpacked experts; one expert at least fits.
            count: counts the rows of an ask whose experts the GPU computed in part, and the bytes copied.

        Raises:
            ContractError: this process cannot map the weights of a rank.
            CudaError: the device cannot copy from them.
        """
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        self._exchange, self._fused, self._activations = exchange, fused_experts, MoEActivation
        self._count = count
        self._fixed_part = float(os.environ.get(names.ENV_GPU_PART, "0"))
        started = time.perf_counter()
        with torch.cuda.device(device):
            self._memories = {rank: map_weights(offer, rank) for rank, offer in offers.items()}
            for memory in self._memories.values():
                register_memory(memory)
            self._layers = self._find_layers(recipe, offers, device)
            if self._layers:
                dtype = getattr(torch, recipe.dtype)
                self._ring = _Ring(Kernels(device, SOURCE), list(self._layers.values()), ring_bytes, dtype)
                self._balance = Balance(self._measure(recipe, device))
                _logger.info(
                    "the GPU computes experts of %d layers itself from %s rows on (%s). A copy has up to %d "
                    "experts, the ring %d bytes. Mapped and measured in %.1f s",
                    len(self._layers),
                    self._balance.first_rows,
                    ", ".join(
                        f"{each.rows} rows: CPUs alone {each.alone_s * 1e3:.1f} ms with an exchange of "
                        f"{each.exchange_s * 1e3:.1f} ms, both at once: CPUs "
                        f"{each.cpu_s * 1e3:.1f} ms and GPU {each.gpu_s * 1e3:.1f} ms"
                        for each in self._balance.measured
                    ),
                    self._ring.per_slot,
                    self._ring.num_bytes,
                    time.perf_counter() - started,
                )

    def _find_layers(
        self, recipe: Recipe, offers: Mapping[int, OfferedWeights], device: torch.device
    ) -> dict[int, _SharedLayer]:
        """Returns the layers that all ranks have offered and this GPU can compute."""
        by_rank = {rank: {each.layer: each for each in offer.layers} for rank, offer in offers.items()}
        places: dict[int, torch.Tensor] = {}
        dtype: torch.dtype = getattr(torch, recipe.dtype)

        def matrix(rank: int, offered: OfferedMatrix, *, gated: bool) -> _Matrix:
            if offered.format and offered.code not in places:
                places[offered.code] = code_places(load(), offered.format.code).to(device)
            return _Matrix(offered, self._memories[rank], places.get(offered.code), gated)

        layers = {}
        for number, layer in recipe.layers.items():
            if find_obstacle(layer) or any(number not in offered for offered in by_rank.values()):
                continue
            plain = [
                each.w2 for each in (offered[number] for offered in by_rank.values()) if not each.w2.format
            ]
            if any(each.expert_bytes != each.columns * each.inputs * dtype.itemsize for each in plain):
                continue  # unpacked weights of another type than the rows
            parts = [
                _Part(
                    offered[number],
                    matrix(rank, offered[number].w13, gated=True),
                    matrix(rank, offered[number].w2, gated=False),
                )
                for rank, offered in by_rank.items()
            ]
            layers[number] = _SharedLayer(layer, parts, device)
        return layers

    def ask(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sends an ask like `remote.Asks`; the answer is valid once the stream has reached it."""
        shared = self._layers.get(layer)
        if shared is None or ids is None or weights is None or torch.cuda.is_current_stream_capturing():
            return self._exchange.ask(layer, x, ids, weights, padding)
        part = self._fixed_part or self._balance.gpu_part(x.shape[0])
        if not part:
            return self._exchange.ask(layer, x, ids, weights, padding)
        choice = shared.choose(part, self._ring.per_slot)
        left = choice.left.index_select(0, ids.view(-1) + 1).view(ids.shape)
        receive = self._exchange.send(layer, x, left, weights, padding)
        copied = self._ring.copied_bytes
        total = self._compute(shared, choice, x, ids, weights)
        answer = receive()
        self._count(x.shape[0], self._ring.copied_bytes - copied)
        return answer if total is None else total.add_(answer).to(x.dtype)

    def _compute(
        self, layer: _SharedLayer, choice: _Choice, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the sum of the chosen experts on the GPU, [rows, hidden] float32; None without any."""
        total: torch.Tensor | None = None
        for group in choice.groups:
            index = self._ring.copy(group)
            w13, w2 = self._ring.unpack(index, group, layer.recipe)
            part = self._fused(
                x,
                w13,
                w2,
                weights,
                ids,
                activation=self._activations.from_str(layer.recipe.activation),
                global_num_experts=layer.recipe.experts,
                expert_map=group.expert_map,
            )
            total = part.float() if total is None else total.add_(part)
        return total

    # Measurement at start

    def _measure(self, recipe: Recipe, device: torch.device) -> list[Measured]:
        """Measures both sides with random rows: the CPUs alone, and both at once with balanced parts."""
        number, layer = next(iter(self._layers.items()))
        experts, most = layer.recipe.experts, recipe.max_rows
        x = torch.randn((most, recipe.hidden), device=device).to(getattr(torch, recipe.dtype))
        ids = torch.rand((most, experts), device=device).topk(recipe.topk).indices.int()
        weights = torch.full((most, recipe.topk), 1 / recipe.topk, device=device)

        def run(rows: int, part: float) -> tuple[float, float, float]:
            """Returns the seconds of the layer, of the slowest rank's computing, and of the GPU's experts."""
            begin, computed, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            choice = layer.choose(part, self._ring.per_slot)
            torch.cuda.synchronize()
            before = self._read_busy_ns()
            begin.record()
            left = choice.left.index_select(0, ids[:rows].view(-1) + 1).view(rows, -1)
            receive = self._exchange.send(number, x[:rows], left, weights[:rows], None)
            self._compute(layer, choice, x[:rows], ids[:rows], weights[:rows])
            computed.record()
            receive()
            end.record()
            torch.cuda.synchronize()
            busy_ns = max(b - a for a, b in zip(before, self._read_busy_ns(), strict=True))
            return begin.elapsed_time(end) / 1e3, busy_ns / 1e9, begin.elapsed_time(computed) / 1e3

        measured, rows, part = [], min(LEAST_ROWS, most), 0.5
        while True:
            run(rows, part)  # compiles vLLM's kernel for this number of rows
            alone_s, busy_s, _ = min(run(rows, 0.0) for _ in range(2))
            tries = []
            for _ in range(_TRIES):
                _, cpu_s, gpu_s = run(rows, part)
                tries.append(
                    Measured(
                        rows=rows,
                        alone_s=alone_s,
                        exchange_s=max(0.0, alone_s - busy_s),
                        cpu_s=cpu_s / (1 - part),
                        gpu_s=gpu_s / part,
                    )
                )
                part = min(_MOST, max(1 - _MOST, tries[-1].part))
            # A try in which a kernel was compiled is much slower than the others.
            measured.append(min(tries, key=lambda each: each.gpu_s))
            part = min(_MOST, max(1 - _MOST, measured[-1].part))
            if rows == most:
                return measured
            rows = min(2 * rows, most)

    def _read_busy_ns(self) -> list[int]:
        """Returns the nanoseconds that each rank has computed so far."""
        slab = self._exchange.slab
        return [slab.read_lane(lane).busy_ns for lane in range(slab.shape.lanes)]
