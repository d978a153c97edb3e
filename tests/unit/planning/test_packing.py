"""Weights in 4 bits on CPUs: their packed size, and the additional memory while they are packed."""

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from heteroinfer_contract.model import LayerKind, Routing, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.commands.plan_details import describe_memory
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.planning.packing import packed_ratio, packed_ratio_for_amx
from tests.unit.planning.planned_models import GIB, MIB, cpu, device_memory, gpu, plan, profile, spec

FOUR_BITS = (SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4)
PLAIN, QUANTIZED = 2 * MIB, 100 * MIB
COPIES = {SchemeName.AWQ: 2, SchemeName.GPTQ: 3, SchemeName.INT4: 2}


def four_bits(name: SchemeName = SchemeName.INT4, group: int = 128, **fields: Any) -> ModelProfile:
    """Returns a dense model in 4 bits, whose layers have norms in bf16 too."""
    quantized = fields.pop("kind_bytes", QUANTIZED)
    kind = LayerKind(kv_heads=8, kv_width=256, quantized_bytes=quantized, mlp_bytes=70 * MIB)
    layers = fields.pop("num_layers", 32)
    return profile(
        **{
            "num_layers": layers,
            "layer_bytes": (PLAIN + quantized,) * layers,
            "kinds": (kind,),
            "kind_of_layer": (0,) * layers,
            "quantization": "quantized",
            "scheme": Scheme(name=name, bits=4, group=group),
            **METHODS[name],
            **fields,
        }
    )


METHODS = {
    SchemeName.AWQ: {"quantization": "awq"},
    SchemeName.GPTQ: {"quantization": "gptq"},
    SchemeName.INT4: {"quantization": "compressed-tensors"},
}


def refusal(parsed: HeteroInferenceSpec, model: ModelProfile) -> str:
    with pytest.raises(PlanError) as caught:
        plan(parsed, model)
    assert caught.value.reason == "InsufficientMemory"
    return caught.value.message


# What vLLM's own functions make of a linear layer of 4,096 x 4,096, of its bytes (2026-11-25).
MEASURED_AMX = [
    *(
        (SchemeName.INT4, *each)
        for each in ((16, 1.7), (32, 1.3889), (64, 1.2059), (128, 1.1061), (256, 1.0846))
    ),
    *(
        (name, *each)
        for name in (SchemeName.AWQ, SchemeName.GPTQ)
        for each in ((16, 1.619), (32, 1.3514), (64, 1.1884), (128, 1.0977), (256, 1.0805))
    ),
]
MEASURED = [
    *((SchemeName.INT4, group, 1.0) for group in (32, 64, 128)),
    *((SchemeName.MXFP4, 32, 1.0), (SchemeName.INT8, 0, 1.0)),
    *((SchemeName.AWQ, *each) for each in ((32, 1.027), (64, 1.0145), (128, 1.0075))),
    *((SchemeName.GPTQ, *each) for each in ((32, 0.973), (64, 0.9855), (128, 0.9925))),
]
"""What our kernels make of 4,096 x 4,096 weights (kernels/coded.py::packed_bytes, 2026-11-27)."""
MEASURED_INT4 = [
    *((32, True, 2, 1.027), (128, True, 2, 1.0075)),
    *((32, False, 4, 1.1111), (128, False, 4, 1.0303), (32, True, 4, 1.1351), (128, True, 4, 1.0376)),
]
"""The same in int4, with zero points and with scales in float32 (2026-11-28)."""
BITS = {SchemeName.INT8: 8}


@pytest.mark.parametrize(("name", "group", "measured"), MEASURED_AMX)
def test_amx_packs_experts_to_more_bytes(name: SchemeName, group: int, measured: float) -> None:
    part = packed_ratio_for_amx(Scheme(name=name, bits=4, group=group))
    assert float(part) == pytest.approx(measured, abs=5e-5)


@pytest.mark.parametrize(("name", "group", "measured"), MEASURED)
def test_our_kernels_keep_codes_and_scales_as_wide_as_stored(
    name: SchemeName, group: int, measured: float
) -> None:
    part = packed_ratio(Scheme(name=name, bits=BITS.get(name, 4), group=group))
    assert float(part) == pytest.approx(measured, abs=5e-5)


@pytest.mark.parametrize(("group", "zeros", "element_bytes", "measured"), MEASURED_INT4)
def test_zero_points_of_int4_become_a_byte_and_scales_have_the_engines_type(
    group: int, zeros: bool, element_bytes: int, measured: float
) -> None:
    part = packed_ratio(Scheme(name=SchemeName.INT4, bits=4, group=group, zeros=zeros), element_bytes)
    assert float(part) == pytest.approx(measured, abs=5e-5)


@given(st.sampled_from(SchemeName), st.sampled_from([0, 16, 32, 64, 128, 4096]))
def test_packed_weights_are_at_most_a_twentieth_larger_than_stored(name: SchemeName, group: int) -> None:
    assert 0.95 < packed_ratio(Scheme(name=name, bits=4, group=group)) <= 1.053


# Plans


@given(
    name=st.sampled_from(FOUR_BITS),
    group=st.sampled_from([0, 16, 32, 64, 128, 256]),
    pods=st.integers(1, 4),
    memory=st.integers(4, 24),
)
def test_every_stage_holds_its_packed_layers(name: SchemeName, group: int, pods: int, memory: int) -> None:
    model = four_bits(name, group)
    parsed = spec(cpu(pods=pods, memory=f"{memory}Gi"), gpu(deviceMemory="4Gi"))
    try:
        planned = plan(parsed, model)
    except PlanError as error:
        event(f"refused: {error.reason}")
        return
    part, copies = packed_ratio(model.scheme), COPIES[name]
    for rank, stage in zip(planned.plan.ranks, planned.budgets, strict=True):
        (budget,) = stage.ranks
        assert budget.budget is not None
        if rank.device is Device.GPU:
            layers, packing = rank.num_layers * (PLAIN + QUANTIZED), 0
        else:
            layers = rank.num_layers * (PLAIN + ceil(QUANTIZED * part))
            packing = copies * QUANTIZED - 384 * MIB
        assert rank.weight_bytes == layers + budget.table_bytes
        assert rank.weight_bytes + max(rank.kv_cache_bytes, packing) <= budget.budget


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_ranks_of_a_pod_share_packed_layers(tensor: int) -> None:
    parsed = spec(cpu(ranksPerPod=tensor), parallelism={"tensor": tensor})
    awq, int4 = (plan(parsed, four_bits(name)).plan.ranks[0] for name in (SchemeName.AWQ, SchemeName.INT4))
    assert awq.weight_bytes - int4.weight_bytes == 32 * ceil(QUANTIZED / tensor * Fraction(1, 133))


def test_layers_that_are_not_quantized_are_not_packed() -> None:
    awq = four_bits(SchemeName.AWQ)
    plain = replace(awq, kinds=(replace(awq.kinds[0], quantized_bytes=0),))
    assert not any(plan(spec(cpu()), plain).sizes.packing_growth_bytes)


def test_reports_the_memory_of_packed_layers() -> None:
    planned = plan(spec(cpu(memory="16Gi")), four_bits(SchemeName.AWQ, group=32))
    assert "32 layers 3.27 GiB packed" in describe_memory(planned)[0]


def mixture(experts: int) -> ModelProfile:
    """Returns a mixture in GPTQ, of 3 MiB an expert."""
    kind = LayerKind(
        kv_heads=8,
        kv_width=256,
        experts=experts,
        experts_per_token=4,
        expert_bytes=3 * MIB,
        experts_quantized=True,
        quantized_bytes=20 * MIB,
    )
    return four_bits(
        SchemeName.GPTQ,
        kinds=(kind,),
        num_layers=2,
        layer_bytes=((3 * experts + 22) * MIB,) * 2,
        routing=Routing.TOP_K_SOFTMAX,
    )


def test_packing_uses_the_memory_of_the_later_kv_cache() -> None:
    """Packing GPTQ experts needs more memory than the KV cache of one short sequence: three more copies."""
    model, short = mixture(256), {"maxModelLen": 64}
    (rank,) = plan(spec(cpu(), engine=short), model).plan.ranks
    grown = (3 * 256 + 20) * MIB * Fraction(-1, 133)
    assert rank.weight_bytes == 2 * ((3 * 256 + 22) * MIB + ceil(grown)) + 2 * 2 * 1002 * MIB + 8192
    # The process and the API server have 2 GiB, of which packing may use 384 MiB.
    loaded = rank.weight_bytes - 2 * ceil(grown)
    need = loaded + 3 * (3 * 256 + 20) * MIB - 384 * MIB + 2 * GIB
    assert plan(spec(cpu(memory=str(ceil(need))), engine=short), model)
    said = refusal(spec(cpu(memory=str(ceil(need) - MIB), layers=[2]), engine=short), model)
    assert "2 layers need 7.39 GiB with the copy of a layer while it is packed" in said, said
    assert "maxModelLen" not in said


def test_ranks_that_share_layers_pack_experts_for_amx() -> None:
    """Ranks that hold whole layers store GPTQ experts in fewer bytes than the checkpoint."""
    shared = spec(cpu(memory="64Gi", ranksPerPod=2), parallelism={"tensor": 2}, engine={"maxModelLen": 64})
    grown = 20 * MIB * Fraction(-1, 133) + 3 * 256 * MIB * Fraction(13, 133)
    assert set(plan(shared, mixture(256)).sizes.packing_growth_bytes) == {ceil(grown / 2)}


@pytest.mark.parametrize("group", [32, 128])
def test_all_layers_are_loaded_before_one_is_packed(group: int) -> None:
    """Our kernels store GPTQ in fewer bytes than the checkpoint."""
    model, short = four_bits(SchemeName.GPTQ, group, kind_bytes=400 * MIB), {"maxModelLen": 32}
    loaded = 32 * (PLAIN + 400 * MIB) + 3 * 400 * MIB - 384 * MIB
    memory = loaded + 2 * 2 * 1002 * MIB + 8192 + 2 * GIB  # tables, the process and the API server
    assert plan(spec(cpu(memory=str(memory)), engine=short), model)
    refusal(spec(cpu(memory=str(memory - 1)), engine=short), model)


def plain_mixture(experts: int) -> ModelProfile:
    """Returns a mixture in bf16, of 6 MiB an expert."""
    kind = LayerKind(kv_heads=8, kv_width=256, experts=experts, experts_per_token=4, expert_bytes=6 * MIB)
    return profile(
        kinds=(kind,),
        num_layers=4,
        kind_of_layer=(0,) * 4,
        layer_bytes=((6 * experts + 20) * MIB,) * 4,
        routing=Routing.TOP_K_SOFTMAX,
    )


def test_sixteen_bit_experts_need_a_second_copy_while_packed() -> None:
    """Packing 1.5 GiB of experts needs another 1.5 GiB.

    The process itself has 384 MiB for this. The KV cache needs 4 * 3 MiB.
    """
    model, short = plain_mixture(256), {"maxModelLen": 64}
    beside = (6 * 256 - 384) * MIB
    (rank,) = plan(spec(cpu(), engine=short), model).plan.ranks
    need = rank.weight_bytes + beside + 2 * GIB
    assert plan(spec(cpu(memory=str(need)), engine=short), model)
    said = refusal(spec(cpu(memory=str(need - 1), layers=[4]), engine=short), model)
    assert "with the copy of a layer while it is packed" in said, said
    enough = device_memory(rank.weight_bytes + GIB // 2, model, embeds=True, with_cpus=False)
    on_gpu = spec(gpu(deviceMemory=enough), engine=short)
    assert plan(on_gpu, model)


@pytest.mark.parametrize(
    ("tensor", "columns", "filled"), [(1, 200, 224), (2, 200, 256), (1, 768, 768), (8, 1408, 1536)]
)
def test_columns_of_experts_are_filled_up_to_blocks_of_the_kernels(
    tensor: int, columns: int, filled: int
) -> None:
    parsed = spec(cpu(ranksPerPod=tensor), parallelism={"tensor": tensor}, engine={"maxModelLen": 64})
    whole = plain_mixture(64)
    model = replace(whole, kinds=(replace(whole.kinds[0], columns=columns),))
    (with_zeros, *_), (without, *_) = (plan(parsed, each).plan.ranks for each in (model, whole))
    experts = 4 * 64 * 6 * MIB / tensor
    assert with_zeros.weight_bytes - without.weight_bytes == pytest.approx(experts * (filled / columns - 1))


def test_a_large_16_bit_mlp_needs_a_second_copy_while_packed() -> None:
    kind = LayerKind(kv_heads=8, kv_width=256, mlp_bytes=1200 * MIB)
    model = profile(num_layers=2, layer_bytes=(1300 * MIB,) * 2, kinds=(kind,), kind_of_layer=(0, 0))
    planned = plan(spec(cpu(), engine={"maxModelLen": 64}), model)
    assert planned.sizes.packing_peak_bytes(0, 2, Device.CPU) == (800 - 384) * MIB
    assert planned.sizes.packing_peak_bytes(0, 2) == 0


def test_a_small_layer_is_packed_within_the_process_overhead() -> None:
    planned = plan(spec(cpu()), plain_mixture(64))
    assert planned.sizes.packing_peak_bytes(0, 4, Device.CPU) == 0


def in_one_stage(device_memory: str) -> Planned:
    return plan(
        spec(gpu(deviceMemory=device_memory), cpu(memory="12Gi"), parallelism={"mode": "Tensor"}),
        four_bits(SchemeName.AWQ),
    )


def test_ranks_of_one_stage_use_the_weights_form_of_their_device() -> None:
    planned = in_one_stage("80Gi")
    on_gpu, on_cpu = planned.plan.ranks
    assert (on_gpu.device, on_cpu.device) == (Device.GPU, Device.CPU)
    tables, norm = 1002 * MIB, 8192
    assert on_gpu.weight_bytes == 32 * 51 * MIB + tables + norm
    assert on_cpu.weight_bytes == 32 * (51 * MIB + ceil(50 * MIB * Fraction(1, 133))) + 2 * tables + norm
    assert planned.limiting_rank == 1


@pytest.mark.parametrize("device_memory", ["4500Mi", "9Gi", "80Gi"])
def test_the_rank_with_the_least_free_memory_limits_its_stage(device_memory: str) -> None:
    planned = in_one_stage(device_memory)
    left = []
    for rank, budget in zip(planned.plan.ranks, planned.budgets[0].ranks, strict=True):
        assert budget.budget is not None
        left.append(budget.budget - rank.weight_bytes)
        assert rank.kv_cache_bytes <= left[-1]
    block = planned.sizes.kv.block_bytes(0, 32)
    assert planned.plan.ranks[0].kv_cache_bytes == min(left) // block * block
    assert planned.limiting_rank == left.index(min(left))
