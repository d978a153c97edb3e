"""Plans by what was measured of their machines."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.calibration import GpuRate, Hardware, KernelPart
from heteroinfer_contract.model import SchemeName
from heteroinfer_operator.calibrations import Calibrations, describe
from heteroinfer_operator.cluster import NodeView
from heteroinfer_operator.planning import Capacity, GroupRequest, Inventory, build_free_nodes, plan_group
from heteroinfer_operator.planning import support as supported
from heteroinfer_operator.planning.prediction import Load, count_reads
from heteroinfer_operator.planning.prediction_again import predict_again
from tests.unit.calibrated import CALIBRATION, CPU, calibration, kernel
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec
from vllm_heteroinfer.calibration.formats import FORMATS

MEASURED = Inventory(calibration={"cpu": CALIBRATION, "gpu": CALIBRATION})


def rank_s(role: dict[str, Any], inventory: Inventory, **engine: Any) -> float:
    parsed = spec(role, engine=engine)
    return plan(parsed, profile(other_bytes=0), inventory).plan.ranks[0].predicted_step_s


def test_all_formats_that_cpus_may_run_are_measured_and_no_other() -> None:
    assert {name for name, each in FORMATS.items() if each.linear} == set(supported.CPU_LINEAR)
    assert {name for name, each in FORMATS.items() if each.experts} == set(supported.CPU_EXPERTS)


def test_a_measured_machine_is_as_fast_as_it_was_and_fewer_threads_in_proportion() -> None:
    whole = rank_s(cpu(), MEASURED)
    # Of eight CPUs the leader's pod keeps two for the engine.
    assert rank_s(cpu(resources={"limits": {"cpu": "8"}}), MEASURED) == pytest.approx(whole * 16 / 6)
    slower = calibration(
        kernels=tuple(replace(k, bytes_per_s=k.bytes_per_s / 2) for k in CALIBRATION.kernels)
    )
    assert rank_s(cpu(), Inventory(calibration={"cpu": slower})) == pytest.approx(2 * whole)


def test_many_rows_take_as_long_as_their_kernel_took() -> None:
    linear = kernel(KernelPart.LINEAR, SchemeName.NONE, 160)
    measured = calibration(kernels=(replace(linear, more_rows=(160e9, 80e9, 20e9)),))
    planned = plan(spec(cpu()), profile(other_bytes=0), Inventory(calibration={"cpu": measured}))
    (rates,), engine = planned.rates, planned.plan.engine

    def seconds(load: Load) -> float:
        return count_reads(planned.sizes, 0, 32, load, last=False, engine=engine).seconds(rates)

    one = seconds(Load())
    assert seconds(Load(requests=16)) == pytest.approx(one)
    assert seconds(Load(requests=64)) == pytest.approx(2 * one)
    assert seconds(Load(tokens=512)) == pytest.approx(8 * one)
    assert seconds(Load(tokens=2048)) == pytest.approx(32 * one)
    # The head computes one row of a prompt.
    first = count_reads(planned.sizes, 0, 32, Load(tokens=512), last=True, engine=engine).seconds(rates)
    assert first - seconds(Load(tokens=512)) == pytest.approx(planned.sizes.head_bytes / rates.plain)


def test_each_type_has_the_kernel_that_was_measured_for_it() -> None:
    # Twice the bytes at a quarter of the rate.
    assert rank_s(cpu(), MEASURED, dtype="float32") == pytest.approx(8 * rank_s(cpu(), MEASURED))


def test_a_format_that_was_not_measured_has_its_default_part_of_what_was() -> None:
    bare = replace(CALIBRATION, kernels=())
    assert rank_s(cpu(), Inventory(calibration={"cpu": bare})) == pytest.approx(rank_s(cpu(), MEASURED))


def test_a_gpu_is_taken_from_the_calibration_if_it_was_there() -> None:
    assert rank_s(gpu(), MEASURED) == rank_s(gpu(), Inventory())
    measured = calibration(gpu=GpuRate(bytes_per_s=35e9, operations_per_s=1e15))
    slow = rank_s(gpu(), Inventory(calibration={"gpu": measured}))
    assert slow == pytest.approx(100 * rank_s(gpu(), Inventory()))


def test_what_rates_were_taken_from_is_said() -> None:
    planned = plan(spec(gpu(layers=[30]), cpu(layers=[2])), inventory=MEASURED)
    assert CALIBRATION.hash in planned.rates[0].source
    assert CPU in planned.rates[0].source
    assert "0.1.0" in describe(CALIBRATION)
    assert "defaults" in plan(spec(cpu())).rates[0].source


def test_a_group_that_is_placed_is_planned_by_the_only_machine_there_is() -> None:
    parsed = spec(cpu(resources={"requests": {"cpu": "16", "memory": "64Gi"}}))
    request = GroupRequest(spec=parsed, profile=profile(), served_name="m", model_path="/model")
    allocatable = {"cpu": 64.0, "memory": 512.0 * 2**30, "pods": 110.0}
    free_nodes = build_free_nodes([NodeView(name="here", allocatable=allocatable)])
    for machine, words in ((CALIBRATION, CALIBRATION.hash), (None, "defaults")):
        calibrations = Calibrations(this_machine=machine)
        planned = plan_group(request, Capacity(free_nodes=free_nodes, calibrations=calibrations))
        assert words in planned.rates[0].source


def test_a_calibration_says_whether_there_is_amx_where_labels_do_not() -> None:
    hardware = Hardware(cpu=CPU, instruction_sets=("avx512f",), cpus=16, cores=16)
    parsed = spec(cpu())
    request = GroupRequest(spec=parsed, profile=profile(), served_name="m", model_path="/model")
    for machine, has in ((CALIBRATION, True), (calibration(hardware=hardware), False)):
        assert machine.has_amx is has
        plan_group(request, Capacity(calibrations=Calibrations(this_machine=machine)))


def test_a_plan_that_there_is_gets_the_predictions_of_a_new_one() -> None:
    parsed = spec(gpu(layers=[30]), cpu(layers=[2]))
    old, new = plan(parsed), plan(parsed, inventory=MEASURED)
    again = predict_again(old.plan, parsed, profile(), MEASURED)
    assert again is not None
    assert again.plan == new.plan
    assert CALIBRATION.hash in str(again)
    assert predict_again(old.plan, spec(cpu()), profile(), MEASURED) is None


def test_names_of_formats_are_those_of_the_contract() -> None:
    assert all(isinstance(name, SchemeName) for name in FORMATS)
