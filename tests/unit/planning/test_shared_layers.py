"""Layers that read an earlier layer's keys and values: their memory, and where a stage may begin."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.model import AttentionKind, LayerKind
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.commands.plan_details import describe_model
from heteroinfer_operator.errors import PlanError
from tests.unit.planning.planned_models import GIB, MIB, cpu, device_memory, gpu, plan, profile, spec

LAYERS, SHARING = 42, 18
"""Of Gemma-4's E4B: each sixth layer has full attention, and the last 18 share."""
_WINDOW = LayerKind(attention=AttentionKind.WINDOW, kv_heads=2, kv_width=512, window=512)
_FULL = LayerKind(kv_heads=2, kv_width=1024)


def e4b(**fields: Any) -> ModelProfile:
    """Returns a model of this shape; with `sharing=0` none of its layers shares."""
    sharing = fields.pop("sharing", SHARING)
    kinds = (_WINDOW, _FULL, replace(_WINDOW, shares_kv=True), replace(_FULL, shares_kv=True))
    of_layer = [int((i + 1) % 6 == 0) + 2 * (i >= LAYERS - sharing) for i in range(LAYERS)]
    fields = {
        "architecture": "Gemma4ForCausalLM",
        "num_layers": LAYERS,
        "layer_bytes": (180 * MIB,) * LAYERS,
        "embedding_bytes": 1280 * MIB,
        "head_bytes": 0,
        "tied_head": True,
        "layer_table_bytes": 5376 * MIB,
        "kinds": kinds,
        "kind_of_layer": tuple(of_layer),
        # The last layers of their own that they read are 22 and 23.
        "last_stage_layers": LAYERS - 22 if sharing else 1,
        **fields,
    }
    return profile(**fields)


def test_layers_that_share_a_kv_cache_take_no_memory_for_it() -> None:
    alone = spec(gpu(deviceMemory="80Gi"))
    shared, own = (plan(alone, e4b(sharing=sharing)) for sharing in (SHARING, 0))
    of_layer = shared.sizes.kv.block_bytes
    assert of_layer(24, LAYERS) == 0
    assert of_layer(0, LAYERS) == of_layer(0, 24) > 0
    # One block table holds window layers and full layers, so the cache shrinks by less than the share of the
    # layers.
    assert shared.sizes.cache_bytes(0, LAYERS) < 0.6 * own.sizes.cache_bytes(0, LAYERS)
    assert shared.sizes.cache_bytes(0, LAYERS) > 0.5 * own.sizes.cache_bytes(0, LAYERS)
    # A step reads a shared cache once for each layer that uses it, so the times are equal.
    steps = [planned.plan.ranks[0].predicted_step_s for planned in (shared, own)]
    assert steps[0] == steps[1]


def test_stages_are_divided_before_the_layers_that_share_a_kv_cache() -> None:
    for roles in (
        (cpu(memory="64Gi"), gpu(deviceMemory="80Gi")),
        (cpu(memory="64Gi", pods=3),),
        (gpu(deviceMemory="24Gi", pods=2),),
        (gpu(pods=2),),
    ):
        ranks = plan(spec(*roles), e4b()).plan.ranks
        assert ranks[-1].first_layer <= 22
        assert [rank.first_layer for rank in ranks[1:]] == [rank.end_layer for rank in ranks[:-1]]
        assert all(rank.kv_cache_bytes for rank in ranks)
    even = plan(spec(gpu(pods=3)), e4b(sharing=0)).plan.ranks
    assert [rank.num_layers for rank in even] == [14, 14, 14]


def test_refuses_user_layers_that_split_shared_layers() -> None:
    listed = spec(cpu(layers=[30]), gpu(layers=[12]))
    with pytest.raises(
        PlanError,
        match=r"the last stage must have at least 20 layers \(got 12\), because the model's last 20 ",
    ):
        plan(listed, e4b())
    assert plan(spec(cpu(layers=[22]), gpu(layers=[20])), e4b()).plan.ranks[1].num_layers == 20
    assert plan(spec(gpu(layers=[LAYERS])), e4b()).plan.ranks[0].num_layers == LAYERS


def test_reports_the_missing_memory_of_the_last_stage() -> None:
    small = spec(cpu(memory="64Gi"), gpu(deviceMemory=device_memory(99 * GIB // 10, e4b())))
    with pytest.raises(PlanError) as caught:
        plan(small, e4b())
    assert caught.value.reason == "InsufficientMemory"
    said = caught.value.message
    assert said.startswith("stage 1 (role gpu): ")
    assert " GiB of memory is missing. The last 20 layers share keys and values" in said
    assert "A rank has 9.90 GiB. Raise the role's deviceMemory" in said


def test_embeddings_of_layers_are_on_every_rank() -> None:
    with_tables, without = (
        plan(spec(cpu(memory="64Gi"), gpu(deviceMemory="80Gi")), e4b(layer_table_bytes=size))
        for size in (5376 * MIB, 0)
    )
    for ours, bare in zip(with_tables.plan.ranks, without.plan.ranks, strict=True):
        copies = 2 if ours.role == "cpu" else 1
        assert ours.num_layers == bare.num_layers
        assert ours.weight_bytes - bare.weight_bytes == copies * 5376 * MIB
    assert with_tables.sizes.profile.total_bytes - without.sizes.profile.total_bytes == 5.25 * GIB
    assert ("embeddings per layer", "5.25 GiB, on every rank") in describe_model(e4b())
