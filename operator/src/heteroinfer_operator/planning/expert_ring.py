"""The ring: GPU memory for a part of the feed-forward ranks' experts, and the time of the GPU's work. Pure.

The worker divides the ring into slots for copied experts, and room for the unpacked experts of one slot
(vllm_heteroinfer/feed_forward/ring_slots.py).
"""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from heteroinfer_contract.gpu_experts import SLOTS
from heteroinfer_operator.planning.rates import Rates

_ALIGNMENT_BYTES: Final = SLOTS * 2**15
"""Maximum number of bytes of the ring that alignment takes: the worker aligns each array in a slot."""
_SLOT_S: Final = 200e-6
"""Seconds in which the host launches the kernels and copies of a slot (about 20 launches); an estimate."""
_PAGE_BYTES, _ENTRY_BYTES = 4096, 8
"""The GPU may keep an entry of its page table for each page of host memory that it maps."""


def page_table_bytes(mapped_bytes: int) -> int:
    """Returns the maximum number of bytes that a GPU's page tables take for host memory that the GPU maps."""
    return ceil(mapped_bytes / _PAGE_BYTES) * _ENTRY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedLayers:
    """Layers with equal experts. The GPU copies these experts from feed-forward ranks.

    Attributes:
        count: number of these layers.
        experts: experts of a layer.
        chosen: experts that each token uses.
        inner: intermediate columns of a GPU's part of an expert.
        packed_bytes: bytes of a GPU's part of a layer's experts, as its feed-forward ranks hold them.
    """

    count: int
    experts: int
    chosen: int
    inner: int
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRing:
    """A ring for the layers of feed-forward ranks.

    Attributes:
        num_bytes: size of the ring, `RankAssignment.ring_bytes`.
        gpus: number of GPUs that copy their parts of a layer out of one host's memory at the same time.
        hidden: elements of a row.
        element_bytes: bytes of an element of rows and unpacked experts.
    """

    num_bytes: int = field(default=0)
    hidden: int
    element_bytes: int
    gpus: int = 1
    layers: tuple[CopiedLayers, ...]

    @property
    def _expert_bytes(self) -> int:
        """Bytes of the ring for one more expert in each slot, and in the room for unpacked experts."""
        packed_bytes = max(ceil(each.packed_bytes / each.experts) for each in self.layers)
        # An unpacked expert has three matrices: gate, up and down.
        unpacked_bytes = 3 * max(each.inner for each in self.layers) * self.hidden * self.element_bytes
        return SLOTS * packed_bytes + unpacked_bytes

    def fitting_experts(self, num_bytes: int) -> int:
        """Returns how many experts fit into each slot of a ring of this size; 0 if the ring is too small."""
        return max(num_bytes - _ALIGNMENT_BYTES, 0) // self._expert_bytes

    def with_slots_for(self, experts: int) -> "ExpertRing":
        """Returns the ring whose slots have room for this number of experts."""
        return replace(self, num_bytes=experts * self._expert_bytes + _ALIGNMENT_BYTES)

    @property
    def experts_per_slot(self) -> int:
        """Experts that the GPU copies and computes at the same time."""
        return max(self.fitting_experts(self.num_bytes), 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of intermediate values for each token of a batch whose experts the GPU computes.

        For each chosen expert, vLLM's `fused_experts` has two buffers: one for gate and up, which also takes
        the result, and one for the values after the activation. Each token also has the sum in float32, and
        two rows in the engine's type (one is the answer of the ranks).
        """
        values = max(each.chosen * (max(2 * each.inner, self.hidden) + each.inner) for each in self.layers)
        return values * self.element_bytes + self.hidden * (2 * self.element_bytes + 4)

    @property
    def total_bytes(self) -> int:
        """Maximum number of bytes of GPU memory that the ring takes, without intermediate values."""
        return self.num_bytes + self.page_table_bytes

    @property
    def page_table_bytes(self) -> int:
        """Bytes of the page tables of all copied layers. The GPU and the host each keep such tables."""
        return page_table_bytes(sum(each.count * each.packed_bytes for each in self.layers))

    def times(self, rows: int, gpu: Rates) -> "RingTimes":
        """Returns the times in which the GPU copies and computes all experts of all layers in a step.

        The GPU can copy experts before the rows of their layer exist, but not more experts than all slots
        hold. The layer with the smallest such part counts for all layers.

        Args:
            rows: tokens of the step.
            gpu: rates of the GPU.
        """
        early_part = min(min(SLOTS * self.experts_per_slot / each.experts, 1.0) for each in self.layers)
        # The host's memory limits copies of several GPUs. The host's rate is assumed to be the rate of one
        # link.
        copy_s = self.gpus * sum(each.count * each.packed_bytes for each in self.layers) / gpu.link
        compute_s = sum(each.count * self._compute_s(each, rows, gpu) for each in self.layers)
        return RingTimes(copy_s=copy_s, compute_s=compute_s, early_part=early_part)

    def _compute_s(self, layer: CopiedLayers, rows: int, gpu: Rates) -> float:
        """Returns the seconds in which the GPU unpacks and computes all experts of a layer."""
        element, choices = self.element_bytes, rows * layer.chosen
        unpacked_bytes = layer.experts * 3 * layer.inner * self.hidden * element
        # For each slot, the GPU writes and reads the intermediate values of all choices: gate, up, the
        # activation of both (3 * inner) and the result (hidden). Then the GPU adds the results to a sum in
        # float32.
        choice_bytes = choices * 2 * (3 * layer.inner + self.hidden) * element
        sum_bytes = rows * self.hidden * (2 * 4 + element)
        slots = ceil(layer.experts / self.experts_per_slot)
        # Each choice multiplies and adds once for each element of the expert's three matrices.
        computing_s = 2 * choices * 3 * layer.inner * self.hidden / gpu.operations + slots * _SLOT_S
        # The GPU reads packed weights, and writes and reads unpacked weights.
        moved_bytes = slots * (choice_bytes + sum_bytes) + layer.packed_bytes + 2 * unpacked_bytes
        return computing_s + moved_bytes / gpu.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTimes:
    """Seconds in which the GPU works on all experts of all layers of feed-forward ranks in a step.

    Attributes:
        copy_s: seconds of copies.
        compute_s: seconds of unpacking and computing.
        early_part: part of a layer's experts that the GPU can copy before the layer's rows exist.
    """

    copy_s: float
    compute_s: float
    early_part: float

    def part_that_ends_with_cpus(self, cpu_s: float, exchange_s: float, gap_s: float) -> float:
        """Returns the part of the experts with which GPU and CPUs end at the same time; at most 1.

        Args:
            cpu_s: seconds if CPUs compute all experts, with the exchange.
            exchange_s: seconds of the exchange. The GPU also copies in this time.
            gap_s: seconds in which the GPU does other work of the step, and copies early.
        """
        # With a part p on the GPU, the CPUs take cpu_s - p * cpu_computing_s. At the same time, the GPU
        # copies for p * copy_s - early_s and computes for p * compute_s (see `seconds`).
        cpu_computing_s = cpu_s - exchange_s
        early_s = min(gap_s, self.early_part * self.copy_s)
        return min(
            (cpu_s + early_s) / (cpu_computing_s + self.copy_s),  # the p at which copies end with the CPUs
            cpu_s / (cpu_computing_s + self.compute_s),  # the p at which the computation ends with the CPUs
            1.0,
        )  # with the smallest of these, the GPU ends with the CPUs or earlier

    def seconds(self, part: float, gap_s: float) -> float:
        """Returns the seconds for copying and computing a part of the experts, without early copies.

        Args:
            part: part of the experts that the GPU computes, from 0 to 1.
            gap_s: seconds in which the GPU does other work of the step, and copies early.
        """
        early_s = min(gap_s, self.early_part * self.copy_s)
        return max(part * self.copy_s - early_s, part * self.compute_s)
