"""Our sizes of every published shape against vLLM's own, recorded by tests/shapes/oracle.py."""

import pytest

from tests.shapes.comparison import compare, recorded
from tests.shapes.corpus import SHAPES
from tests.shapes.profiles import recorded_profiles

MAX_RELATIVE_ERROR = 0.02
NOT_ASKED = {"Llama-4-Scout-17B-16E-Instruct", "Qwen3.5-35B-A3B"}
"""On the GPU machine, whose time was over before."""


def test_no_shape_is_left_out() -> None:
    names = {shape.name for shape in SHAPES}
    assert len(names) == len(SHAPES) >= 30
    assert names == set(recorded("cpu")) == set(recorded_profiles())
    assert names - set(recorded("cuda")) == NOT_ASKED


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (device, name)
        for device in ("cpu", "cuda")
        for name, answer in recorded(device).items()
        if "refused" not in answer
    ],
)
def test_weights_and_kv_cache_of_both_stages_equal_vllms(device: str, name: str) -> None:
    what, off = compare(recorded_profiles()[name], recorded(device)[name], device).worst()
    assert off <= MAX_RELATIVE_ERROR, what


def test_knows_the_models_that_cuda_refuses() -> None:
    """DeepSeek-V3.2 needs DeepGEMM, which the GPU machine lacked.

    InternVL3-8B needs the code of its repository.
    """
    refused = {name for name, answer in recorded("cuda").items() if "refused" in answer}
    assert refused == {"DeepSeek-V3.2", "InternVL3-8B"}
