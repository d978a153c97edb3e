"""Plans: the pods, layers and settings of ranks, and the errors of specs without a plan."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.model import AttentionKind, LayerKind, Scheme, SchemeName
from heteroinfer_contract.plan import Device, Plan, eager_reason
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning import Inventory
from tests.unit.planning.planned_models import GIB, MIB, cpu, device_memory, gpu, plan, profile, spec


def refusal(parsed: HeteroInferenceSpec, **arguments: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(parsed, **arguments)
    return caught.value


# Who sits where


def test_cpu_stages_come_first_and_the_gpu_last() -> None:
    ranks = plan(spec(gpu(), cpu(pods=2))).plan.ranks
    assert [(r.role, r.pod, r.stage) for r in ranks] == [("cpu", 0, 0), ("cpu", 1, 1), ("gpu", 2, 2)]


def test_stages_can_follow_the_order_of_the_roles() -> None:
    ranks = plan(spec(gpu(), cpu(), parallelism={"stageOrder": "AsListed"})).plan.ranks
    assert [r.role for r in ranks] == ["gpu", "cpu"]


def test_pods_of_different_sizes_get_different_layers() -> None:
    parsed = spec(cpu(name="big", ranksPerPod=2), cpu(name="small"))
    ranks = plan(parsed).plan.ranks
    assert [(r.pod, r.local_rank, r.stage) for r in ranks] == [(0, 0, 0), (0, 1, 1), (1, 0, 2)]


def test_tensor_and_pipeline_combine() -> None:
    planned = plan(spec(cpu(pods=2, ranksPerPod=2), parallelism={"tensor": 2})).plan
    assert (planned.tensor_parallel_size, planned.pipeline_parallel_size) == (2, 2)
    assert [(r.stage, r.tensor_rank, r.pod, r.local_rank) for r in planned.ranks] == [
        (0, 0, 0, 0),
        (0, 1, 0, 1),
        (1, 0, 1, 0),
        (1, 1, 1, 1),
    ]
    assert [(r.first_layer, r.end_layer) for r in planned.ranks] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_the_rank_with_the_least_capacity_for_kv_is_predicted() -> None:
    small = cpu(name="small", memory="20Gi", layers=[10])
    big = cpu(name="big", memory="200Gi", layers=[22])
    assert plan(spec(big, small, parallelism={"stageOrder": "AsListed"})).limiting_rank == 1
    assert plan(spec(small, big, parallelism={"stageOrder": "AsListed"})).limiting_rank == 0
    assert plan(spec(small, {**big, "resources": {}})).limiting_rank is None


@pytest.mark.parametrize(
    "fields",
    [
        {"parallelism": {"pipeline": 2}, "roles": [gpu(ranksPerPod=4)]},
        {"roles": [gpu(ranksPerPod=4, layers=[16, 16])]},
    ],
)
def test_omitted_sizes_follow_from_the_others(fields: dict[str, Any]) -> None:
    planned = plan(spec(*fields.pop("roles"), **fields)).plan
    assert (planned.tensor_parallel_size, planned.pipeline_parallel_size) == (2, 2)


def test_tensor_mode_takes_all_ranks_of_one_device_for_one_stage() -> None:
    planned = plan(spec(gpu(pods=2, ranksPerPod=2), parallelism={"mode": "Tensor"})).plan
    assert (planned.tensor_parallel_size, planned.pipeline_parallel_size) == (4, 1)


def devices(planned: Plan) -> list[str]:
    """Returns the devices of each stage, as `GC`."""
    return [
        "".join(rank.device.value[0] for rank in planned.stage(stage))
        for stage in range(planned.pipeline_parallel_size)
    ]


def test_tensor_mode_over_both_devices_puts_the_gpu_first() -> None:
    planned = plan(spec(cpu(), gpu(), parallelism={"mode": "Tensor"}, engine={"eager": "Never"}))
    assert devices(planned.plan) == ["GC"]
    assert planned.plan.layers_by_stage == (32,)
    assert planned.plan.engine.eager_gpu, "a captured forward would hold collectives with the CPU"
    assert not planned.plan.engine.eager_cpu
    assert planned.notes[0] == eager_reason(planned.plan)
    assert "mode Pipeline" in planned.notes[1]


@pytest.mark.parametrize(
    ("roles", "parallelism", "stages"),
    [
        ([cpu(pods=2), gpu(pods=2)], {"pipeline": 2}, ["GC", "GC"]),
        ([cpu(ranksPerPod=2), gpu(ranksPerPod=2)], {"tensor": 2}, ["CC", "GG"]),
        ([cpu(pods=1), gpu(pods=3)], {"tensor": 2}, ["GG", "GC"]),
        ([gpu(layers=[28]), cpu(layers=[4])], {}, ["C", "G"]),
        ([cpu(pods=2), gpu(pods=2)], {"tensor": 2, "stageOrder": "AsListed"}, ["CC", "GG"]),
    ],
    ids=["same mix", "a device each", "one mixed", "layers given", "as listed"],
)
def test_ranks_of_tensor_mode_split_each_stage(roles: Any, parallelism: Any, stages: list[str]) -> None:
    assert devices(plan(spec(*roles, parallelism={"mode": "Tensor", **parallelism})).plan) == stages


def test_a_mixed_stage_with_the_cpu_listed_first_is_refused() -> None:
    error = refusal(spec(cpu(), gpu(), parallelism={"mode": "Tensor", "stageOrder": "AsListed"}))
    assert error.reason == "UnsupportedParallelism"
    assert error.message.endswith("List the GPU roles first, or set parallelism.stageOrder: Auto")


def test_the_rank_with_the_least_memory_limits_a_mixed_stage() -> None:
    roles = gpu(deviceMemory="80Gi"), cpu(memory="12Gi")
    planned = plan(spec(*roles, parallelism={"mode": "Tensor"})).plan
    gpu_rank, cpu_rank = planned.ranks
    assert gpu_rank.kv_cache_bytes == cpu_rank.kv_cache_bytes
    assert cpu_rank.weight_bytes - gpu_rank.weight_bytes == 1002 * MIB, "tables are packed and kept on CPUs"
    # One block more (of 32 layers x half of the heads) would be too much for the CPU.
    assert 11 * GIB - 32 * 32 * 2048 < cpu_rank.weight_bytes + cpu_rank.kv_cache_bytes <= 11 * GIB
    assert cpu_rank.predicted_step_s > 10 * gpu_rank.predicted_step_s


@pytest.mark.parametrize(("memory", "fits"), [("80Gi", True), ("12Gi", False)])
def test_notes_that_a_model_in_tensor_mode_fits_the_gpus(memory: str, *, fits: bool) -> None:
    notes = plan(spec(gpu(deviceMemory=memory), cpu(), parallelism={"mode": "Tensor"})).notes
    assert any("CPU ranks are not needed" in note for note in notes) == fits


def test_world_size_that_does_not_match_is_refused() -> None:
    error = refusal(spec(gpu(ranksPerPod=3, layers=[16, 16])))
    assert (error.reason, error.message) == (
        "WorldSizeMismatch",
        (
            "roles: stages x ranks per stage must equal the sum of pods x ranksPerPod (got 3 ranks, 2 "
            "stages). Change roles, parallelism or the number of entries of layers"
        ),
    )


def test_a_stage_across_pods_is_refused() -> None:
    error = refusal(spec(cpu(pods=2), parallelism={"pipeline": 1}))
    assert error.message == (
        "role cpu: ranksPerPod must be a multiple of the 2 ranks per stage (got 1), because one pod holds "
        "all ranks of a stage. Change ranksPerPod or parallelism.tensor"
    )


def test_entries_of_layers_are_one_for_each_stage_of_the_role() -> None:
    error = refusal(spec(cpu(layers=[8, 8, 8]), gpu(pods=3, layers=[8]), parallelism={"pipeline": 4}))
    assert error.message == (
        "role cpu: layers must have one entry for each stage of the role, that is pods x ranksPerPod / 1 = 1 "
        "entries (got 3). Add or remove entries"
    )


def test_layers_of_a_role_need_whole_stages() -> None:
    roles = (cpu(layers=[8]), gpu(pods=3, layers=[8]))
    error = refusal(spec(*roles, parallelism={"mode": "Tensor", "pipeline": 2}))
    assert error.message == (
        "role cpu: pods x ranksPerPod must be a multiple of the 2 ranks per stage (got 1), because layers "
        "has an entry for each stage. Change pods, ranksPerPod or parallelism.tensor, or remove layers"
    )


@pytest.mark.parametrize(
    ("tensor", "what"), [(3, "32 attention heads"), (16, None), (32, None), (64, "32 attention")]
)
def test_a_tensor_size_must_split_the_model(tensor: int, what: str | None) -> None:
    parsed = spec(gpu(pods=tensor), parallelism={"mode": "Tensor"})
    if what is None:
        # 8 key/value heads on more ranks: each head is held by several.
        (kv_bytes,) = {rank.kv_cache_bytes for rank in plan(parsed).plan.ranks}
        # Four sequences, and the block that vLLM keeps for itself.
        assert kv_bytes == (4 * 8192 + 32) * 32 * (2 * 1 * 128 * 2)
    else:
        assert what in refusal(parsed).message


# Layers


def test_explicit_layers_apply_to_the_stages_of_their_role() -> None:
    planned = plan(spec(gpu(layers=[28]), cpu(pods=2, layers=[1, 3]))).plan
    assert [(r.role, r.first_layer, r.end_layer) for r in planned.ranks] == [
        ("cpu", 0, 1),
        ("cpu", 1, 4),
        ("gpu", 4, 32),
    ]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (2, "roles: the entries of layers must add up to the model's 32 layers (got 30). Add 2 layers"),
        (5, "roles: the entries of layers must add up to the model's 32 layers (got 33). Remove 1 layer"),
    ],
)
def test_layers_that_do_not_sum_up_are_refused(layers: int, message: str) -> None:
    error = refusal(spec(gpu(layers=[28]), cpu(layers=[layers])))
    assert (error.reason, error.message) == ("LayersMismatch", message)


def test_reports_the_missing_memory_of_explicit_layers() -> None:
    error = refusal(spec(gpu(layers=[28], deviceMemory=device_memory(7 * GIB)), cpu(layers=[4])))
    # 28 x 416 MiB + the head of 1002 MiB + 28 x 4 KiB x 8224 tokens.
    need = 28 * 416 / 1024 + 1002 / 1024 + 28 * 4096 * 8224 / GIB
    assert f"28 layers need {need:.2f} GiB" in error.message
    assert f"{need - 7:.2f} GiB of memory is missing" in error.message
    assert "Move layers to another stage" in error.message


@pytest.mark.parametrize("first", [cpu(layers=[2]), {**gpu(layers=[2]), "name": "first"}])
def test_a_stage_without_a_layer_that_has_a_cache_is_refused(first: dict[str, Any]) -> None:
    """Otherwise a CPU rank and vLLM's cache manager would divide by the 0 bytes of the layers' cache."""
    kinds = (LayerKind(attention=AttentionKind.NONE), profile().layer(0))
    model = profile(kinds=kinds, kind_of_layer=(0, 0, *(1,) * 30))
    last = {"parallelism": {"stageOrder": "AsListed"}}
    error = refusal(spec(first, gpu(layers=[30]), **last), model=model)
    assert error.reason == "LayersMismatch"
    assert error.message == (
        f"stage 0 (role {first['name']}): at least one layer must have a KV cache or a state (got layers 0 "
        "to 1), because vLLM can run no other stage. Change roles[].layers"
    )
    planned = plan(spec({**first, "layers": [3]}, gpu(layers=[29]), **last), model).plan
    assert planned.layers_by_stage == (3, 29)


def test_layers_that_fit_but_not_each_stage_with_a_cache_are_refused_with_the_cause() -> None:
    kinds = (LayerKind(attention=AttentionKind.NONE), profile().layer(0))
    model = profile(kinds=kinds, kind_of_layer=(1, 1, *(0,) * 30))
    error = refusal(spec(cpu(pods=2, memory="12Gi")), model=model)
    assert error.reason == "InsufficientMemory"
    assert (
        "no split of the model's 32 layers over 2 stages fits: each stage needs a layer with a KV"
        in error.message
    )
    assert "0 of the model" not in error.message


def test_each_planned_stage_has_a_layer_with_a_cache() -> None:
    kinds = (LayerKind(attention=AttentionKind.NONE), profile().layer(0))
    model = profile(kinds=kinds, kind_of_layer=(0, 0, 1, *(0,) * 20, *(1,) * 9))
    parsed = spec(gpu(deviceMemory="80Gi"), cpu(memory="64Gi"))
    assert plan(parsed, model).plan.layers_by_stage == (3, 29), "and no CPU stage of one layer"
    assert plan(spec(cpu(pods=3, memory="32Gi")), model).plan.layers_by_stage == (12, 12, 8)
    error = refusal(spec(gpu(pods=11)), model=model)
    assert error.reason == "TooManyStages"
    assert "11 stages are too many for the model's 10 layers with a KV cache or a state" in error.message


def test_the_gpu_is_filled_first() -> None:
    usable = 11 * GIB
    planned = plan(spec(gpu(deviceMemory=device_memory(usable)), cpu(memory="64Gi"))).plan
    on_cpu, on_gpu = planned.layers_by_stage
    gpu_rank = planned.ranks[1]
    assert on_cpu + on_gpu == 32
    assert gpu_rank.weight_bytes + gpu_rank.kv_cache_bytes <= usable
    per_layer = 416 * 2**20 + 4096 * 8224
    assert gpu_rank.weight_bytes + on_gpu * 4096 * 8224 + per_layer > usable, "one more would fit"


def test_notes_that_a_model_fits_on_the_gpu_without_cpus() -> None:
    planned = plan(spec(gpu(deviceMemory="80Gi"), cpu(memory="64Gi")))
    assert planned.plan.layers_by_stage == (1, 31)
    assert (planned.hybrid_not_needed,) == planned.notes
    assert planned.hybrid_not_needed == (
        "CPU ranks are not needed: the model takes 14.96 GiB, or 15.96 GiB with KV cache for one request of "
        "8,192 tokens, and the GPU has 72.00 GiB for both. CPU ranks add capacity, not speed. Remove the CPU "
        "roles"
    )


def test_stages_of_one_device_are_even() -> None:
    assert plan(spec(cpu(pods=3, memory="32Gi"))).plan.layers_by_stage == (11, 11, 10)


def test_layers_are_even_if_memory_is_unknown() -> None:
    planned = plan(spec(gpu(), cpu()))
    assert planned.plan.layers_by_stage == (16, 16)
    note = (
        "the GPUs' memory is unknown, so the plan divides the layers without regard to it. Set "
        "roles[].deviceMemory"
    )
    assert planned.notes == (note,)


def test_layers_of_different_sizes_are_counted_in_bytes() -> None:
    sizes = (4 * GIB,) + (GIB,) * 7
    model = profile(num_layers=8, layer_bytes=sizes, embedding_bytes=0, head_bytes=0)
    planned = plan(spec(cpu(pods=2, memory="9Gi"), engine={"maxModelLen": 32}), model).plan
    # 9 GiB less 2 (rank, API server) hold the large layer and 2 others.
    assert planned.layers_by_stage == (3, 5)


def test_reports_the_missing_memory_of_a_model() -> None:
    error = refusal(spec(gpu(deviceMemory=device_memory(12 * GIB * 9 // 10)), cpu(memory="6Gi")))
    assert error.reason == "InsufficientMemory"
    assert error.message == (
        "roles: memory for 6 of the model's 32 layers is missing (2.63 GiB). With KV cache for one request "
        "of 8,192 tokens, 26 layers fit: 4 in stage 0 (role cpu), 22 in stage 1 (role gpu). Add pods, raise "
        "resources.limits.memory of role cpu or deviceMemory of role gpu, or use the model in fewer bits "
        "(FP8, AWQ)"
    )


def test_proposes_a_shorter_context_only_if_the_weights_fit() -> None:
    short = spec(gpu(deviceMemory="16Gi"), cpu(memory="10Gi"))
    long = spec(gpu(deviceMemory="16Gi"), cpu(memory="10Gi"), engine={"maxModelLen": 131072})
    assert plan(short).plan.layers_by_stage
    assert refusal(long).message.endswith(
        "or use the model in fewer bits (FP8, AWQ), or lower engine.maxModelLen"
    )
    awq = replace(profile(), scheme=Scheme(name=SchemeName.AWQ, bits=4))
    assert refusal(long, model=awq).message.endswith("deviceMemory of role gpu, or lower engine.maxModelLen")


def test_reports_the_missing_memory_of_a_stage() -> None:
    error = refusal(spec(gpu(deviceMemory="80Gi"), cpu(memory="4Gi")))
    need = (416 + 2 * 1002) / 1024 + 4096 * 8224 / GIB
    assert error.message == (
        f"stage 0 (role cpu): {need - 2:.2f} GiB of memory is missing. The stage must have at least "
        f"one layer, which needs {need:.2f} GiB, including KV cache for one request of 8,192 tokens and the "
        "embedding or head. A rank has 2.00 GiB. Raise the "
        "role's resources.limits.memory"
    )


def test_reports_the_memory_for_the_first_layer_of_a_later_stage() -> None:
    """The pod of the later stage could hold the small layers of the first stage, but not a large layer."""
    model = profile(
        num_layers=6, layer_bytes=(MIB, MIB, *(4 * GIB,) * 4), embedding_bytes=0, head_bytes=0, other_bytes=0
    )
    first = {**gpu(deviceMemory=device_memory(GIB, model, samples=False)), "name": "first"}
    short = {"engine": {"maxModelLen": 32}, "parallelism": {"stageOrder": "AsListed"}}
    error = refusal(spec(first, cpu(memory="4Gi"), **short), model=model)
    cache = 2 * 32 * 4096  # of two blocks
    need = (4 * GIB + cache) / GIB
    missing = f"stage 1 (role cpu): {need - 3:.2f} GiB of memory is missing"
    least = f"The stage must have at least one layer, which needs {need:.2f} GiB"
    assert error.message.startswith(f"{missing}. {least}"), error.message
    assert "A rank has 3.00 GiB. " in error.message


def test_reports_the_fewest_layers_of_a_stage_together() -> None:
    """Earlier, the message counted all 8 layers as fitting, and 0 as too many."""
    model = profile(
        num_layers=8, layer_bytes=(GIB,) * 8, embedding_bytes=0, head_bytes=0, first_stage_layers=3
    )
    small = device_memory(27 * GIB // 10, model, samples=False, with_cpus=False)
    first, second = ({**gpu(deviceMemory=size), "name": name} for name, size in (("a", small), ("b", "30Gi")))
    short = {"engine": {"maxModelLen": 32}, "parallelism": {"stageOrder": "AsListed"}}
    said = refusal(spec(first, second, **short), model=model).message
    missing = "stage 0 (role a): 0.30 GiB of memory is missing. "
    assert said.startswith(f"{missing}The stage must have at least 3 layers, which need 3.00 GiB"), said
    assert "A rank has 2.70 GiB. " in said
    pods = spec(gpu(pods=3), **short)
    error = refusal(pods, model=replace(model, first_stage_layers=7))
    assert error.reason == "TooManyStages"
    assert "3 stages are too many for the model's 8 layers: the stages need 7, 1, 1 layers" in error.message


def test_counts_layers_that_fit_if_their_sizes_differ() -> None:
    """The second stage could hold a small layer, but it must also have the large layer before this layer."""
    sizes = (GIB, GIB, GIB, 4 * GIB, GIB)
    model = profile(num_layers=5, layer_bytes=sizes, embedding_bytes=0, head_bytes=0, other_bytes=0)
    roles = [
        {**gpu(deviceMemory=device_memory(size * GIB, model, with_cpus=False)), "name": f"r{size}"}
        for size in (9, 3, 2)
    ]
    short = {"engine": {"maxModelLen": 32}, "parallelism": {"stageOrder": "AsListed"}}
    said = refusal(spec(*roles, **short), model=model).message
    least = "The stage must have at least one layer, which needs 4.00 GiB"
    assert said.startswith(f"stage 1 (role r3): 1.00 GiB of memory is missing. {least}"), said


def test_a_pod_smaller_than_its_processes_is_refused() -> None:
    error = refusal(spec(cpu(memory="2Gi")))
    assert error.message == (
        "role cpu: a pod must have more memory than the 2.00 GiB that 1 rank and vLLM's API server take "
        "without a model (got 2.00 GiB). Raise resources.limits.memory"
    )


def test_reports_numbers_of_ranks_that_can_split_the_model() -> None:
    error = refusal(spec(cpu(ranksPerPod=3), parallelism={"mode": "Tensor"}))
    assert error.message == (
        "parallelism.tensor: the ranks of a stage must divide the model's 32 attention heads equally (got 3 "
        "ranks per stage). "
        "Set one of 1, 2, 4, 8, 16, 32"
    )


def test_more_stages_than_layers_are_refused() -> None:
    error = refusal(spec(cpu(pods=3)), model=profile(num_layers=2))
    assert error.reason == "TooManyStages"
    assert error.message.startswith(
        "roles: 3 stages are too many for the model's 2 layers: each stage needs a layer. "
    )


# Memory


def test_the_first_stage_counts_the_embedding_and_the_last_stage_the_head() -> None:
    first, last = plan(spec(gpu(pods=2, layers=[16, 16]))).plan.ranks
    assert (first.weight_bytes, last.weight_bytes) == (
        (16 * 416 + 1002) * 2**20,
        (16 * 416 + 1002) * 2**20 + 8192,
    )


def test_a_tied_head_is_a_copy_on_another_stage_only() -> None:
    tied = profile(tied_head=True, head_bytes=0, other_bytes=0)
    (whole,) = plan(spec(gpu()), tied).plan.ranks
    _, last = plan(spec(gpu(pods=2)), tied).plan.ranks
    assert whole.weight_bytes == (32 * 416 + 1002) * 2**20
    assert last.weight_bytes == (16 * 416 + 1002) * 2**20


def test_cpu_ranks_keep_embedding_and_head_twice() -> None:
    (whole,) = plan(spec(cpu()), profile(other_bytes=0)).plan.ranks
    assert whole.weight_bytes == (32 * 416 + 2 * 2 * 1002) * 2**20


def test_another_dtype_scales_weights_and_kv() -> None:
    bf16, f32 = (plan(spec(gpu(), engine={"dtype": d})).plan.ranks[0] for d in ("auto", "float32"))
    assert f32.weight_bytes == 2 * bf16.weight_bytes
    assert f32.kv_cache_bytes == 2 * bf16.kv_cache_bytes


def test_quantized_weights_do_not_scale() -> None:
    quantized = profile(quantization="compressed-tensors")
    bf16, f32 = (plan(spec(gpu(), engine={"dtype": d}), quantized).plan.ranks[0] for d in ("auto", "float32"))
    # Embedding and head are not quantized.
    assert f32.weight_bytes - bf16.weight_bytes == 2 * 1002 * MIB + 8192


def test_kv_capacity_is_the_same_number_of_whole_blocks_everywhere() -> None:
    planned = plan(spec(gpu(deviceMemory="24Gi"), cpu(memory="24Gi"))).plan
    blocks = {rank.kv_cache_bytes / (rank.num_layers * 4096 * 32) for rank in planned.ranks}
    assert len(blocks) == 1
    assert blocks.pop() % 1 == 0


def test_the_scheduler_limits_the_kv_capacity() -> None:
    (rank,) = plan(spec(gpu(deviceMemory="999Gi"), engine={"maxModelLen": 64})).plan.ranks
    assert rank.kv_cache_bytes == (256 * 64 + 32) * 32 * 4096


def test_a_pods_memory_is_shared_by_its_ranks() -> None:
    one = plan(spec(cpu(memory="66Gi", layers=[32]))).plan.ranks[0]
    two = plan(spec(cpu(memory="67Gi", ranksPerPod=2, layers=[32]), parallelism={"tensor": 2})).plan.ranks
    assert [r.kv_cache_bytes * 2 for r in two] == [one.kv_cache_bytes] * 2


# Devices


def test_notes_a_gpu_role_that_computes_on_cpus() -> None:
    planned = plan(spec(gpu(), cpu()), inventory=Inventory(on_cpus={"gpu": "there are none"}))
    assert [(r.role, r.device) for r in planned.plan.ranks] == [("gpu", Device.CPU), ("cpu", Device.CPU)]
    assert planned.notes == (
        "role gpu runs on CPUs, because planning.onGPUShortage.action is CPUOnly: there are none",
    )
    assert planned.on_cpus == planned.notes[0]


# Settings


def test_a_group_with_cpus_gets_these_default_settings() -> None:
    engine = plan(spec(gpu(), cpu())).plan.engine
    assert (engine.dtype, engine.max_model_len, engine.max_num_batched_tokens, engine.max_num_seqs) == (
        "bfloat16",
        8192,
        2048,
        64,
    )
    assert (engine.block_size, engine.eager_gpu, engine.eager_cpu, engine.batches_in_flight) == (
        32,
        False,
        True,
        1,
    )


def test_the_number_of_batches_in_flight_can_be_set() -> None:
    parsed = spec(gpu(), cpu(), parallelism={"batchesInFlight": 2})
    assert plan(parsed).plan.engine.batches_in_flight == 2


@pytest.mark.parametrize(
    ("eager", "gpu_is_eager", "cpu_is_eager"),
    [("Auto", False, True), ("Always", True, True), ("Never", False, False)],
)
def test_eager_applies_to_the_chosen_devices(eager: str, gpu_is_eager: bool, cpu_is_eager: bool) -> None:
    engine = plan(spec(gpu(), cpu(), engine={"eager": eager})).plan.engine
    assert (engine.eager_gpu, engine.eager_cpu) == (gpu_is_eager, cpu_is_eager)


def test_float32_stays_float32() -> None:
    assert plan(spec(cpu()), profile(dtype="float32")).plan.engine.dtype == "float32"


def test_an_unknown_checkpoint_dtype_asks_for_one() -> None:
    odd = profile(dtype="float8_e4m3fn")
    assert "Set engine.dtype" in refusal(spec(cpu()), model=odd).message
    assert plan(spec(cpu(), engine={"dtype": "bfloat16"}), odd).plan.engine.dtype == "bfloat16"


def test_max_model_len_is_at_most_the_models_maximum() -> None:
    assert plan(spec(cpu()), profile(max_position_embeddings=2048)).plan.engine.max_model_len == 2048
    error = refusal(spec(cpu(), engine={"maxModelLen": 4096}), model=profile(max_position_embeddings=2048))
    assert error.message == (
        "engine.maxModelLen: must be at most 2048 (got 4096), because 2048 is the model's own maximum. Lower "
        "engine.maxModelLen"
    )


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["--max-num-seqs=8"], "Remove it: the plan sets"),
        (["--tensor_parallel_size", "2"], "Set spec.parallelism.tensor"),
        (["--speculative-config", "{}"], "Remove it"),
    ],
)
def test_an_argument_that_the_plan_owns_is_refused(args: list[str], remedy: str) -> None:
    error = refusal(spec(cpu(), engine={"args": args}))
    assert error.reason == "RefusedArgument"
    assert error.message.startswith(f"engine.args: {args[0]!r}")
    assert remedy in error.message


def test_other_arguments_are_passed_to_vllm_unchanged() -> None:
    args = ["--enable-prefix-caching", "--tokenizer", "x"]
    planned = plan(spec(cpu(), engine={"args": args})).plan
    assert planned.engine.extra_args == (*args, "--sse-keep-alive-interval", "15")


# Speed


def test_ranks_of_a_cpu_pod_share_its_bandwidth() -> None:
    (one,) = plan(spec(cpu())).plan.ranks
    two = plan(spec(cpu(ranksPerPod=2), parallelism={"tensor": 2})).plan.ranks
    assert [rank.predicted_step_s for rank in two] == pytest.approx([one.predicted_step_s] * 2)


def test_equal_arguments_give_an_equal_plan() -> None:
    parsed = spec(gpu(deviceMemory="12Gi"), cpu(memory="64Gi"))
    assert plan(parsed) == plan(parsed)
