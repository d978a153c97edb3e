"""Weights in 4 bits on CPUs: their packed size, and the additional memory while they are packed."""

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from heteroinfer_contract.calibration import Hardware
from heteroinfer_contract.model import LayerKind, Routing, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.commands.plan_details import describe_memory
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.nodes.calibrations import Calibrations, MeasuredKind
from heteroinfer_operator.nodes.cpu_features import roles_without_amx
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.packing import WeightKernels, packed_part, packing_copies
from tests.unit.calibrated import CALIBRATION, CPU, calibration
from tests.unit.planning.planned_models import GIB, MIB, cpu, device_memory, gpu, plan, profile, spec
from tests.unit.planning.test_placement import node

FOUR_BITS = (SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4)
PLAIN, QUANTIZED = 2 * MIB, 100 * MIB
WITHOUT = Inventory(without_amx=frozenset({"cpu"}))
LABEL = "feature.node.kubernetes.io/cpu-cpuid."


def four_bits(name: SchemeName = SchemeName.INT4, group: int = 128, **fields: Any) -> ModelProfile:
    """Returns a dense model in 4 bits, whose layers have norms in bf16 too."""
    kind = LayerKind(kv_heads=8, kv_width=256, quantized_bytes=QUANTIZED, mlp_bytes=70 * MIB)
    layers = fields.pop("num_layers", 32)
    return profile(
        **{
            "num_layers": layers,
            "layer_bytes": (PLAIN + QUANTIZED,) * layers,
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


def refusal(parsed: HeteroInferenceSpec, model: ModelProfile, inventory: Inventory | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        plan(parsed, model, inventory)
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
MEASURED_AVX512 = [
    *((name, group, 1.0) for name in (SchemeName.AWQ, SchemeName.INT4) for group in (16, 32, 64, 128, 256)),
    *(
        (SchemeName.GPTQ, *each)
        for each in ((16, 0.9524), (32, 0.973), (64, 0.9855), (128, 0.9925), (256, 0.9962))
    ),
]


@pytest.mark.parametrize(("name", "group", "measured"), MEASURED_AMX)
def test_amx_packs_weights_to_more_bytes(name: SchemeName, group: int, measured: float) -> None:
    part = packed_part(Scheme(name=name, bits=4, group=group), WeightKernels.AMX)
    assert float(part) == pytest.approx(measured, abs=5e-5)


@pytest.mark.parametrize(("name", "group", "measured"), MEASURED_AVX512)
def test_avx512_packs_weights_to_no_more_bytes(name: SchemeName, group: int, measured: float) -> None:
    part = packed_part(Scheme(name=name, bits=4, group=group), WeightKernels.AVX512)
    assert float(part) == pytest.approx(measured, abs=5e-5)


@pytest.mark.parametrize(("name", "measured"), [(SchemeName.INT4, 1.0639), (SchemeName.AWQ, 1.0636)])
def test_a_scale_per_output_counts_as_one_per_128_weights(name: SchemeName, measured: float) -> None:
    assert packed_part(Scheme(name=name, bits=4)) >= measured


@given(st.sampled_from(SchemeName), st.integers(0, 4096), st.sampled_from(WeightKernels))
def test_counted_memory_is_between_the_stored_and_the_packed_size(
    name: SchemeName, group: int, kernels: WeightKernels
) -> None:
    scheme = Scheme(name=name, bits=4, group=group)
    part = packed_part(scheme, kernels)
    if name not in FOUR_BITS or kernels is WeightKernels.GPU:
        assert part == 1
    elif kernels is WeightKernels.AMX:
        assert 1 < part <= 4.2
    else:
        assert 0.7 < part <= 1
    assert packing_copies(scheme) == {SchemeName.GPTQ: 3, SchemeName.AWQ: 2, SchemeName.INT4: 2}.get(name, 1)


# Plans


@given(
    name=st.sampled_from(FOUR_BITS),
    group=st.sampled_from([0, 16, 32, 64, 128, 256]),
    pods=st.integers(1, 4),
    memory=st.integers(4, 24),
    amx=st.booleans(),
)
def test_every_stage_holds_its_packed_layers(
    name: SchemeName, group: int, pods: int, memory: int, *, amx: bool
) -> None:
    model = four_bits(name, group)
    parsed = spec(cpu(pods=pods, memory=f"{memory}Gi"), gpu(deviceMemory="4Gi"))
    try:
        planned = plan(parsed, model, None if amx else WITHOUT)
    except PlanError as error:
        event(f"refused: {error.reason}")
        return
    kernels = WeightKernels.AMX if amx else WeightKernels.AVX512
    part, copies = packed_part(model.scheme, kernels), packing_copies(model.scheme)
    for rank, stage in zip(planned.plan.ranks, planned.budgets, strict=True):
        (budget,) = stage.ranks
        assert budget.budget is not None
        if rank.device is Device.GPU:
            layers, packing = rank.num_layers * (PLAIN + QUANTIZED), 0
        else:
            layers = rank.num_layers * PLAIN + ceil(rank.num_layers * QUANTIZED * part)
            packing = copies * QUANTIZED
        assert rank.weight_bytes == layers + budget.tables
        assert rank.weight_bytes + max(rank.kv_cache_bytes, packing) <= budget.budget


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_ranks_of_a_pod_share_packed_layers(tensor: int) -> None:
    parsed = spec(cpu(ranksPerPod=tensor), parallelism={"tensor": tensor})
    (with_amx, *_), (without, *_) = (plan(parsed, four_bits(), i).plan.ranks for i in (None, WITHOUT))
    assert with_amx.weight_bytes - without.weight_bytes == ceil(32 * (QUANTIZED // tensor) * Fraction(7, 66))


def test_layers_that_are_not_quantized_are_not_packed() -> None:
    awq = four_bits(SchemeName.AWQ)
    plain = replace(awq, kinds=(replace(awq.kinds[0], quantized_bytes=0),))
    for model in (
        profile(),
        plain,
        replace(awq, scheme=Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=128)),
    ):
        ranks = [plan(spec(cpu()), model, inventory).plan.ranks for inventory in (None, WITHOUT)]
        assert ranks[0] == ranks[1]


def test_layers_are_split_by_their_packed_size() -> None:
    model = four_bits(group=32)
    # Free for layers: 1,000 MiB in the first pod, enough for 16 in the last. A layer of 140.9 MiB packed, of
    # 102 as stored, has 32.1 MiB of KV cache.
    more = {**cpu(memory="64Gi"), "name": "more"}
    parsed = spec(
        cpu(memory=f"{2 * 1024 + 2 * 1002 + 1000}Mi"),
        more,
        gpu(deviceMemory=device_memory(3150 * MIB, model)),
    )
    amx, avx512 = (plan(parsed, model, inventory) for inventory in (None, WITHOUT))
    assert amx.plan.layers_by_stage == (5, 11, 16)
    assert avx512.plan.layers_by_stage == (7, 9, 16)
    assert "5 layers 0.69 GiB packed for AMX" in describe_memory(amx)[0]
    assert "packed" not in describe_memory(avx512)[0]


def test_kv_cache_gets_the_memory_that_packed_layers_leave() -> None:
    blocks = []
    for inventory in (None, WITHOUT):
        planned = plan(spec(cpu(memory="16Gi")), four_bits(), inventory)
        (rank,), block = planned.plan.ranks, planned.sizes.kv.block_bytes(0, 32)
        assert 0 <= 14 * GIB - rank.weight_bytes - rank.kv_cache_bytes < block
        blocks.append(rank.kv_cache_bytes // block)
    assert blocks[0] < blocks[1]


def test_layers_that_the_user_gives_must_fit_packed() -> None:
    model = four_bits(group=32)
    parsed = spec(cpu(memory="6Gi", layers=[14]), gpu(layers=[18]))
    said = refusal(parsed, model)
    assert "14 layers need 4.32 GiB with KV cache for one request of 8,192 tokens" in said, said
    assert plan(parsed, model, WITHOUT).plan.layers_by_stage == (14, 18)


def test_reports_the_missing_memory_of_packed_layers() -> None:
    model = four_bits(group=32)
    parsed = spec(cpu(memory="9600Mi"), engine={"maxModelLen": 64})
    assert plan(parsed, model, WITHOUT)
    said = refusal(parsed, model)
    assert "of the model's 32 layers is missing" in said
    assert "raise resources.limits.memory of role cpu" in said


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
    """Of experts in GPTQ three copies lie beside a layer: more than KV cache for one short sequence."""
    model, short = mixture(256), {"maxModelLen": 64}
    (rank,) = plan(spec(cpu(), engine=short), model).plan.ranks
    packed = 2 * (2 * MIB + (3 * 256 + 20) * MIB * Fraction(146, 133))
    assert rank.weight_bytes == ceil(packed) + 2 * 2 * 1002 * MIB + 8192
    need = rank.weight_bytes + 3 * (3 * 256 + 20) * MIB + 2 * GIB  # of the process, and of the API server
    assert plan(spec(cpu(memory=str(ceil(need))), engine=short), model)
    said = refusal(spec(cpu(memory=str(ceil(need) - MIB), layers=[2]), engine=short), model)
    assert "2 layers need 7.92 GiB with the copy of a layer while it is packed" in said, said
    assert "maxModelLen" not in said


@pytest.mark.parametrize("group", [16, 32, 128])
def test_all_layers_are_loaded_before_one_is_packed(group: int) -> None:
    """Kernels for AVX-512 have GPTQ in less than the checkpoint has."""
    model, short = four_bits(SchemeName.GPTQ, group), {"maxModelLen": 32}
    loaded = 32 * (PLAIN + QUANTIZED) + 3 * QUANTIZED
    memory = loaded + 2 * 2 * 1002 * MIB + 8192 + 2 * GIB  # tables, the process and the API server
    assert plan(spec(cpu(memory=str(memory)), engine=short), model, WITHOUT)
    refusal(spec(cpu(memory=str(memory - 1)), engine=short), model, WITHOUT)


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
    """Beside 1.5 GiB of experts 1.5 GiB, of which the process has left 384 MiB; KV cache needs 4 * 3 MiB."""
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
    assert planned.sizes.packing(0, 2, planned.budgets[0].ranks[0].kernels) == (800 - 384) * MIB
    assert planned.sizes.packing(0, 2) == 0


def test_a_small_layer_is_packed_within_the_process_overhead() -> None:
    planned = plan(spec(cpu()), plain_mixture(64))
    assert planned.sizes.packing(0, 4, planned.budgets[0].ranks[0].kernels) == 0


def in_one_stage(device_memory: str) -> Planned:
    return plan(
        spec(gpu(deviceMemory=device_memory), cpu(memory="12Gi"), parallelism={"mode": "Tensor"}), four_bits()
    )


def test_ranks_of_one_stage_use_the_weights_form_of_their_device() -> None:
    planned = in_one_stage("80Gi")
    on_gpu, on_cpu = planned.plan.ranks
    assert (on_gpu.device, on_cpu.device) == (Device.GPU, Device.CPU)
    tables, norm = 1002 * MIB, 8192
    assert on_gpu.weight_bytes == 32 * 51 * MIB + tables + norm
    assert on_cpu.weight_bytes == 32 * 51 * MIB + ceil(32 * 50 * MIB * Fraction(7, 66)) + 2 * tables + norm
    assert planned.limiting_rank == 1


@pytest.mark.parametrize("device_memory", ["4500Mi", "9Gi", "80Gi"])
def test_a_stage_is_bounded_by_its_rank_with_least_memory_left(device_memory: str) -> None:
    planned = in_one_stage(device_memory)
    left = []
    for rank, budget in zip(planned.plan.ranks, planned.budgets[0].ranks, strict=True):
        assert budget.budget is not None
        left.append(budget.budget - rank.weight_bytes)
        assert rank.kv_cache_bytes <= left[-1]
    block = planned.sizes.kv.block_bytes(0, 32)
    assert planned.plan.ranks[0].kv_cache_bytes == min(left) // block * block
    assert planned.limiting_rank == left.index(min(left))


def test_a_cpu_rank_packs_the_layers_that_feed_forward_ranks_leave() -> None:
    own = {"feedForward": {"cpu": "4", "memory": "64Gi", "layers": 32}}
    parsed = spec(cpu(**own), parallelism={"mode": "FeedForward"})
    ranks = [plan(parsed, four_bits(), inventory).plan.ranks[0] for inventory in (None, WITHOUT)]
    assert ranks[0].weight_bytes - ranks[1].weight_bytes == ceil(32 * 30 * MIB * Fraction(7, 66))


# Which nodes have AMX


def with_labels(name: str, *features: str) -> NodeView:
    return node(name, labels={f"{LABEL}{feature}": "true" for feature in ("AVX512F", *features)})


def kinds(*machines: tuple[str, tuple[str, ...]]) -> Calibrations:
    return Calibrations(
        kinds=tuple(
            MeasuredKind(
                name=name,
                selector={"kind": name},
                calibration=calibration(hardware=Hardware(cpu=CPU, instruction_sets=sets, cpus=32, cores=16)),
            )
            for name, sets in machines
        )
    )


AMX_NODE = with_labels("amx", "AMXTILE", "AMXBF16")
AVX512_NODE = with_labels("avx512")
BARE = node("bare", labels={"kind": "a"})


@pytest.mark.parametrize(
    ("nodes", "calibrations", "without"),
    [
        ((), Calibrations(), False),
        ((AVX512_NODE,), Calibrations(), True),
        ((AMX_NODE,), Calibrations(), False),
        ((AVX512_NODE, AMX_NODE), Calibrations(), False),
        ((AVX512_NODE, BARE), Calibrations(), False),
        ((AVX512_NODE, BARE), kinds(("a", ("avx512f",))), True),
        ((BARE,), kinds(("a", ("avx512f", "amx_tile", "amx_bf16"))), False),
        ((BARE,), kinds(("b", ("avx512f",))), False),
        ((), Calibrations(this_machine=CALIBRATION), False),
        ((), Calibrations(this_machine=kinds(("a", ("avx512f",))).kinds[0].calibration), True),
    ],
)
def test_amx_is_counted_unless_no_node_has_it(
    nodes: tuple[NodeView, ...], calibrations: Calibrations, *, without: bool
) -> None:
    found = roles_without_amx(spec(cpu()), nodes, calibrations)
    assert found == (frozenset({"cpu"}) if without else frozenset())


def test_a_node_with_amx_counts_while_it_is_cordoned() -> None:
    """It is opened again, and the plan lasts."""
    cordoned = replace(AMX_NODE, schedulable=False, problem="cordoned")
    assert roles_without_amx(spec(cpu()), (AVX512_NODE, cordoned), Calibrations()) == frozenset()
    closed = replace(AVX512_NODE, schedulable=False)
    assert roles_without_amx(spec(cpu()), (closed,), Calibrations()) == {"cpu"}


def test_nodes_where_a_roles_pods_cannot_be_do_not_count() -> None:
    selector = {"template": {"nodeSelector": {f"{LABEL}AVX512F": "true", "kind": "small"}}}
    small = node("small", labels={**AVX512_NODE.labels, "kind": "small"})
    parsed = spec(cpu(**selector), {**cpu(), "name": "any"})
    assert roles_without_amx(parsed, (AMX_NODE, small), Calibrations()) == {"cpu"}
