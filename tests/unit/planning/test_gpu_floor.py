"""The memory of a GPU besides weights and KV cache is planned for GPUs of all sizes."""

import pytest

from heteroinfer_contract.model import LayerKind
from heteroinfer_operator.commands.plan_details import describe_memory
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.gpu_floor import CONTEXT_BYTES, GRAPHS_BYTES, NCCL_BYTES
from heteroinfer_operator.planning.planner import Planned
from tests.unit.planning.planned_models import GIB, MIB, cpu, device_memory, gpu, plan, profile, spec


def used(planned: Planned, rank: int) -> int:
    return planned.plan.ranks[rank].weight_bytes + planned.plan.ranks[rank].kv_cache_bytes


@pytest.mark.parametrize("size", [6, 8, 12, 16, 24, 80])
def test_a_small_gpu_keeps_as_much_free_as_a_large_one(size: int) -> None:
    planned = plan(spec(gpu(deviceMemory=f"{size}Gi"), cpu(memory="96Gi")), profile(num_layers=160))
    floor = planned.sizes.gpu_floor.total(embeds=False, samples=True, gpus=1)
    free = size * GIB - used(planned, 1)
    assert free >= max(floor, size * GIB // 10)
    assert free - max(floor, size * GIB // 10) < 600 * MIB, "a layer with its KV cache would fit"
    beside = " for the CUDA context, CUDA graphs and the largest batch" in describe_memory(planned)[1]
    assert beside is (floor > size * GIB // 10)


def test_a_gpu_without_the_head_keeps_less_free() -> None:
    first, last = plan(
        spec(gpu(pods=2, deviceMemory="12Gi")), profile(num_layers=16, vocab_size=600_000)
    ).budgets
    assert first.ranks[0].budget is not None
    assert last.ranks[0].budget is not None
    assert first.ranks[0].budget > last.ranks[0].budget


def test_more_gpus_of_a_stage_need_buffers_of_nccl() -> None:
    budgets = [
        plan(
            spec(gpu(ranksPerPod=ranks, deviceMemory="8Gi"), parallelism={"tensor": ranks}),
            profile(num_layers=4),
        )
        .budgets[0]
        .ranks[0]
        for ranks in (1, 2)
    ]
    floors = [plan(spec(gpu(ranksPerPod=n), parallelism={"tensor": n})).sizes.gpu_floor for n in (1, 2)]
    assert (
        floors[1].total(embeds=False, samples=True, gpus=2)
        - floors[1].total(embeds=False, samples=True, gpus=1)
        == NCCL_BYTES
    )
    assert all(budget.reserved_bytes for budget in budgets)


def test_without_cuda_graphs_less_is_kept_free() -> None:
    engine = {"eager": "Always"}
    floors = [plan(spec(gpu(), **fields)).sizes.gpu_floor for fields in ({}, {"engine": engine})]
    totals = [floor.total(embeds=False, samples=True, gpus=1) for floor in floors]
    assert totals[0] - totals[1] == GRAPHS_BYTES


def test_refuses_a_gpu_that_cannot_hold_its_context() -> None:
    with pytest.raises(PlanError) as caught:
        plan(spec(gpu(deviceMemory=str(CONTEXT_BYTES)), cpu(memory="64Gi")))
    assert caught.value.reason == "InsufficientMemory"
    assert caught.value.message.startswith("role gpu: a GPU must have more memory than the ")
    assert " (got 0.69 GiB). " in caught.value.message
    assert "GiB that the CUDA context, CUDA graphs and the largest batch need" in caught.value.message
    assert "engine.eager: Always" in caught.value.message


def test_a_large_batch_needs_more() -> None:
    """A group with CPU ranks has smaller batches."""
    alone, mixed = (plan(spec(*roles)).sizes.gpu_floor for roles in ((gpu(),), (gpu(), cpu())))
    assert alone.activations == 4 * mixed.activations
    assert alone.sampling == 4 * mixed.sampling
    assert int(device_memory(8 * GIB, with_cpus=False)) > int(device_memory(8 * GIB))


@pytest.mark.parametrize(("eager", "measured_mib"), [("Never", 1941), ("Always", 1073)])
def test_the_planned_memory_besides_weights_and_kv_cache_is_close_to_the_measurement(
    eager: str, measured_mib: int
) -> None:
    """Llama-8B of 16 layers, batches of 2,048 tokens and 64 requests (tests/bench/gpu_floor.py, H100)."""
    model = profile(
        num_layers=16,
        kinds=(LayerKind(kv_heads=8, kv_width=256, mlp_bytes=1, columns=14336),),
        kind_of_layer=(0,) * 16,
    )
    floor = plan(spec(gpu(), cpu(), engine={"eager": eager}), model).sizes.gpu_floor
    planned_mib = floor.total(embeds=True, samples=True, gpus=1) / MIB
    # Of CUDA graphs a rank keeps 1,024 MiB free, and these took 212.
    graphs_mib = 0 if eager == "Always" else 1024 - 212
    assert measured_mib <= planned_mib <= measured_mib + graphs_mib + 100
