"""The division of the GPU's ring into slots, and the order in which slots are used."""

from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.gpu_experts import SLOTS
from vllm_heteroinfer.feed_forward.ring_slots import ALIGNED, SlotContent, SlotOrder, ring_sizes


@given(
    num_bytes=st.integers(0, 1 << 40),
    packed=st.integers(1, 1 << 28),
    dense=st.integers(1, 1 << 28),
    arrays=st.integers(1, 64),
    most=st.integers(1, 512),
)
def test_the_ring_fits_its_memory_and_wastes_little(
    num_bytes: int, packed: int, dense: int, arrays: int, most: int
) -> None:
    sizes = ring_sizes(num_bytes, packed_bytes=packed, dense_bytes=dense, arrays=arrays, most_experts=most)
    assert 1 <= sizes.slot_experts <= most
    assert sizes.slot_bytes >= sizes.slot_experts * packed + arrays * (ALIGNED - 1)
    assert sizes.buffer_bytes == sizes.slot_experts * dense
    assert sizes.num_bytes <= num_bytes or sizes.slot_experts == 1
    if sizes.slot_experts < most:
        assert num_bytes - sizes.num_bytes < SLOTS * (packed + (arrays + 2) * ALIGNED) + dense


def content(layer: int, first: int, experts: int = 4) -> SlotContent:
    return SlotContent(layer=layer, first=first, experts=experts)


def test_slots_are_used_in_turn() -> None:
    order = SlotOrder()
    assert [order.take(content(0, 4 * number)) for number in range(5)] == [
        (number % SLOTS, False) for number in range(5)
    ]


def test_an_early_copy_is_used_once() -> None:
    order = SlotOrder()
    assert order.take(content(1, 0)) == (0, False)
    assert order.take_early(content(0, 0)) == 1
    assert order.take_early(content(0, 0)) is None
    assert order.take(content(0, 0)) == (1, True)
    assert order.take(content(0, 0)) == (2, False)


def test_an_early_copy_serves_its_first_experts_but_no_others() -> None:
    order = SlotOrder()
    assert order.take_early(content(0, 0, 4)) == 0
    assert order.take(content(0, 0, 5)) == (1, False)
    assert order.take(content(1, 0, 4)) == (2, False)
    assert order.take(content(0, 0, 3)) == (0, True)


def test_the_slot_of_an_unused_early_copy_is_used_again() -> None:
    order = SlotOrder()
    assert [order.take_early(content(0, 4 * number)) for number in range(SLOTS + 1)] == [0, 1, 2, None]
    assert order.take(content(5, 0)) == (0, False)
    assert order.take(content(0, 0)) == (1, False)
    assert order.take(content(0, 8)) == (2, True)
