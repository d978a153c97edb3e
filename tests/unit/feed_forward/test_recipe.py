"""The recipe of experts: its text, its regions of files, and its missing values."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.recipe import (
    ExpertParameter,
    LayerRecipe,
    Piece,
    Recipe,
    RecipeFile,
    find_missing_values,
    locate_view,
)

GATES = tuple(Piece((expert, 0, 0), (1, 4, 8), 0, 64 * expert, "bfloat16", (0, 8, 1)) for expert in range(2))
UPS = tuple(
    Piece((expert, 4, 0), (1, 4, 8), 0, 512 + 64 * expert, "bfloat16", (0, 8, 1)) for expert in range(2)
)
LAYER = LayerRecipe(
    experts=2,
    topk=1,
    hidden=8,
    inner=4,
    activation="silu",
    limit=None,
    alpha=1.5,
    beta=None,
    method="UnquantizedFusedMoEMethod",
    parameters={
        "w13_weight": ExpertParameter(shape=(2, 8, 8), dtype="bfloat16", pieces=(*GATES, *UPS)),
        "w13_bias": ExpertParameter(shape=(2, 8), dtype="bfloat16"),
    },
)


def test_a_recipe_is_equal_after_serialization() -> None:
    file = RecipeFile(name="model.safetensors", num_bytes=4096, digest="00")
    recipe = Recipe(layers={3: LAYER}, dtype="bfloat16", max_rows=64, unit=32, files=(file,))
    assert Recipe.from_text(recipe.to_text()) == recipe
    assert (recipe.hidden, recipe.topk) == (8, 1)


def test_layers_of_a_recipe_have_rows_of_one_size() -> None:
    layers = {3: LAYER, 4: replace(LAYER, topk=0)}
    with pytest.raises(
        ContractError,
        match=r"experts per token \(got 8 elements of an MLP, 8 elements with 1 expert\)\. Use spec",
    ):
        Recipe(layers=layers, dtype="bfloat16", max_rows=64, unit=32).topk  # noqa: B018 - it checks


def test_experts_without_all_values_are_reported() -> None:
    assert find_missing_values(LAYER) == []

    def having(*pieces: Piece) -> LayerRecipe:
        weight = replace(LAYER.parameters["w13_weight"], pieces=pieces)
        return replace(LAYER, parameters={"w13_weight": weight})

    bias = ExpertParameter(shape=(2, 8), dtype="bfloat16")
    one = replace(bias, pieces=(Piece((0, 0), (1, 8), 0, 0, "bfloat16", (0, 1)),))
    for name, parameter, topk, lacking in (
        ("w13_bias", bias, 1, []),  # vLLM creates biases for checkpoints without them
        ("w13_bias", one, 1, ["w13_bias of expert 1"]),
        ("w13_bias", bias, 0, ["w13_bias of expert 0", "w13_bias of expert 1"]),
        ("w13_qzeros", bias, 1, ["w13_qzeros of expert 0", "w13_qzeros of expert 1"]),
        ("w13_input_scale", one, 1, []),
    ):
        assert find_missing_values(replace(LAYER, topk=topk, parameters={name: parameter})) == lacking

    assert find_missing_values(having(*GATES, UPS[0])) == ["w13_weight of expert 1"]
    assert find_missing_values(having(*GATES)) == ["w13_weight of expert 0", "w13_weight of expert 1"]
    assert find_missing_values(having()) == ["w13_weight of expert 0", "w13_weight of expert 1"]


@given(data=st.data())
def test_a_view_has_the_position_of_its_elements_in_the_file(data: st.DataObject) -> None:
    """Tries random narrowed and permuted views of up to 4 dimensions."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    steps = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    start = [data.draw(st.integers(0, count - 1)) for count in shape]
    size = [data.draw(st.integers(1, count - first)) for count, first in zip(shape, start, strict=True)]
    order = data.draw(st.permutations(range(len(shape))))
    source = list(range(100, 100 + len(shape)))
    offset = sum(first * step for first, step in zip(start, steps, strict=True))
    found = locate_view(
        shape,
        offset,
        [size[dim] for dim in order],
        [steps[dim] for dim in order],
        [source[dim] for dim in order],
    )
    assert found[0] == tuple(start)
    kept = [dim for dim in range(len(shape)) if size[dim] > 1]
    # Dimensions of one element have the step of a neighbour, which may stand for them.
    assert sorted(count for count in found[1] if count > 1) == sorted(size[dim] for dim in kept)
    if all(count > 1 for count in shape):
        assert found[1] == tuple(size)
        assert all(found[2][dim] == source[dim] for dim in kept)


def test_a_view_that_is_not_one_region_of_a_file_is_refused() -> None:
    with pytest.raises(ContractError, match="must be a rectangular region"):
        locate_view((4, 6), 0, (12,), (2,), (1,))
