"""Which part of each tensor is a feed-forward rank's."""

import pytest

from heteroinfer_contract.column_shares import Span
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.columns import Part, part_of

HALF = Span(total=256, first=128, end=256)


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("layers.0.mlp.gate_proj.weight", (256, 64), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.down_proj.weight", (64, 256), Part(dim=1, start=128, length=128)),
        ("layers.0.feed_forward.w3.weight", (256, 64), Part(dim=0, start=128, length=128)),
        ("layers.0.feed_forward.w2.weight", (64, 256), Part(dim=1, start=128, length=128)),
        ("layers.0.mlp.up_proj.weight_scale_inv", (2, 1), Part(dim=0, start=1, length=1)),
        ("layers.0.mlp.down_proj.weight_scale_inv", (1, 2), Part(dim=1, start=1, length=1)),
        ("layers.0.mlp.up_proj.qweight", (64, 32), Part(dim=1, start=16, length=16)),
        ("layers.0.mlp.down_proj.qweight", (256, 8), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.down_proj.scales", (2, 64), Part(dim=0, start=1, length=1)),
        ("layers.0.mlp.down_proj.scales", (1, 64), Part()),
        ("layers.0.mlp.down_proj.weight_scale", (64, 1), Part()),
        ("layers.0.mlp.down_proj.g_idx", (256,), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.up_proj.g_idx", (64,), Part()),
        ("layers.0.mlp.up_proj.weight_packed", (256, 8), Part(dim=0, start=128, length=128)),
        ("layers.0.mlp.up_proj.weight_shape", (2,), Part()),
        ("layers.0.mlp.gate_up_proj.weight", (512, 64), Part(dim=0, start=128, length=128, blocks=2)),
        ("layers.0.mlp.gate_up_proj.bias", (512,), Part(dim=0, start=128, length=128, blocks=2)),
        ("layers.0.mlp.gate_up_proj.qweight", (64, 64), Part(dim=1, start=16, length=16, blocks=2)),
        ("layers.0.mlp.down_proj.bias", (64,), Part(zero=True)),
        ("layers.0.mlp.up_proj.bias", (256,), Part(dim=0, start=128, length=128)),
    ],
)
def test_each_format_is_cut_where_its_columns_are(name: str, shape: tuple[int, ...], part: Part) -> None:
    assert part_of(name, shape, HALF) == part


def test_the_first_rank_adds_the_bias() -> None:
    first = Span(total=256, first=0, end=128)
    assert part_of("layers.0.mlp.down_proj.bias", (64,), first) == Part()


def test_a_rank_of_its_own_takes_any_tensor_whole() -> None:
    whole = Span(total=256, first=0, end=256)
    assert part_of("layers.0.mlp.anything", (3,), whole) == Part()


def test_a_scale_that_spans_the_cut_is_refused() -> None:
    with pytest.raises(ContractError, match="cannot be cut at 128 and 256"):
        part_of("layers.0.mlp.up_proj.weight_scale_inv", (1, 1), HALF)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ContractError, match="use one feed-forward rank"):
        part_of("layers.0.mlp.up_proj.codebook", (256, 4), HALF)
