"""Mode FeedForward: the layers whose experts or MLPs go to CPUs, and the plan's notes."""

import re
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import pytest

from heteroinfer_contract import load_formats
from heteroinfer_contract.calibration import MemoryReading
from heteroinfer_contract.model import AttentionKind, LayerKind, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Mode
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import EngineSpec, HeteroInferenceSpec
from heteroinfer_operator.commands.plan_choices import describe_choices
from heteroinfer_operator.commands.plan_details import describe_kv_cache, describe_memory, describe_times
from heteroinfer_operator.commands.plan_figures import Figures
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.planning.feed_forward import (
    build_feed_forward_part,
    feed_forward_rates,
    feed_forward_seconds,
    peak_extra_bytes,
    rank_weight_bytes,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.kv_cache import build_kv_cache
from heteroinfer_operator.planning.predicted_plan import predict_again
from heteroinfer_operator.planning.prediction import (
    MIXTURE_LAUNCH_S,
    StepLoad,
    forecast_first_token,
    predict,
)
from heteroinfer_operator.planning.rates import CPU_OTHER_TYPES_RATIO, EXCHANGE_BYTES_PER_S
from heteroinfer_operator.planning.remote_ranks import RankSet
from tests.shapes.profiles import recorded_profiles
from tests.unit.calibrated import CALIBRATION
from tests.unit.planning.planned_models import GIB, MIB, cpu, gpu, plan, profile, spec

EXPERT = 9 * MIB
MOE = LayerKind(kv_heads=4, kv_width=256, experts=128, experts_per_token=8, expert_bytes=EXPERT)
DENSE = LayerKind(kv_heads=8, kv_width=256, mlp_bytes=336 * MIB)


def mixture(dense_layers: int = 0, layers: int = 24) -> ModelProfile:
    """Returns a model of Qwen3-30B-A3B's shape; its first layers may be dense."""
    kinds = (0,) * dense_layers + (1,) * (layers - dense_layers)
    sizes = (416 * MIB,) * dense_layers + (128 * EXPERT + 40 * MIB,) * (layers - dense_layers)
    return profile(
        num_layers=layers,
        layer_bytes=sizes,
        kinds=(replace(DENSE), MOE),
        kind_of_layer=kinds,
        embedding_bytes=600 * MIB,
        head_bytes=600 * MIB,
        hidden_size=2048,
    )


def feed_forward(memory: str = "64Gi", **fields: Any) -> HeteroInferenceSpec:
    own = {"cpu": "14", "memory": memory, **fields.pop("own", {})}
    role = gpu(feedForward=own, deviceMemory=fields.pop("device_memory", "24Gi"), **fields)
    return spec(role, parallelism={"mode": "FeedForward"}, engine={"maxModelLen": 4096})


def test_moves_the_fewest_layers_that_the_gpu_needs_to_cpus() -> None:
    planned = plan(feed_forward(), mixture())
    own, theirs = planned.plan.ranks
    assert planned.plan.mode is Mode.FEED_FORWARD
    assert (own.device, own.num_layers, theirs.device, theirs.pod) == (Device.GPU, 24, Device.CPU, 0)
    assert theirs.feed_forward is not None
    count = len(theirs.feed_forward.layers)
    # One layer less on CPUs, and what the GPU has for them would not hold the rest and one sequence.
    usable = planned.budgets[0].ranks[0].budget
    assert usable is not None
    assert usable <= 0.9 * 24 * GIB
    assert own.weight_bytes + own.kv_cache_bytes <= usable
    assert own.weight_bytes + EXPERT * 128 + own.kv_cache_bytes / 64 > usable
    assert theirs.weight_bytes == count * 128 * EXPERT
    with pytest.raises(PlanError, match=r"missing|miss"):
        plan(feed_forward(own={"layers": count - 1}), mixture())


@pytest.mark.parametrize("name", ["Olmo2ForCausalLM", "Dots1ForCausalLM"])
def test_layers_of_transformers_classes_have_no_part_for_feed_forward_ranks(name: str) -> None:
    with pytest.raises(
        PlanError,
        match=rf"{name}: vLLM serves .* with its Transformers modeling backend, .* Use mode Pipeline",
    ) as e:
        plan(feed_forward(), replace(mixture(), architecture=name))
    assert e.value.reason == "UnsupportedParallelism"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Ernie4_5_VLMoeForConditionalGeneration", "its layers have two sets of experts"),
        (
            "Gemma3nForCausalLM",
            "its MLPs choose the active columns among all columns, but each rank has only a part",
        ),
        ("Zamba2ForCausalLM", "several of its layers share an MLP"),
    ],
)
def test_refuses_models_with_mlps_that_cannot_move(name: str, why: str) -> None:
    with pytest.raises(PlanError, match=rf"does not support {name}: {why}\. Use mode Pipeline") as e:
        plan(feed_forward(), replace(mixture(), architecture=name))
    assert e.value.reason == "UnsupportedParallelism"


def one_rank() -> tuple[RankSet, ...]:
    return (RankSet(role=feed_forward().roles[0], pods=0, per_pod=1),)


def seconds(planned: Planned, load: StepLoad) -> float:
    """Returns the predicted time of the slowest feed-forward rank."""
    assert planned.remote is not None
    rates = planned.rates[-planned.remote.ranks :]
    return max(feed_forward_seconds(planned.remote, planned.plan.engine, rates, load))


def with_args(*args: str) -> HeteroInferenceSpec:
    own = {"cpu": "14", "memory": "64Gi"}
    role = gpu(feedForward=own, deviceMemory="24Gi")
    engine = {"maxModelLen": 4096, "args": list(args)}
    return spec(role, parallelism={"mode": "FeedForward"}, engine=engine)


@pytest.mark.parametrize(
    "args",
    [
        ("--cpu-offload-gb", "4"),
        ("--offload-group-size=8",),
        ("--load-format", "tensorizer"),
        ("--load-format", "runai_streamer"),
        ("--load-format", "sharded_state"),
        ("--model-impl", "transformers"),
    ],
)
def test_refuses_arguments_with_which_ranks_cannot_load(args: tuple[str, ...]) -> None:
    option = args[0].split("=")[0]
    with pytest.raises(PlanError, match=rf"feedForward needs engine.args {option} to be ") as e:
        plan(with_args(*args), mixture())
    assert e.value.reason == "UnsupportedParallelism"


def test_accepts_arguments_with_the_defaults_of_vllm() -> None:
    args = ("--cpu-offload-gb", "0", "--load-format=dummy", "--model-impl=auto", "--moe-backend=auto")
    assert plan(with_args(*args), mixture()).plan.ranks


@pytest.mark.parametrize("load_format", load_formats.FEED_FORWARD)
def test_every_checkpoint_format_is_accepted(load_format: str) -> None:
    assert plan(with_args("--load-format", load_format), mixture()).plan.ranks


def test_refuses_gpu_kernels_for_experts_on_cpus() -> None:
    with pytest.raises(PlanError, match=r"--moe-backend triton with experts: .*\. Remove the option"):
        plan(with_args("--moe-backend", "triton"), mixture())


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "MiniMaxM3SparseForCausalLM"])
def test_feed_forward_ranks_need_no_cpu_attention_and_no_cpu_class(name: str) -> None:
    """Feed-forward ranks have the experts alone; a stage on CPUs has all of the model."""
    model = replace(mixture(), architecture=name)
    sparse = replace(model, kinds=tuple(replace(k, attention=AttentionKind.SPARSE) for k in model.kinds))
    assert plan(feed_forward(), sparse).remote is not None
    on_cpus = Inventory(on_cpus={"gpu": "no GPU"})
    with pytest.raises(PlanError, match=rf"CPU ranks do not support {name} with sparse attention"):
        plan(feed_forward(), sparse, on_cpus)


def cuts(planned: Planned) -> set[bool]:
    """Returns whether its feed-forward ranks have whole experts."""
    return {rank.feed_forward.by_experts for rank in planned.plan.ranks if rank.feed_forward is not None}


def test_experts_with_gates_and_ups_in_one_tensor_are_not_split() -> None:
    model = mixture()
    together = replace(model, kinds=tuple(replace(kind, gates_together=True) for kind in model.kinds))
    assert cuts(plan(feed_forward(own={"ranks": 2}), together)) == {True}
    assert cuts(plan(feed_forward(), together)) == {False}
    assert cuts(plan(feed_forward(own={"ranks": 2}), model)) == {False}


def test_notes_a_gpu_of_unknown_memory() -> None:
    note = "the GPU's memory is unknown, so the plan moves only 1 layer. Set deviceMemory"
    assert note in plan(feed_forward(device_memory=None), mixture()).notes
    assert note not in plan(feed_forward(device_memory=None, own={"layers": 3}), mixture()).notes
    assert note not in plan(feed_forward(), mixture()).notes


def test_experts_of_spread_layers_move_and_dense_mlps_of_a_mixture_stay() -> None:
    planned = plan(feed_forward(own={"layers": 3}, device_memory="80Gi"), mixture(dense_layers=2))
    share = planned.plan.ranks[1].feed_forward
    assert share is not None
    assert share.layers == (8, 15, 23)
    everything = plan(feed_forward(own={"layers": 22}), mixture(dense_layers=2)).plan.ranks[1].feed_forward
    assert everything is not None
    assert everything.layers == tuple(range(2, 24))
    with pytest.raises(PlanError, match=r"feedForward.layers must be at most 22, .* \(got 24\)"):
        plan(feed_forward(own={"layers": 24}), mixture(dense_layers=2))


def test_several_ranks_share_each_layer() -> None:
    one = plan(feed_forward(own={"layers": 6, "ranks": 1}, device_memory="80Gi"), mixture()).plan
    two = plan(feed_forward(own={"layers": 6, "ranks": 2}, device_memory="80Gi"), mixture()).plan
    assert [rank.weight_bytes for rank in two.ranks[1:]] == [one.ranks[1].weight_bytes // 2] * 2
    assert [(rank.rank, rank.local_rank, rank.tensor_rank) for rank in two.ranks[1:]] == [
        (1, 1, 0),
        (2, 2, 1),
    ]


def in_units(unit: int, columns: int = 768) -> ModelProfile:
    """Returns the mixture with its experts' columns, of which so many stay together."""
    model = mixture()
    kinds = tuple(replace(kind, columns=columns if kind.experts else 0) for kind in model.kinds)
    return replace(model, kinds=kinds, column_unit=unit)


def of_ranks(ranks: int, **own: Any) -> HeteroInferenceSpec:
    return feed_forward(own={"layers": 6, "ranks": ranks, **own}, device_memory="80Gi")


def test_a_rank_has_whole_units_of_columns() -> None:
    layers = 6 * 128 * EXPERT
    shares = [rank.weight_bytes for rank in plan(of_ranks(4), in_units(128)).plan.ranks[1:]]
    assert shares == [layers // 3, layers // 6, layers // 6, layers // 3]
    even = [rank.weight_bytes for rank in plan(of_ranks(4), in_units(32)).plan.ranks[1:]]
    assert even == [layers // 4] * 4
    unknown = [rank.weight_bytes for rank in plan(of_ranks(4), mixture()).plan.ranks[1:]]
    assert unknown == even


def test_memory_is_counted_for_the_largest_share() -> None:
    # A third of 6 layers of 1.125 GiB, 1 GiB of the process, and the longest batch.
    with pytest.raises(PlanError, match=r"needs 3\.55 GiB .* feedForward.memory gives it 3\.00 GiB"):
        plan(of_ranks(4, memory="3Gi"), in_units(128))
    assert plan(of_ranks(4, memory="3Gi"), in_units(32)).plan.ranks


def test_kernel_scratch_is_counted_for_the_largest_share() -> None:
    def beside(model: ModelProfile) -> int:
        kinds = tuple(replace(kind, experts_per_token=min(64, kind.experts)) for kind in model.kinds)
        planned = plan(of_ranks(4), replace(model, kinds=kinds))
        assert planned.remote is not None
        engine = replace(planned.plan.engine, max_num_batched_tokens=2048)
        return peak_extra_bytes(replace(planned.remote, ring=None), engine, range(4))

    rows = 2048 * 64
    assert beside(in_units(32)) == GIB + rows * (8 * 2048 + 12 * 192)
    assert beside(in_units(128)) == GIB + rows * (8 * 2048 + 12 * 256)
    assert beside(mixture()) == beside(in_units(32))
    assert beside(in_units(512)) == GIB + rows * (8 * 2048 + 12 * 768), "whole experts have all columns"


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [
        (SchemeName.NONE, Fraction(1)),
        (SchemeName.MXFP4, Fraction(1)),
        (SchemeName.INT4, Fraction(1)),
        (SchemeName.AWQ, Fraction(134, 133)),
        (SchemeName.GPTQ, Fraction(132, 133)),
    ],
)
def test_experts_take_the_memory_that_they_take_in_the_checkpoint(
    scheme: SchemeName, weights: Fraction
) -> None:
    model = mixture()
    quantized = scheme is not SchemeName.NONE
    kinds = tuple(replace(kind, experts_quantized=bool(kind.experts) and quantized) for kind in model.kinds)
    model = replace(model, kinds=kinds, scheme=Scheme(name=scheme, bits=4 if quantized else 16, group=128))
    remote = build_feed_forward_part(one_rank(), model, range(6))
    engine = plan(feed_forward(), mixture()).plan.engine
    assert rank_weight_bytes(remote, engine, 0) == ceil(6 * 128 * EXPERT * weights)
    rows = 2048 * 8
    assert peak_extra_bytes(remote, engine, (0,)) >= GIB + rows * 8 * 2048


def test_an_mlp_layer_needs_twice_its_memory_while_it_is_packed() -> None:
    model = replace(mixture(24), kinds=(DENSE, MOE))
    remote = build_feed_forward_part(one_rank(), model, range(6))
    engine = replace(plan(feed_forward(), mixture()).plan.engine, max_num_batched_tokens=512)
    assert peak_extra_bytes(remote, engine, (0,)) == GIB + DENSE.mlp_bytes


def test_kernel_scratch_of_an_mlp_is_counted_for_each_token_of_a_long_step() -> None:
    remote = build_feed_forward_part(one_rank(), replace(mixture(24), kinds=(DENSE, DENSE)), range(6))
    engine = replace(plan(feed_forward(), mixture()).plan.engine, max_num_batched_tokens=16384)
    columns = DENSE.mlp_bytes // (3 * 2 * 2048)
    assert peak_extra_bytes(remote, engine, (0,)) >= GIB + 16384 * (8 * 2048 + 12 * columns)


def test_a_step_waits_for_the_largest_share() -> None:
    def computes_s(model: ModelProfile) -> float:
        planned = plan(of_ranks(4), model)
        assert planned.remote is not None
        step_s = planned.plan.ranks[1].predicted_step_s
        assert {rank.predicted_step_s for rank in planned.plan.ranks[1:]} == {step_s}
        return step_s - 6 * planned.rates[-1].exchange_s

    assert computes_s(in_units(128)) == pytest.approx(computes_s(in_units(32)) * 4 / 3, rel=0.001)


def test_ranks_that_share_by_rate_work_as_fast_as_all_nodes_together() -> None:
    readings = (
        MemoryReading(threads=16, bytes_per_s=240e9),
        MemoryReading(threads=8, bytes_per_s=150e9, node=0),
        MemoryReading(threads=8, bytes_per_s=90e9, node=1),
    )
    hardware = replace(CALIBRATION.hardware, cores=16, numa_nodes=2)
    measured = replace(CALIBRATION, hardware=hardware, readings=readings)
    planned = plan(of_ranks(2, cpu="8"), in_units(32))
    assert planned.remote is not None
    engine, known = planned.plan.engine, Inventory(calibration={"gpu": measured})
    two = feed_forward_rates(planned.remote, engine, known)
    assert [each.cache for each in two] == [120e9 * CPU_OTHER_TYPES_RATIO] * 2
    one = replace(planned.remote, sets=(replace(planned.remote.sets[0], per_pod=1),))
    assert feed_forward_rates(one, engine, known)[0].cache == 90e9 * CPU_OTHER_TYPES_RATIO


UNSHARED = pytest.mark.parametrize(
    ("unit", "columns", "why"),
    [
        (
            128,
            384,
            "4 feed-forward ranks cannot share 384 intermediate columns: each rank needs at least 128",
        ),
        (
            128,
            704,
            "4 feed-forward ranks cannot share 704 intermediate columns: 128 columns must stay together",
        ),
    ],
)


@UNSHARED
def test_mlps_with_indivisible_columns_are_refused(unit: int, columns: int, why: str) -> None:
    dense = profile(kinds=(replace(DENSE, columns=columns),), kind_of_layer=(0,) * 32)
    with pytest.raises(
        PlanError, match=rf"role gpu, layer 4: {why}.*\. Use .*: lower feedForward.ranks"
    ) as refused:
        plan(of_ranks(4), replace(dense, column_unit=unit))
    assert refused.value.reason == "UnsupportedParallelism"


@UNSHARED
def test_experts_with_indivisible_columns_are_not_split(unit: int, columns: int, why: str) -> None:
    model = in_units(unit, columns)
    planned = plan(of_ranks(4), model)
    assert cuts(planned) == {True}
    assert " of weights (whole experts), and up to " in "\n".join(describe_memory(planned))
    assert [rank.weight_bytes for rank in planned.plan.ranks[1:]] == [6 * 32 * EXPERT] * 4
    again = predict_again(planned.plan, of_ranks(4), model, Inventory())
    assert again is not None
    assert again.plan == planned.plan
    fewer = replace(model, kinds=tuple(replace(kind, experts=min(kind.experts, 3)) for kind in model.kinds))
    fewer = replace(
        fewer, kinds=tuple(replace(kind, experts_per_token=min(kind.experts, 2)) for kind in fewer.kinds)
    )
    with pytest.raises(PlanError, match="feed-forward ranks cannot share 3 experts"):
        plan(of_ranks(4), fewer)


def test_a_step_waits_for_the_rank_with_most_of_its_experts() -> None:
    whole, cut = plan(of_ranks(2), in_units(1024)), plan(of_ranks(2), in_units(32))
    assert (cuts(whole), cuts(cut)) == ({True}, {False})

    def reading_s(planned: Planned, rows: int) -> float:
        assert planned.remote is not None
        load = StepLoad(requests=rows)
        rates = planned.rates[-1]
        exchanged = rows * 2 * planned.remote.profile.hidden_size * 2 / EXCHANGE_BYTES_PER_S
        step_s = seconds(planned, load)
        return step_s - 6 * (rates.exchange_s + exchanged)

    # 8 of 128 experts over two ranks: the fuller one has 5.06 on average, not 4.
    assert reading_s(whole, 1) / reading_s(cut, 1) == pytest.approx(5.06 / 4, rel=0.04)
    assert 1 <= reading_s(whole, 4096) / reading_s(cut, 4096) < 1.01


@pytest.mark.parametrize(
    ("ranks", "experts", "topk", "rows", "most"),
    [
        (8, 128, 1, 1, 1.0),  # of the one rank that has it
        (2, 128, 1, 1, 1.0),
        (8, 16, 8, 2, 2.0),  # all that a rank has
        (8, 8, 4, 2, 1.0),
        (3, 8, 8, 1, 3.0),
    ],
)
def test_the_busiest_rank_has_at_least_one_expert_and_at_most_its_own(
    ranks: int, experts: int, topk: int, rows: int, most: float
) -> None:
    assert fullest(ranks, experts, topk, rows) == pytest.approx(most)


@pytest.mark.parametrize(
    ("ranks", "experts", "topk", "most"),
    [(2, 128, 8, 5.06), (3, 64, 6, 3.18), (4, 128, 8, 3.49), (4, 16, 2, 1.20), (6, 256, 8, 2.89)],
)
def test_the_prediction_for_the_busiest_rank_of_one_token_is_the_exact_average(
    ranks: int, experts: int, topk: int, most: float
) -> None:
    """The averages are exact, over all choices of a token's experts."""
    assert fullest(ranks, experts, topk, rows=1) == pytest.approx(most, rel=0.04)


def fullest(ranks: int, experts: int, topk: int, rows: int) -> float:
    """Returns of how many experts that rank reads, by prediction, whose step the others wait for."""
    model = in_units(1024)
    kinds = tuple(replace(kind, experts=experts, experts_per_token=topk) for kind in model.kinds)
    model = replace(model, kinds=kinds, layer_bytes=(experts * EXPERT + 40 * MIB,) * 24)
    planned = plan(of_ranks(ranks), model)
    assert cuts(planned) == {True}
    assert planned.remote is not None
    rates = planned.rates[-1]
    exchanged = rates.exchange_s + rows * 2 * 2048 * 2 / EXCHANGE_BYTES_PER_S
    step_s = seconds(planned, StepLoad(requests=rows))
    return (step_s / 6 - exchanged) * rates.experts / EXPERT


def test_columns_of_incomplete_blocks_are_not_filled() -> None:
    planned = plan(of_ranks(2), in_units(32, columns=200))
    assert cuts(planned) == {True}
    assert planned.plan.ranks[1].weight_bytes == 6 * 64 * EXPERT


def test_predicts_plans_of_earlier_versions_that_cannot_be_shared() -> None:
    planned = plan(of_ranks(4), in_units(32))
    assert planned.remote is not None
    unshared = replace(planned.remote, profile=replace(planned.remote.profile, column_unit=512))
    even_s, unshared_s = (
        feed_forward_seconds(remote, planned.plan.engine, planned.rates[-4:], StepLoad())
        for remote in (planned.remote, unshared)
    )
    assert unshared_s == even_s


def test_a_step_counts_the_experts_that_its_tokens_read() -> None:
    planned = plan(feed_forward(own={"layers": 24}), mixture())
    active = 24 * 8 * EXPERT
    cpu = planned.plan.ranks[1].predicted_step_s
    assert active / 130e9 < cpu < active / 50e9
    assert predict(planned.plan).step_s > cpu + planned.plan.ranks[0].predicted_step_s


def test_the_plan_compares_feed_forward_with_pipeline() -> None:
    note = plan(feed_forward(own={"layers": 12}), mixture()).notes[0]
    found = re.search(
        r"for about ([0-9.]+) ms\. Mode Pipeline .* would have (\d+) whole .* for ([0-9.]+) ms", note
    )
    assert found is not None, note
    assert int(found[2]) == 12
    assert float(found[1]) < float(found[3]) * 1.05


def test_mlps_of_a_dense_model_can_move() -> None:
    model = profile(kinds=(DENSE,), kind_of_layer=(0,) * 32)
    planned = plan(feed_forward(device_memory="12Gi"), model)
    own, theirs = planned.plan.ranks
    assert theirs.feed_forward is not None
    assert theirs.weight_bytes == len(theirs.feed_forward.layers) * 336 * MIB
    assert own.weight_bytes + theirs.weight_bytes == 32 * 416 * MIB + 2 * 1002 * MIB + 8192


def test_notes_a_gpu_that_holds_the_whole_model() -> None:
    planned = plan(feed_forward(own={"layers": 1}, device_memory="80Gi"), mixture())
    assert "feed-forward ranks are not needed" in planned.hybrid_not_needed


def test_reports_the_missing_memory_of_feed_forward_ranks() -> None:
    with pytest.raises(
        PlanError,
        match=r"lacks 12.39 GiB of memory. It needs 28\.39 GiB .* feedForward.memory gives it 16\.00 GiB",
    ):
        plan(feed_forward(memory="16Gi", own={"layers": 24}), mixture())
    with pytest.raises(PlanError, match="of memory is missing on its rank"):
        plan(feed_forward(device_memory="3500Mi"), mixture())


def test_refuses_models_and_layers_that_feed_forward_ranks_cannot_compute() -> None:
    with pytest.raises(PlanError, match="the planner finds no experts and no MLPs in its layers"):
        plan(feed_forward(), profile())
    with pytest.raises(PlanError, match=r"feedForward.layers must be at most 24, .* \(got 25\)"):
        plan(feed_forward(own={"layers": 25}), mixture())


def test_reports_the_missing_memory_of_all_ranks_at_once() -> None:
    with pytest.raises(PlanError) as refused:
        plan(feed_forward(device_memory="3500Mi", memory="16Gi"), mixture())
    own, theirs = refused.value.message.splitlines()
    assert "of memory is missing on its rank" in own
    lacks = "the feed-forward rank with the largest share lacks 12.39 GiB of memory"
    assert theirs.startswith(f"role gpu: {lacks}")
    assert refused.value.reason == "InsufficientMemory"


def test_memory_besides_weights_is_for_the_longest_batch() -> None:
    model = mixture()
    many = replace(model, kinds=tuple(replace(kind, experts_per_token=64) for kind in model.kinds))
    # 27 GiB of weights and 1 of the process. 2,048 rows of 8 or 64 experts take 8 bytes for each of 2,048
    # elements and 12 for each of 768 columns.
    for each, need in ((model, r"28\.39"), (many, r"31\.12")):
        with pytest.raises(PlanError, match=rf"needs {need} GiB"):
            plan(feed_forward(memory="16Gi", own={"layers": 24}), each)


def test_a_cpu_limit_means_that_threads_sleep() -> None:
    limits = {"limits": {"cpu": "2", "memory": "8Gi"}}
    assert any("CPU limit" in note for note in plan(feed_forward(resources=limits), mixture()).notes)


def test_the_printed_step_time_for_several_requests_includes_feed_forward_ranks() -> None:
    planned = plan(feed_forward(own={"layers": 24}), mixture())
    assert planned.remote is not None
    load = StepLoad(requests=8, context=1024)
    on_cpus = seconds(planned, load)
    words = "\n".join(text for _, text in describe_times(planned))
    found = re.search(r"([0-9.]+) ms .* for 8 requests of 1,024 tokens", words)
    assert found is not None, words
    assert float(found[1]) / 1e3 > on_cpus > 0


def test_the_kv_cache_follows_from_the_gpu_and_not_from_ranks_without_a_cache() -> None:
    planned = plan(feed_forward(own={"layers": 12}), mixture())
    kv = planned.sizes.kv
    blocks = planned.plan.ranks[0].kv_cache_bytes // kv.block_bytes(0, 24)
    assert blocks > kv.sequence_blocks
    found = dict(describe_kv_cache(planned, Figures.of(planned)))
    assert found["size"].startswith(f"{blocks:,} blocks of {kv.block_tokens} tokens on every rank")
    one = format_bytes(kv.block_bytes(0, 24) * kv.sequence_blocks)
    assert found["requests"].endswith(f" tokens takes {one} over all ranks")
    assert any(line.startswith("save memory: ") for line in describe_choices(planned))
    of_gpu, of_cpu = describe_memory(planned)
    assert of_gpu.startswith("stage 0, role gpu: 24 layers ")
    theirs = format_bytes(planned.plan.ranks[1].weight_bytes)
    assert planned.remote is not None
    extra = format_bytes(peak_extra_bytes(planned.remote, planned.plan.engine, (0,)))
    words = f"feed-forward rank of role gpu: {theirs} of weights, and up to {extra} more for the process and "
    assert of_cpu.startswith(words)
    text = describe_plan(planned, "moe", ShownParts(explain=True))
    assert "role gpu, feed-forward: default rates for CPUs" in text
    assert text.startswith(f"moe fits: 1 pod (1 GPU, {len(planned.plan.ranks)} ranks), mode FeedForward\n")
    assert "Limit: rank 1 (role gpu, feed-forward), " in text


def test_windows_keep_the_blocks_of_the_step_that_is_scheduled_ahead() -> None:
    layer = MOE
    windows = replace(layer, attention=AttentionKind.WINDOW, window=512)
    model = replace(mixture(), kinds=(layer, windows), kind_of_layer=(1,) * 24)
    asked = feed_forward()
    planned = plan(asked.model_copy(update={"engine": EngineSpec(max_model_len=8192)}), model)
    engine = planned.plan.engine
    assert planned.plan.schedules_ahead
    assert planned.plan.batches_at_once == 2
    one = build_kv_cache(model, engine, ranks_of_stage=1, batches_at_once=1).sequence_blocks
    more = engine.max_num_batched_tokens // engine.block_size
    assert planned.sizes.kv.sequence_blocks == one + more
    assert plan(spec(gpu()), model).plan.batches_at_once == 1
    assert plan(spec(gpu(layers=[20]), cpu(layers=[4])), model).plan.batches_at_once == 2


def on_cpus(name: str, inventory: Inventory | None = None, **engine: Any) -> str:
    """Returns why feed-forward ranks beside a big GPU cannot have one layer's part of a published model."""
    role = gpu(feedForward={"cpu": "14", "memory": "64Gi", "layers": 1}, deviceMemory="2Ti")
    parsed = spec(role, parallelism={"mode": "FeedForward"}, engine={"maxModelLen": 4096, **engine})
    with pytest.raises(PlanError) as caught:
        plan(parsed, recorded_profiles()[name], inventory)
    return caught.value.message


def test_refuses_a_type_that_vllm_refuses_for_the_format() -> None:
    assert "Set engine.dtype: bfloat16" in on_cpus("Qwen3-235B-A22B-FP8", dtype="float32")


def test_without_graphs_a_mixture_takes_at_least_its_kernel_launches() -> None:
    known = Inventory(gpu_product={"gpu": "NVIDIA-H200"})
    later = []
    for model in (mixture(), profile()):
        planned = plan(spec(gpu(deviceMemory="140Gi")), model, known)
        captured = 2 * planned.plan.engine.max_num_seqs
        within, beyond = (
            forecast_first_token(planned.plan, planned.sizes, planned.rates, tokens).step_s
            for tokens in (captured, captured + 1)
        )
        later.append(beyond - within)
    assert later[0] > 0.5 * 24 * MIXTURE_LAUNCH_S
    assert later[1] < 1e-3


def test_the_prediction_includes_sending_rows_to_feed_forward_ranks() -> None:
    planned = plan(feed_forward(own={"layers": 4}, device_memory="140Gi"), mixture())
    remote, engine = planned.remote, planned.plan.engine
    assert remote is not None
    fast = replace(planned.rates[-1], plain=1e18, quantized=1e18, experts=1e18, operations=1e30)
    fast = replace(fast, plain_kernel=None, quantized_kernel=None, experts_kernel=None)
    one, many = (
        max(feed_forward_seconds(remote, engine, [fast], StepLoad(tokens=tokens))) for tokens in (1, 1025)
    )
    assert one == pytest.approx(4 * fast.exchange_s, rel=0.05)
    assert many - one == pytest.approx(4 * 1024 * 2 * 2048 * 2 / EXCHANGE_BYTES_PER_S, rel=0.01)
