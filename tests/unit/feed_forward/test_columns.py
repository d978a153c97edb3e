"""Which part of each tensor is a feed-forward rank's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.columns import Columns, Part, part_of, share_out, unit_of

HALF = Columns(total=256, first=128, end=256, once=False)


@given(
    units=st.integers(1, 60),
    unit=st.sampled_from([32, 64, 128]),
    shares=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
)
def test_shares_cover_all_columns_once(units: int, unit: int, shares: list[int]) -> None:
    if units < len(shares):
        with pytest.raises(ContractError, match="use fewer ranks"):
            share_out(units * unit, shares, unit)
        return
    parts = share_out(units * unit, shares, unit)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == units * unit
    assert all(part.width >= unit and part.first % unit == 0 for part in parts)
    assert [part.once for part in parts] == [True] + [False] * (len(shares) - 1)


def test_shares_follow_the_rates() -> None:
    assert [part.width for part in share_out(768, [1, 3], 32)] == [192, 576]
    assert [part.width for part in share_out(768, [1000, 1], 128)] == [640, 128]


def test_one_rank_takes_whatever_size_there_is() -> None:
    assert share_out(100, [1], 128) == [Columns(total=100, first=0, end=100, once=True)]


def test_columns_that_no_unit_divides_are_refused() -> None:
    with pytest.raises(ContractError, match="expected a multiple of 128"):
        share_out(192, [1, 1], unit_of(128))


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("layers.0.mlp.experts.3.gate_proj.weight", (256, 64), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.experts.3.down_proj.weight", (64, 256), Part(dim=1, start=128, length=128)),
        ("layers.0.block_sparse_moe.experts.3.w3.weight", (256, 64), Part(dim=0, start=128, length=128)),
        ("layers.0.block_sparse_moe.experts.3.w2.weight", (64, 256), Part(dim=1, start=128, length=128)),
        ("layers.0.mlp.experts.3.up_proj.weight_scale_inv", (2, 1), Part(dim=0, start=1, length=1)),
        ("layers.0.mlp.experts.3.down_proj.weight_scale_inv", (1, 2), Part(dim=1, start=1, length=1)),
        ("layers.0.mlp.experts.3.up_proj.qweight", (64, 32), Part(dim=1, start=16, length=16)),
        ("layers.0.mlp.experts.3.down_proj.qweight", (256, 8), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.experts.3.down_proj.scales", (2, 64), Part(dim=0, start=1, length=1)),
        ("layers.0.mlp.experts.3.down_proj.scales", (1, 64), Part()),
        ("layers.0.mlp.experts.3.down_proj.weight_scale", (64, 1), Part()),
        ("layers.0.mlp.experts.3.down_proj.g_idx", (256,), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.experts.3.up_proj.g_idx", (64,), Part()),
        ("layers.0.mlp.experts.3.up_proj.weight_packed", (256, 8), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.experts.3.up_proj.weight_shape", (2,), Part()),
        ("layers.0.mlp.experts.gate_up_proj_blocks", (8, 512, 2, 16), Part(dim=1, start=256, length=256)),
        ("layers.0.mlp.experts.down_proj_blocks", (8, 64, 8, 16), Part(dim=2, start=4, length=4)),
        (
            "layers.0.block_sparse_moe.input_linear.weight",
            (8, 512, 64),
            Part(dim=1, start=128, length=128, blocks=2),
        ),
        ("layers.0.mlp.gate_up_proj.weight", (512, 64), Part(dim=0, start=128, length=128, blocks=2)),
        ("layers.0.mlp.gate_up_proj.bias", (512,), Part(dim=0, start=128, length=128, blocks=2)),
        ("layers.0.mlp.gate_up_proj.qweight", (64, 64), Part(dim=1, start=16, length=16, blocks=2)),
        ("layers.0.block_sparse_moe.output_linear.weight", (8, 64, 256), Part(dim=2, start=128, length=128)),
        ("layers.0.mlp.experts.down_proj_bias", (8, 64), Part(zero=True)),
        ("layers.0.mlp.down_proj.bias", (64,), Part(zero=True)),
        ("layers.0.mlp.up_proj.bias", (256,), Part(dim=0, start=128, length=128)),
    ],
)
def test_each_format_is_cut_where_its_columns_are(name: str, shape: tuple[int, ...], part: Part) -> None:
    assert part_of(name, shape, HALF) == part


def test_the_first_rank_adds_the_bias() -> None:
    first = Columns(total=256, first=0, end=128, once=True)
    assert part_of("layers.0.mlp.experts.down_proj_bias", (8, 64), first) == Part()


def test_a_rank_of_its_own_takes_any_tensor_whole() -> None:
    whole = Columns(total=256, first=0, end=256, once=True)
    assert part_of("layers.0.mlp.experts.anything", (3,), whole) == Part()


def test_a_scale_that_spans_the_cut_is_refused() -> None:
    with pytest.raises(ContractError, match="cannot be cut at 128 and 256"):
        part_of("layers.0.mlp.experts.3.up_proj.weight_scale_inv", (1, 1), HALF)


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.3.gate_up_proj.weight"])
def test_experts_whose_gate_and_up_are_in_one_tensor_are_refused(name: str) -> None:
    with pytest.raises(ContractError, match="use one feed-forward rank"):
        part_of(f"layers.0.mlp.{name}", (512, 64), HALF)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ContractError, match="use one feed-forward rank"):
        part_of("layers.0.mlp.experts.3.up_proj.codebook", (256, 4), HALF)
