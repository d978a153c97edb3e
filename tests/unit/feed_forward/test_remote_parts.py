"""Layers are read from names of modules and tensors. Planned layers without experts or MLP are refused."""

import pytest

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.remote_parts import check_found, layer_of


def test_layers_are_read_from_names() -> None:
    assert layer_of("model.layers.17.mlp.experts") == 17
    assert layer_of("language_model.model.layers.3") == 3
    assert layer_of("model.norm") is None
    assert layer_of("vision_tower.vision_model.encoder.layers.3.mlp") is None


def test_reports_layers_without_experts_or_mlp() -> None:
    check_found({1, 2}, [1, 2], "m")
    with pytest.raises(ContractError, match=r"cannot compute layers \[0\]"):
        check_found({1, 2}, [0, 1], "m")
