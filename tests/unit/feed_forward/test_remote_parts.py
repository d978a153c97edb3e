"""Which tensors of a checkpoint belong to parts that are elsewhere."""

import pytest

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.remote_parts import RemoteParts, check_found, layer_of

EXPERTS = RemoteParts(experts={1, 2})
MLPS = RemoteParts(mlps={0, 2})


@pytest.mark.parametrize(
    ("tensor", "elsewhere"),
    [
        ("model.layers.1.mlp.experts.0.gate_proj.weight", True),
        ("model.layers.1.mlp.experts.gate_up_proj_blocks", True),
        ("model.layers.2.block_sparse_moe.experts.7.w1.weight", True),
        ("model.layers.1.block_sparse_moe.input_linear.weight", True),
        ("model.layers.1.block_sparse_moe.output_linear.weight", True),
        ("model.layers.1.block_sparse_moe.router.layer.weight", False),
        ("model.layers.1.shared_mlp.input_linear.weight", False),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", False),
        ("model.layers.12.mlp.experts.0.gate_proj.weight", False),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.1.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.1.mlp.gate.weight", False),
        ("model.layers.1.mlp.gate.e_score_correction_bias", False),
        ("model.layers.1.self_attn.q_proj.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_experts(tensor: str, elsewhere: bool) -> None:
    assert EXPERTS.has(tensor) is elsewhere


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
def test_mlps(tensor: str, elsewhere: bool) -> None:
    assert MLPS.has(tensor) is elsewhere


def test_two_sets_of_experts_in_a_layer_are_refused() -> None:
    parts = RemoteParts()
    parts.add_experts(3)
    with pytest.raises(ContractError, match="layer 3: got two sets of routed experts"):
        parts.add_experts(3)


def test_layers_are_read_from_names() -> None:
    assert layer_of("model.layers.17.mlp.experts") == 17
    assert layer_of("language_model.model.layers.3") == 3
    assert layer_of("model.norm") is None
    assert layer_of("vision_tower.vision_model.encoder.layers.3.mlp") is None


def test_layers_without_such_a_part_are_named() -> None:
    check_found(EXPERTS, [1, 2], "m")
    with pytest.raises(ContractError, match=r"for layers \[0\]"):
        check_found(EXPERTS, [0, 1], "m")
