"""The ring's memory and the order of its slots. PURE.

A slot takes packed experts of one layer. Slots are used in turn.
"""

from dataclasses import dataclass
from typing import Final

SLOTS: Final = 3
"""Copies that are in flight or wait to be unpacked."""
ALIGNED: Final = 256
"""Bytes. Each array in a slot begins at a multiple."""


def align(address: int) -> int:
    """Rounds an address up to a multiple of ALIGNED."""
    return -(-address // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSizes:
    """Division of the ring's memory.

    Attributes:
        slot_experts: most experts in a slot.
        slot_bytes: of each of SLOTS slots.
        room_bytes: of the unpacked experts of one slot.
    """

    slot_experts: int
    slot_bytes: int
    room_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of slots and room."""
        return SLOTS * self.slot_bytes + self.room_bytes


def ring_sizes(
    num_bytes: int, *, packed_bytes: int, dense_bytes: int, arrays: int, most_experts: int
) -> RingSizes:
    """Divides `num_bytes` into slots and room, as large as they are useful. One expert always has room.

    Args:
        packed_bytes: of the largest expert in a slot.
        dense_bytes: of the largest unpacked expert.
        arrays: most arrays of a slot, each of which is aligned.
        most_experts: of a layer.
    """
    padding = arrays * ALIGNED
    fitting = (num_bytes - SLOTS * (padding + ALIGNED)) // (SLOTS * packed_bytes + dense_bytes)
    experts = max(1, min(fitting, most_experts))
    return RingSizes(
        slot_experts=experts,
        slot_bytes=align(experts * packed_bytes) + padding,
        room_bytes=experts * dense_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContent:
    """Experts of a layer, in the order of their numbers."""

    layer: int
    first: int
    experts: int

    def includes(self, other: "SlotContent") -> bool:
        """Returns whether a slot with this content begins with `other`, too."""
        same_begin = (self.layer, self.first) == (other.layer, other.first)
        return same_begin and self.experts >= other.experts


class SlotOrder:
    """Chooses the slot of each content. A slot can keep a content that was copied before its use."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, SlotContent] = {}

    def take(self, content: SlotContent) -> tuple[int, bool]:
        """Returns a slot for this content, and whether the slot has it already."""
        for slot, held in self._early.items():
            if held.includes(content):
                del self._early[slot]
                return slot, True
        slot = self._advance()
        self._early.pop(slot, None)
        return slot, False

    def take_early(self, content: SlotContent) -> int | None:
        """Returns a slot for a content that is used later; None if a slot has it, or all wait to be used."""
        if len(self._early) == SLOTS or any(held.includes(content) for held in self._early.values()):
            return None
        slot = self._advance()
        self._early[slot] = content
        return slot

    def _advance(self) -> int:
        slot = self._next
        self._next = (slot + 1) % SLOTS
        return slot
