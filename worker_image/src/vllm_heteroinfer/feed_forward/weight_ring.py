"""GPU memory for copies of packed experts (slots) and for unpacked experts. Imports torch."""

from collections.abc import Sequence

import torch

from heteroinfer_contract.gpu_experts import SLOTS
from vllm_heteroinfer.feed_forward.gpu_layers import GpuLayer, Load, RankExperts
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe
from vllm_heteroinfer.feed_forward.ring_slots import SlotOrder, ring_sizes
from vllm_heteroinfer.feed_forward.stream_times import StreamTimes
from vllm_heteroinfer.feed_forward.unpacking import Unpacker

COPY, UNPACK = "copy", "unpack"
"""Names of a ring's work in `StreamTimes`."""


class WeightRing:
    """Copies packed experts into slots on the current device, and unpacks them into a buffer.

    Copies run in a stream of their own, beside the computation.

    Attributes:
        slot_experts: maximum number of experts in a slot.
        num_bytes: size of all slots and the buffer.
        copied_bytes: bytes that were copied so far.
    """

    def __init__(
        self,
        layers: Sequence[GpuLayer],
        num_bytes: int,
        dtype: torch.dtype,
        unpacker: Unpacker,
        times: StreamTimes,
    ) -> None:
        """Allocates the memory.

        Args:
            num_bytes: size of the memory. The ring takes more if one expert needs more.
            dtype: type of unpacked experts.
        """
        sizes = ring_sizes(
            num_bytes,
            packed_bytes=max(layer.expert_bytes for layer in layers),
            dense_bytes=max(layer.dense_bytes(dtype.itemsize) for layer in layers),
            arrays=max(layer.max_arrays for layer in layers),
            most_experts=max(layer.recipe.experts for layer in layers),
        )
        self.slot_experts, self.num_bytes, self.copied_bytes = sizes.slot_experts, sizes.num_bytes, 0
        self._unpacker, self._times, self._order = unpacker, times, SlotOrder()
        self._slots = [torch.empty(sizes.slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(SLOTS)]
        self._buffer = torch.zeros(sizes.buffer_bytes // dtype.itemsize, dtype=dtype, device="cuda")
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]
        self._unpacked = [torch.cuda.Event() for _ in range(SLOTS)]
        self._stream = torch.cuda.Stream()

    def start_copy(self, load: Load) -> int:
        """Starts to copy a load, unless `start_early_copy` did this already. Returns the slot of the load."""
        slot, is_copied = self._order.take(load.content)
        if not is_copied:
            self._copy_into(slot, load)
        return slot

    def start_early_copy(self, load: Load) -> None:
        """Starts to copy a load before its `start_copy`, if a slot is free."""
        slot = self._order.take_early(load.content)
        if slot is not None:
            self._copy_into(slot, load)

    def _copy_into(self, slot: int, load: Load) -> None:
        """Puts the copies of a load's arrays into the copy stream."""
        content, memory = load.content, self._slots[slot]
        offsets = iter(load.slot_offsets(self.slot_experts))
        self._stream.wait_event(self._unpacked[slot])  # until the former content is unpacked
        with torch.cuda.stream(self._stream), self._times.span(COPY, self._stream):
            for rank in load.ranks:
                # Number of the rank's experts before the first expert of the load.
                experts_before = content.first - rank.offered.first_expert
                for array_begin, expert_bytes in rank.arrays:
                    offset, length = next(offsets), content.experts * expert_bytes
                    source = rank.memory[array_begin + experts_before * expert_bytes :][:length]
                    memory[offset : offset + length].copy_(source, non_blocking=True)
                    self.copied_bytes += length
        self._copied[slot].record(self._stream)

    def unpack(self, slot: int, load: Load, recipe: LayerRecipe) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts the unpacking of a slot's load into the current stream. The stream waits for the load's copy.

        Each rank of the load has some columns of the load's experts. The result joins the columns.

        Returns:
            w13 [slot_experts, 2 * inner, hidden] and w2 [slot_experts, hidden, inner], valid until the next
            call. They begin with the load's experts; the rest has undefined values.
        """
        stream, experts = torch.cuda.current_stream(), load.content.experts
        stream.wait_event(self._copied[slot])
        hidden, inner = recipe.hidden, recipe.inner
        w13, w2 = self._divide_buffer(hidden, inner)
        # The shape for the unpacker is [experts, parts, columns, inputs]. w13 has two parts, gates and ups.
        w13_parts = w13[:experts].view(experts, 2, inner, hidden)
        w2_parts = w2[:experts].unsqueeze(1)
        offsets = iter(load.slot_offsets(self.slot_experts))
        with self._times.span(UNPACK, stream):
            for rank in load.ranks:
                first = rank.offered.first_column
                end = first + rank.offered.w2.inputs  # the inputs of w2 are the rank's intermediate columns
                codes13, scales13, codes2, scales2 = self._slot_arrays(
                    slot, rank, experts, [next(offsets) for _ in rank.arrays]
                )
                matrix13, matrix2 = rank.matrices
                gates_and_ups, inputs = w13_parts[:, :, first:end], w2_parts[..., first:end]
                self._unpacker.unpack(matrix13, codes13, scales13, gates_and_ups, gated=True)
                self._unpacker.unpack(matrix2, codes2, scales2, inputs, gated=False)
        self._unpacked[slot].record(stream)
        return w13, w2

    def _divide_buffer(self, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns w13 and w2 of unpacked experts, as views of the buffer."""
        w2_elements = self.slot_experts * hidden * inner
        w13_elements = 2 * w2_elements
        w13 = self._buffer[:w13_elements].view(self.slot_experts, 2 * inner, hidden)
        w2 = self._buffer[w13_elements : w13_elements + w2_elements].view(self.slot_experts, hidden, inner)
        return w13, w2

    def _slot_arrays(
        self, slot: int, rank: RankExperts, experts: int, offsets: Sequence[int]
    ) -> list[torch.Tensor]:
        """Returns a rank's arrays in a slot as bytes: codes and block scales of w13, then of w2."""
        return [
            self._slots[slot][offset : offset + experts * expert_bytes]
            for offset, (_, expert_bytes) in zip(offsets, rank.arrays, strict=True)
        ]
