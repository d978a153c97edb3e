"""Our sizes of every published shape against vLLM's own, recorded by tests/shapes/oracle.py."""

import pytest

from tests.shapes.comparison import compare, recorded
from tests.shapes.corpus import SHAPES
from tests.shapes.profiles import recorded_profiles

MOST_OFF = 0.02


def test_no_shape_is_left_out() -> None:
    names = {shape.name for shape in SHAPES}
    assert len(names) == len(SHAPES) >= 30
    assert names == set(recorded("cpu")) == set(recorded_profiles())


@pytest.mark.parametrize(
    "name", [shape.name for shape in SHAPES if "refused" not in recorded("cpu")[shape.name]]
)
def test_weights_and_kv_of_both_stages(name: str) -> None:
    what, off = compare(recorded_profiles()[name], recorded("cpu")[name]).worst()
    assert off <= MOST_OFF, what
