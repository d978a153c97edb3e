"""Properties of every plan, over random topologies, models and memories."""

from itertools import pairwise
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from heteroinfer_contract.model import LayerKind, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Mode, Plan
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning import Inventory
from heteroinfer_operator.planning.gpu_floor import GpuFloor
from heteroinfer_operator.planning.memory import rank_budget
from heteroinfer_operator.planning.topology import PlacedRole, Seat
from tests.unit.planning.planned_models import GIB, MIB, plan, profile, spec


@st.composite
def specs(draw: st.DrawFn) -> HeteroInferenceSpec:
    tensor = draw(st.sampled_from([1, 1, 2, 4]))
    roles: list[dict[str, Any]] = []
    for i in range(draw(st.integers(1, 4))):
        device = draw(st.sampled_from(["CPU", "GPU"]))
        role: dict[str, Any] = {"name": f"r{i}", "device": device, "pods": draw(st.integers(1, 3))}
        role["ranksPerPod"] = tensor * draw(st.integers(1, 3))
        memory = draw(st.none() | st.integers(4, 200))
        if memory is not None and device == "GPU":
            role["deviceMemory"] = f"{memory}Gi"
        elif memory is not None:
            role["resources"] = {"limits": {"memory": f"{memory}Gi"}}
        roles.append(role)
    parallelism = {"tensor": tensor, "stageOrder": draw(st.sampled_from(["Auto", "AsListed"]))}
    action = {"onGPUShortage": {"action": draw(st.sampled_from(["Wait", "CPUOnly"]))}}
    return spec(
        *roles, parallelism=parallelism, planning=action, engine={"maxModelLen": draw(st.integers(1, 20_000))}
    )


@st.composite
def tensor_specs(draw: st.DrawFn) -> HeteroInferenceSpec:
    """In tensor mode a stage's ranks may be in several pods, of either device."""
    roles: list[dict[str, Any]] = []
    for i, device in enumerate(draw(st.permutations(["CPU", "GPU", "CPU"]))[: draw(st.integers(2, 3))]):
        role = {"name": f"r{i}", "device": device, "pods": draw(st.sampled_from([1, 2]))}
        roles.append({**role, "ranksPerPod": draw(st.sampled_from([1, 1, 2]))})
    world = sum(role["pods"] * role["ranksPerPod"] for role in roles)
    sizes = [size for size in (2, 4, 8) if world % size == 0] or [1]
    order = draw(st.sampled_from(["Auto", "AsListed"]))
    parallelism = {"mode": "Tensor", "tensor": draw(st.sampled_from(sizes)), "stageOrder": order}
    return spec(*roles, parallelism=parallelism)


METHODS = {SchemeName.AWQ: "awq", SchemeName.GPTQ: "gptq", SchemeName.INT4: "compressed-tensors"}


def in_four_bits(name: SchemeName) -> dict[str, Any]:
    return {"quantization": METHODS[name], "scheme": Scheme(name=name, bits=4, group=64)}


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    layers = draw(st.integers(1, 40))
    sizes = draw(st.lists(st.integers(MIB, 2 * GIB), min_size=layers, max_size=layers))
    tied = draw(st.booleans())
    table = draw(st.integers(MIB, 2 * GIB))
    quantized = draw(st.sampled_from([{}, {}, *map(in_four_bits, METHODS)]))
    kinds = tuple(LayerKind(kv_heads=8, kv_width=256, quantized_bytes=size * 9 // 10) for size in sizes)
    return profile(
        **({**quantized, "kinds": kinds, "kind_of_layer": tuple(range(layers))} if quantized else {}),
        num_layers=layers,
        layer_bytes=tuple(sizes),
        embedding_bytes=table,
        head_bytes=0 if tied else table,
        tied_head=tied,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


INVENTORIES = st.builds(
    Inventory,
    on_cpus=st.just({})
    | st.sets(st.sampled_from(["r0", "r1"])).map(lambda roles: dict.fromkeys(roles, "why")),
    host_memory_bytes=st.just({}) | st.just({f"r{i}": 64 * GIB for i in range(4)}),
    gpu_memory_bytes=st.just({}) | st.just({f"r{i}": 24 * GIB for i in range(4)}),
)


@given(specs() | tensor_specs(), profiles(), INVENTORIES)
def test_every_plan_holds_each_layer_and_rank_once(
    parsed: HeteroInferenceSpec, model: ModelProfile, inventory: Inventory
) -> None:
    try:
        planned = plan(parsed, model, inventory).plan
    except PlanError as error:
        event(f"refused: {error.reason}")
        return
    event("planned")
    check_ranks(parsed, planned)
    check_order(parsed, planned)
    check_layers(model, planned)
    check_memory(parsed, model, planned, inventory)
    assert Plan.from_env(planned.to_env()) == planned


def check_ranks(parsed: HeteroInferenceSpec, planned: Plan) -> None:
    assert [rank.rank for rank in planned.ranks] == list(range(parsed.world_size))
    by_role = {role.name: role for role in parsed.roles}
    assert sorted(pod.role for pod in planned.pods) == sorted(
        r.name for r in parsed.roles for _ in range(r.pods)
    )
    for pod in planned.pods:
        assert [rank.local_rank for rank in pod.ranks] == list(range(by_role[pod.role].ranks_per_pod))
    assert planned.pods[0].ranks[0].rank == 0, "one leader: the pod of rank 0"
    for rank in planned.ranks:
        assert (rank.stage, rank.tensor_rank) == divmod(rank.rank, planned.tensor_parallel_size)
        assert rank.device is by_role[rank.role].device or rank.device is Device.CPU


def check_order(parsed: HeteroInferenceSpec, planned: Plan) -> None:
    mixed = [stage for stage in range(planned.pipeline_parallel_size) if planned.is_mixed(stage)]
    event(f"mixed stages: {len(mixed)}")
    assert all(planned.stage(stage)[0].device is Device.GPU for stage in mixed)
    assert parsed.parallelism.mode is Mode.TENSOR or not mixed
    assert planned.engine.eager_gpu or not mixed
    if parsed.parallelism.stage_order == "Auto" and parsed.parallelism.mode is Mode.PIPELINE:
        assert not any(a.device is Device.GPU and b.device is Device.CPU for a, b in pairwise(planned.ranks))


def check_layers(model: ModelProfile, planned: Plan) -> None:
    stages = [
        [rank for rank in planned.ranks if rank.stage == s] for s in range(planned.pipeline_parallel_size)
    ]
    end = 0
    for ranks in stages:
        assert {(rank.first_layer, rank.end_layer) for rank in ranks} == {(end, ranks[0].end_layer)}
        assert ranks[0].num_layers >= 1
        end = ranks[0].end_layer
    assert end == model.num_layers


def check_memory(
    parsed: HeteroInferenceSpec, model: ModelProfile, planned: Plan, inventory: Inventory
) -> None:
    roles = {role.name: role for role in parsed.roles}
    blocks = set()
    for rank in planned.ranks:
        placed = PlacedRole(role=roles[rank.role], device=rank.device)
        floor = GpuFloor.for_settings(model, planned.engine, planned.tensor_parallel_size).total(
            embeds=rank.stage == 0, samples=rank.stage == planned.pipeline_parallel_size - 1, gpus=1
        )
        budget = rank_budget(Seat(pod=rank.pod, local_rank=rank.local_rank, placed=placed), inventory, floor)
        assert budget is None or rank.weight_bytes + rank.kv_cache_bytes <= budget
        blocks.add(rank.kv_cache_bytes / rank.num_layers)
        assert rank.predicted_step_s > 0
    assert len(blocks) == 1, "every rank has the same number of blocks"
