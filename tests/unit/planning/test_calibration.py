"""Plans with the calibration of their machines."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.calibration import Calibration, GpuRate, Hardware, KernelPart
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model import SchemeName
from heteroinfer_operator.errors import PlanError, Shortage
from heteroinfer_operator.nodes.calibrations import (
    Calibrations,
    MeasuredKind,
    describe_calibration,
    read_stored_calibrations,
    slowest,
)
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.planning import (
    Capacity,
    GroupRequest,
    Inventory,
    build_free_nodes,
    plan_group,
    rates,
)
from heteroinfer_operator.planning.predicted_plan import predict_again
from heteroinfer_operator.planning.prediction import StepLoad, count_reads
from heteroinfer_operator.vllm_support.cpu_kernels import CODED_BITS
from tests.shapes.profiles import recorded_profiles
from tests.unit.calibrated import CALIBRATION, CPU, calibration, kernel
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec
from vllm_heteroinfer.calibration.formats import FORMATS

MEASURED = Inventory(calibration={"cpu": CALIBRATION, "gpu": CALIBRATION})


def rank_s(role: dict[str, Any], inventory: Inventory, **engine: Any) -> float:
    parsed = spec(role, engine=engine)
    return plan(parsed, profile(other_bytes=0), inventory).plan.ranks[0].predicted_step_s


def test_all_formats_that_cpus_may_run_are_measured_and_no_other() -> None:
    assert set(FORMATS) == {SchemeName.NONE, *CODED_BITS}


def test_uses_measured_rates_and_scales_them_with_threads() -> None:
    whole = rank_s(cpu(), MEASURED)
    # Of eight CPUs the leader's pod keeps two for the engine.
    assert rank_s(cpu(resources={"limits": {"cpu": "8"}}), MEASURED) == pytest.approx(whole * 16 / 6)
    slower = calibration(
        kernels=tuple(replace(k, bytes_per_s=k.bytes_per_s / 2) for k in CALIBRATION.kernels)
    )
    assert rank_s(cpu(), Inventory(calibration={"cpu": slower})) == pytest.approx(2 * whole)


def test_many_rows_take_the_measured_time_of_their_kernel() -> None:
    linear = kernel(KernelPart.LINEAR, SchemeName.NONE, 160)
    measured = calibration(kernels=(replace(linear, more_rows=(160e9, 160e9, 80e9, 20e9)),))
    planned = plan(spec(cpu()), profile(other_bytes=0), Inventory(calibration={"cpu": measured}))
    (rates,), engine = planned.rates, planned.plan.engine

    def seconds(load: StepLoad) -> float:
        return count_reads(planned.sizes, 0, 32, load, has_head=False, engine=engine).seconds(rates)

    one = seconds(StepLoad())
    assert seconds(StepLoad(requests=16)) == pytest.approx(one)
    assert seconds(StepLoad(requests=64)) == pytest.approx(2 * one)
    assert seconds(StepLoad(tokens=512)) == pytest.approx(8 * one)
    assert seconds(StepLoad(tokens=2048)) == pytest.approx(32 * one)
    # The head computes one row of a prompt.
    first = count_reads(planned.sizes, 0, 32, StepLoad(tokens=512), has_head=True, engine=engine).seconds(
        rates
    )
    assert first - seconds(StepLoad(tokens=512)) == pytest.approx(planned.sizes.head_bytes / rates.plain)


def test_each_type_has_the_kernel_that_was_measured_for_it() -> None:
    # Twice the bytes at a quarter of the rate.
    assert rank_s(cpu(), MEASURED, dtype="float32") == pytest.approx(8 * rank_s(cpu(), MEASURED))


def test_a_format_without_a_measurement_has_a_default_share_of_the_measured_rate() -> None:
    bare = replace(CALIBRATION, kernels=())
    assert rank_s(cpu(), Inventory(calibration={"cpu": bare})) == pytest.approx(rank_s(cpu(), MEASURED))


def test_gpu_rates_come_from_the_calibration_if_it_measured_the_gpu() -> None:
    assert rank_s(gpu(), MEASURED) == rank_s(gpu(), Inventory())
    measured = calibration(gpu=GpuRate(bytes_per_s=35e9, operations_per_s=1e15))
    slow = rank_s(gpu(), Inventory(calibration={"gpu": measured}))
    assert slow == pytest.approx(100 * rank_s(gpu(), Inventory()))


def test_names_the_source_of_rates() -> None:
    planned = plan(spec(gpu(layers=[30]), cpu(layers=[2])), inventory=MEASURED)
    assert CALIBRATION.hash in planned.rates[0].source
    assert CPU in planned.rates[0].source
    assert "0.1.0" in describe_calibration(CALIBRATION)
    assert "default rates" in plan(spec(cpu())).rates[0].source


def test_a_placed_group_is_planned_by_the_calibration_of_the_only_machine() -> None:
    parsed = spec(cpu(resources={"requests": {"cpu": "16", "memory": "64Gi"}}))
    request = GroupRequest(spec=parsed, profile=profile(), served_name="m", model_path="/model")
    allocatable = {"cpu": 64.0, "memory": 512.0 * 2**30, "pods": 110.0}
    free_nodes = build_free_nodes([NodeView(name="here", allocatable=allocatable, labels=IMAGE_PLATFORM)])
    for machine, words in ((CALIBRATION, CALIBRATION.hash), (None, "default rates")):
        calibrations = Calibrations(this_machine=machine)
        planned = plan_group(request, Capacity(free_nodes=free_nodes, calibrations=calibrations))
        assert words in planned.rates[0].source


KIND = "node.kubernetes.io/instance-type"
PRODUCT = "nvidia.com/gpu.product"


def of_kinds(**measured: Calibration) -> Calibrations:
    kinds = (MeasuredKind(name=name, selector={KIND: name}, calibration=c) for name, c in measured.items())
    return Calibrations(kinds=tuple(kinds))


def test_a_role_has_the_calibration_of_its_nodes_only_if_all_were_measured() -> None:
    slow = calibration(readings=CALIBRATION.readings[:1])
    both = of_kinds(fast=CALIBRATION, slow=slow)
    fast_node, slow_node, new_node = ({KIND: name, "zone": "a"} for name in ("fast", "slow", "new"))
    assert both.of_nodes([fast_node, fast_node]) == (CALIBRATION,)
    assert both.of_nodes([fast_node, slow_node]) == (CALIBRATION, slow)
    assert slowest(both.of_nodes([fast_node, slow_node]), by_gpu=False) == slow
    assert both.of_nodes([fast_node, new_node]) == both.of_nodes([]) == ()
    assert slowest((), by_gpu=False) is None
    # Both kinds have the same labels: the node may be either.
    same = Calibrations(kinds=tuple(replace(kind, selector={"zone": "a"}) for kind in both.kinds))
    assert same.of_nodes([new_node]) == (CALIBRATION, slow)


def test_ranks_on_gpus_use_the_slowest_measured_gpu() -> None:
    quick, slow = (calibration(gpu=GpuRate(bytes_per_s=n * 1e9, operations_per_s=1e15)) for n in (4000, 2000))
    slow = replace(slow, readings=tuple(replace(r, bytes_per_s=9 * r.bytes_per_s) for r in slow.readings))
    assert slowest((quick, slow), by_gpu=True) == slow
    assert slowest((quick, slow), by_gpu=False) == quick
    assert slowest((quick, slow, CALIBRATION), by_gpu=True) == CALIBRATION
    assert "default rates for NVIDIA-H200" in rates.gpu_rates("NVIDIA-H200", CALIBRATION).source


@pytest.mark.parametrize(
    ("product", "is_measured"),
    [
        ("NVIDIA-H200", True),
        ("NVIDIA-H200-SHARED", True),
        ("", True),
        ("NVIDIA-H100-80GB-HBM3", False),
        ("NVIDIA-H200-MIG-1g.18gb", False),
    ],
)
def test_a_node_with_another_gpu_does_not_match_a_measured_kind(product: str, is_measured: bool) -> None:
    hardware = replace(CALIBRATION.hardware, gpu="NVIDIA H200")
    measured = of_kinds(big=calibration(hardware=hardware))
    labels = {KIND: "big", **({PRODUCT: product} if product else {})}
    assert bool(measured.of_nodes([labels])) is is_measured
    assert of_kinds(big=CALIBRATION).of_nodes([labels]), "its CPUs were measured, and no GPU"


def test_a_group_is_planned_by_the_calibration_of_the_nodes_that_it_gets() -> None:
    parsed = spec(cpu(resources={"requests": {"cpu": "16", "memory": "64Gi"}}))
    request = GroupRequest(spec=parsed, profile=profile(), served_name="m", model_path="/model")
    allocatable = {"cpu": 64.0, "memory": 512.0 * 2**30, "pods": 110.0}
    for kind, words in (("fast", CALIBRATION.hash), ("new", "default rates")):
        free_nodes = build_free_nodes(
            [NodeView(name="n", allocatable=allocatable, labels={**IMAGE_PLATFORM, KIND: kind})]
        )
        capacity = Capacity(free_nodes=free_nodes, calibrations=of_kinds(fast=CALIBRATION))
        assert words in plan_group(request, capacity).rates[0].source


def test_plans_only_features_that_all_nodes_of_a_role_have() -> None:
    request = GroupRequest(
        spec=spec(cpu(memory="900Gi", pods=2)),
        profile=recorded_profiles()["DeepSeek-V3"],
        served_name="m",
        model_path="/model",
    )
    plain = replace(CALIBRATION.hardware, instruction_sets=("avx512f",))
    fast = tuple(replace(each, bytes_per_s=9 * each.bytes_per_s) for each in CALIBRATION.readings)
    # The slower one, by which is predicted, has AMX; the other has not.
    measured = of_kinds(amx=CALIBRATION, plain=calibration(hardware=plain, readings=fast))
    allocatable = {"cpu": 64.0, "memory": 2.0**40, "pods": 110.0}

    def planned(*kinds: str) -> tuple[str, ...]:
        nodes = [
            NodeView(name=f"n{i}", allocatable=allocatable, labels={**IMAGE_PLATFORM, KIND: k})
            for i, k in enumerate(kinds)
        ]
        return plan_group(request, Capacity(free_nodes=build_free_nodes(nodes), calibrations=measured)).notes

    assert not any("AMX" in note for note in planned("amx", "amx"))
    assert any("do not show whether" in note for note in planned("amx", "new"))
    with pytest.raises(PlanError, match="the role's nodes do not have it"):
        planned("amx", "plain")


def test_predicts_missing_gpus_by_the_calibration_of_existing_nodes() -> None:
    role = gpu(resources={"requests": {"cpu": "16", "memory": "64Gi"}})
    request = GroupRequest(spec=spec(role), profile=profile(), served_name="m", model_path="/model")
    allocatable = {"cpu": 64.0, "memory": 512.0 * 2**30, "pods": 110.0}
    nodes = build_free_nodes(
        [NodeView(name="n", allocatable=allocatable, labels={**IMAGE_PLATFORM, KIND: "slow"})]
    )
    tenth = {
        name: tuple(replace(each, bytes_per_s=each.bytes_per_s / 10) for each in getattr(CALIBRATION, name))
        for name in ("readings", "kernels")
    }

    def said(calibrations: Calibrations) -> str:
        with pytest.raises(Shortage) as caught:
            plan_group(request, Capacity(free_nodes=nodes, calibrations=calibrations))
        return caught.value.message.partition("expected step time on CPUs: ")[2].partition(" ms")[0]

    measured = of_kinds(slow=calibration(**tenth))
    assert float(said(measured)) > 5 * float(said(of_kinds(slow=CALIBRATION)))
    assert said(Calibrations()) not in ("", said(measured))


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each number of a JSON value."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(item, (*path, name))
    elif isinstance(value, int | float):
        yield path


EXTREMES = (1e-300, 1, 1e18, 2**53)


def test_any_number_in_a_calibration_is_refused_or_predicts_a_time() -> None:
    first = {name: getattr(CALIBRATION, name)[:1] for name in ("readings", "kernels", "hops")}
    text = calibration(**first, gpu=GpuRate(bytes_per_s=4e12, operations_per_s=1e15)).to_json()
    taken = 0
    for path in numbers(json.loads(text)):
        for extreme in EXTREMES:
            changed = at = json.loads(text)
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = extreme
            try:
                found = Calibration.from_json(json.dumps(changed))
            except ContractError:
                continue
            taken += 1
            assert describe_calibration(found)
            for role in (cpu(), gpu()):
                assert math.isfinite(rank_s(role, Inventory(calibration={"cpu": found, "gpu": found}))), path
    assert taken > 20


def test_reads_stored_calibrations_and_reports_damaged_entries() -> None:
    kind = MeasuredKind(name="m7i", selector={KIND: "m7i.metal"}, calibration=CALIBRATION)
    entry = kind.to_entry()
    version = CALIBRATION.versions.heteroinfer
    assert read_stored_calibrations(entry, version) == (Calibrations(kinds=(kind,)), ())
    found, (problem,) = read_stored_calibrations(entry, "9.9.9")
    assert found == Calibrations()
    why = (
        f"ignored, because HeteroInfer {version} measured these rates and the operator has version 9.9.9. "
        "Plans use default rates until the calibration Job of version 9.9.9 has measured these nodes again"
    )
    fix = (
        "If this Job does not exist, upgrade the Helm release to chart 9.9.9. If the Job failed, read its log"
    )
    assert problem == f"m7i.json: {why}. {fix}"
    # Another version may have written what this one cannot read.
    other = {"m7i.json": entry["m7i.json"].replace('"cores":', '"cores_of_then":').replace(version, "0.0.9")}
    assert (
        "HeteroInfer 0.0.9 measured these rates and the operator has"
        in read_stored_calibrations(other, version)[1][0]
    )
    text = entry["m7i.json"]
    bad = {
        "a.json": "{",
        "b.json": "[]",
        "c.json": '{"nodeSelector": {}, "calibration": {}}',
        "d.json": text.replace('"cores": 16', '"cores": 0'),
        "E_.json": text,
    }
    found, problems = read_stored_calibrations({**entry, **bad}, version)
    assert found == Calibrations(kinds=(kind,))
    assert [problem.partition(":")[0] for problem in problems] == sorted(bad)
    assert all(
        "Plans use default rates for these nodes. Remove this entry from the ConfigMap" in problem
        for problem in problems
    )


def test_a_calibration_decides_about_amx_without_labels() -> None:
    hardware = Hardware(cpu=CPU, instruction_sets=("avx512f",), cpus=16, cores=16)
    parsed = spec(cpu())
    request = GroupRequest(spec=parsed, profile=profile(), served_name="m", model_path="/model")
    for machine, has in ((CALIBRATION, True), (calibration(hardware=hardware), False)):
        assert machine.has_amx is has
        plan_group(request, Capacity(calibrations=Calibrations(this_machine=machine)))


def test_an_existing_plan_gets_the_predictions_of_a_new_plan() -> None:
    parsed = spec(gpu(layers=[30]), cpu(layers=[2]))
    old, new = plan(parsed), plan(parsed, inventory=MEASURED)
    again = predict_again(old.plan, parsed, profile(), MEASURED)
    assert again is not None
    assert again.plan == replace(new.plan, engine=old.plan.engine), "its arguments are its own"
    assert CALIBRATION.hash in str(again)
    assert predict_again(old.plan, spec(cpu()), profile(), MEASURED) is None


def test_names_of_formats_are_those_of_the_contract() -> None:
    assert all(isinstance(name, SchemeName) for name in FORMATS)
