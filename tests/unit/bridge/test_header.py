"""Headers that identify a rank's current collective."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_heteroinfer.distributed.bridge.header import (
    HEADER_BYTES,
    HeaderTemplate,
    Operation,
    describe,
    header_of_part,
    num_parts,
    pack_header,
)

DTYPES = ("torch.bool", "torch.int64", "torch.float16", "torch.bfloat16", "torch.float32")
CALLS = st.fixed_dictionaries(
    {
        "operation": st.sampled_from(Operation),
        "shape": st.lists(st.integers(-1, 2**40), max_size=8).map(tuple),
        "dtype": st.sampled_from(DTYPES),
        "root": st.integers(-1, 1000),
        "step": st.integers(0, 2**62),
        "count": st.integers(0, 2**31),
        "history": st.integers(0, 2**64 - 1),
        "sizes": st.none() | st.lists(st.integers(0, 2**40), min_size=2, max_size=8),
    }
)


def pack(call: dict[str, Any]) -> bytes:
    return pack_header(call["operation"], **{key: call[key] for key in call if key != "operation"})


@given(call=CALLS)
def test_equal_calls_have_equal_headers(call: dict[str, Any]) -> None:
    assert pack(call) == pack(dict(call))
    assert len(pack(call)) == HEADER_BYTES


@given(
    call=CALLS, other=CALLS, field=st.sampled_from(["operation", "dtype", "root", "step", "count", "history"])
)
def test_different_calls_have_different_headers(
    call: dict[str, Any], other: dict[str, Any], field: str
) -> None:
    assume(call[field] != other[field])
    assert pack(call) != pack(call | {field: other[field]})


@given(call=CALLS, shape=st.lists(st.integers(-1, 2**40), max_size=8).map(tuple))
def test_trailing_zeros_change_the_header(call: dict[str, Any], shape: tuple[int, ...]) -> None:
    assume(shape != call["shape"])
    assert pack(call) != pack(call | {"shape": shape})
    if len(shape) < 8:
        assert pack(call | {"shape": (*shape, 0)}) != pack(call | {"shape": shape})


@given(call=CALLS)
def test_template_fills_in_step_count_and_history(call: dict[str, Any]) -> None:
    template = HeaderTemplate(call["operation"], shape=call["shape"], dtype=call["dtype"])
    filled = template.fill(call["step"], call["count"], call["history"])
    assert filled == pack(call | {"root": -1, "sizes": None})


@given(call=CALLS, part=st.integers(1, 2**40))
def test_each_part_of_a_call_has_its_own_header(call: dict[str, Any], part: int) -> None:
    header = pack(call)
    assert header_of_part(header, 0) == header
    assert header_of_part(header, part) != header
    assert f"part {part}" in describe(header_of_part(header, part))


def test_describes_a_call() -> None:
    header = pack_header(
        Operation.ALL_REDUCE, shape=(16, 4096), dtype="torch.bfloat16", step=12, count=7, history=0xAB
    )
    assert describe(header) == "all_reduce #7 of step 12 [16, 4096] bfloat16 history 00000000000000ab"
    header = pack_header(
        Operation.GATHER, shape=(), dtype="torch.int64", root=1, step=0, count=1, history=0, sizes=[1, 2]
    )
    assert describe(header).startswith("gather #1 of step 0 [] int64 root 1 sizes ")


def test_describes_invalid_bytes_as_an_unknown_call() -> None:
    assert "not a header of this version" in describe(b"\xff" * HEADER_BYTES)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1,) * 9, "torch.float32"), ((1,), "torch.complex64"), ((1,), "torch.float8_e4m3fn")],
)
def test_refuses_unsupported_tensors(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"all_reduce: tensor must have at most 8 dims and one of the dtypes torch\.bool.* \(got ",
    ):
        pack_header(Operation.ALL_REDUCE, shape=shape, dtype=dtype, step=0, count=1, history=0)


@given(elements=st.integers(0, 2**40), per_part=st.integers(1, 2**22))
def test_parts_cover_a_tensor(elements: int, per_part: int) -> None:
    parts = num_parts(elements, per_part)
    assert parts * per_part >= elements
    assert parts == 1 or (parts - 1) * per_part < elements
