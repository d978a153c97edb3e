"""Divides the GPU's ring into slots, and chooses the slot for each copy of experts. Pure.

The ring is the part of the GPU's memory for copied experts. A slot has packed experts of one layer. Slots are
used in turn.
"""

from dataclasses import dataclass
from typing import Final

from heteroinfer_contract.gpu_experts import SLOTS

ALIGNED: Final = 256
"""Each array in a slot begins at a multiple of this number of bytes."""


def align(address: int) -> int:
    """Rounds an address up to a multiple of ALIGNED."""
    return -(-address // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSizes:
    """Division of the ring's memory.

    Attributes:
        slot_experts: maximum number of experts in a slot.
        slot_bytes: size of each of the SLOTS slots.
        buffer_bytes: size of the buffer for one slot's unpacked experts.
    """

    slot_experts: int
    slot_bytes: int
    buffer_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of all slots and the buffer."""
        return SLOTS * self.slot_bytes + self.buffer_bytes


def ring_sizes(
    num_bytes: int, *, packed_bytes: int, dense_bytes: int, arrays: int, most_experts: int
) -> RingSizes:
    """Divides `num_bytes` into slots and the buffer, each for as many experts as fit.

    A slot has at least one expert, even if that needs more than `num_bytes`, and at most `most_experts`.

    Args:
        packed_bytes: size of the largest packed expert.
        dense_bytes: size of the largest unpacked expert.
        arrays: maximum number of arrays in a slot; each of them is aligned.
        most_experts: number of experts in the largest layer.
    """
    padding = arrays * ALIGNED  # the alignment of an array adds less than ALIGNED bytes
    bytes_for_experts = num_bytes - SLOTS * (padding + ALIGNED)  # ALIGNED more for `align` below
    num_fitting = bytes_for_experts // (SLOTS * packed_bytes + dense_bytes)
    experts = max(1, min(num_fitting, most_experts))
    return RingSizes(
        slot_experts=experts,
        slot_bytes=align(experts * packed_bytes) + padding,
        buffer_bytes=experts * dense_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContent:
    """A range of experts of a layer."""

    layer: int
    first: int
    experts: int

    def includes(self, other: "SlotContent") -> bool:
        """Returns whether this content begins with `other`, so that its slot can serve `other`."""
        has_same_begin = (self.layer, self.first) == (other.layer, other.first)
        return has_same_begin and self.experts >= other.experts


class SlotOrder:
    """Chooses the slot for each copy. The slot of an early copy stays reserved for its content.

    The reservation ends with the first use of the content, or when the slot's next turn comes.
    """

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, SlotContent] = {}

    def take(self, content: SlotContent) -> tuple[int, bool]:
        """Returns the slot for this content, and whether the content was copied into it early."""
        for slot, reserved in self._early.items():
            if reserved.includes(content):
                del self._early[slot]
                return slot, True
        slot = self._advance()
        self._early.pop(slot, None)  # this copy overwrites the slot
        return slot, False

    def take_early(self, content: SlotContent) -> int | None:
        """Returns the slot for content that is used later; None if no copy is needed or possible.

        No copy is needed if a slot is reserved for this content already. No copy is possible if all slots are
        reserved.
        """
        if len(self._early) == SLOTS or any(each.includes(content) for each in self._early.values()):
            return None
        slot = self._advance()
        self._early[slot] = content
        return slot

    def _advance(self) -> int:
        """Returns the slot whose turn it is, and moves the turn to the next slot."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        return slot
