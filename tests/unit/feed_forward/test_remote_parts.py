"""Which tensors of a checkpoint belong to parts that are elsewhere."""

import pytest

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.remote_parts import RemoteParts, check_found, layer_of

EXPERTS = RemoteParts(experts={1: None, 2: None})
MLPS = RemoteParts(mlps={0, 2})


@pytest.mark.parametrize(
    ("tensor", "elsewhere"),
    [
        ("model.layers.2.mlp.down_proj.weight", True),
        ("model.layers.1.mlp.down_proj.weight", False),
        ("layers.2.feed_forward.w1.weight", True),
        ("layers.1.feed_forward.w1.weight", False),
        ("model.layers.2.post_mlp_layernorm.weight", False),
        ("model.layers.2.mlp_norm.weight", False),
        ("language_model.model.layers.2.mlp.up_proj.weight", True),
        ("vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight", False),
        ("audio_tower.layers.2.mlp.fc1.weight", False),
    ],
)
def test_finds_the_mlps_of_other_ranks(tensor: str, elsewhere: bool) -> None:
    assert MLPS.has(tensor) is elsewhere


def test_two_sets_of_experts_in_a_layer_are_refused() -> None:
    parts = RemoteParts()
    parts.add_experts(3, None)
    with pytest.raises(ContractError, match="layer 3: got two sets of routed experts"):
        parts.add_experts(3, None)


def test_layers_are_read_from_names() -> None:
    assert layer_of("model.layers.17.mlp.experts") == 17
    assert layer_of("language_model.model.layers.3") == 3
    assert layer_of("model.norm") is None
    assert layer_of("vision_tower.vision_model.encoder.layers.3.mlp") is None


def test_layers_without_such_a_part_are_named() -> None:
    check_found(EXPERTS, [1, 2], "m")
    with pytest.raises(ContractError, match=r"for layers \[0\]"):
        check_found(EXPERTS, [0, 1], "m")
