"""The division of intermediate columns and experts among feed-forward ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.column_shares import (
    Span,
    column_unit_of,
    share_columns,
    share_experts,
    shares_by_rate,
)
from heteroinfer_contract.errors import ContractError


@given(
    units=st.integers(1, 60),
    unit=st.sampled_from([32, 64, 128]),
    shares=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
)
def test_shares_cover_all_columns_once(units: int, unit: int, shares: list[int]) -> None:
    if units < len(shares):
        with pytest.raises(ContractError, match=r"Use at most .* ranks"):
            share_columns(units * unit, shares, unit)
        return
    parts = share_columns(units * unit, shares, unit)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == units * unit
    assert all(part.count >= unit and part.first % unit == 0 for part in parts)
    assert [part.adds_bias for part in parts] == [True] + [False] * (len(shares) - 1)


@given(experts=st.integers(1, 60), shares=st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_every_expert_belongs_to_one_rank(experts: int, shares: list[int]) -> None:
    if experts < len(shares):
        with pytest.raises(ContractError, match=r"cannot share .* Use at most .* ranks"):
            share_experts(experts, shares)
        return
    parts = share_experts(experts, shares)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == parts[-1].total == experts
    assert all(part.count >= 1 for part in parts)


def test_shares_follow_the_rates() -> None:
    assert [part.count for part in share_columns(768, [1, 3], 32)] == [192, 576]
    assert [part.count for part in share_columns(768, [1000, 1], 128)] == [640, 128]


@given(st.lists(st.floats(10e9, 200e9), min_size=1, max_size=8))
def test_shares_by_rate_balance_the_ranks(rates: list[float]) -> None:
    shares = shares_by_rate(rates)
    at_best = sum(shares) / sum(rates)
    assert all(share >= 1 for share in shares)
    assert max(share / rate for share, rate in zip(shares, rates, strict=True)) <= 1.25 * at_best


def test_ranks_that_read_about_as_fast_have_equal_shares() -> None:
    assert shares_by_rate([50e9, 40e9, 47e9]) == (1, 1, 1)
    assert shares_by_rate([50e9, 39e9]) == (100, 78)
    assert shares_by_rate([1000e9, 1e9]) == (100, 1)


def test_one_rank_takes_any_number_of_columns() -> None:
    assert share_columns(100, [1], 128) == [Span(total=100, first=0, end=100)]


def test_columns_that_are_not_a_multiple_of_the_unit_are_refused() -> None:
    with pytest.raises(ContractError, match="192 is not divisible by 128"):
        share_columns(192, [1, 1], column_unit_of({"group_size": 128}))


@pytest.mark.parametrize(
    ("quantization", "unit"),
    [
        (None, 32),
        ({"quant_method": "mxfp4"}, 32),
        ({"quant_method": "gptq", "group_size": -1}, 32),
        ({"quant_method": "gptq", "group_size": 16}, 32),
        ({"quant_method": "awq", "q_group_size": 128}, 128),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, 128),
        ({"config_groups": {"group_0": {"weights": {"group_size": 48}}}}, 96),
        (
            {"config_groups": {"group_0": {"weights": {"group_size": None, "block_structure": [128, 128]}}}},
            128,
        ),
    ],
)
def test_the_column_unit_covers_a_kernel_block_and_a_scale(
    quantization: dict[str, Any] | None, unit: int
) -> None:
    assert column_unit_of(quantization) == unit
