"""The order in which layers give their experts to CPU ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_operator.planning.moved_layers import choose_layers, group_by_cost, spread_evenly
from tests.unit.planning.planned_models import plan
from tests.unit.planning.test_feed_forward import feed_forward, mixture


@given(st.integers(1, 96), st.data())
def test_distances_differ_by_one_layer_at_most_also_across_steps(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, layers))
    chosen = spread_evenly(range(layers), count)
    distances = [after - before for before, after in pairwise([*chosen, chosen[0] + layers])]
    assert len(set(chosen)) == count
    assert max(distances) - min(distances) <= 1
    assert sum(distances) == layers


def test_cheaper_layers_come_first_and_the_others_are_spread() -> None:
    assert choose_layers([[3, 5], [0, 1, 2, 4]], 1) == [5]
    assert choose_layers([[3, 5], [0, 1, 2, 4]], 2) == [3, 5]
    assert choose_layers([[3, 5], [0, 1, 2, 4]], 4) == [3, 5, 1, 4]
    assert sorted(choose_layers([[3, 5], [0, 1, 2, 4]], 6)) == [0, 1, 2, 3, 4, 5]


def test_a_mixture_moves_experts_of_layers_that_are_spread_over_the_model() -> None:
    assert group_by_cost(mixture(dense_layers=2, layers=6)) == [[2, 3, 4, 5]]
    share = plan(feed_forward(own={"layers": 6}, device_memory="80Gi"), mixture()).plan.ranks[1].feed_forward
    assert share is not None
    assert share.layers == (3, 7, 11, 15, 19, 23)
