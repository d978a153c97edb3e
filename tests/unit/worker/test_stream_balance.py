"""The number of experts that the GPU computes, and the measurements behind it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.gpu_experts import LEAST_GAIN
from vllm_heteroinfer.feed_forward.stream_balance import (
    LONGEST_S,
    Balance,
    Gaps,
    LayerTimes,
    Measured,
    first_of_each_kind,
    measure,
    rows_to_measure,
)

SECONDS = st.floats(1e-5, 10.0)
EXPERTS = 120


def measured(
    rows: int, cpu_s: float, copy_s: float, exchange_s: float = 0.0, experts: int = EXPERTS
) -> Measured:
    return Measured(
        rows=rows,
        experts=experts,
        cpus_alone_s=cpu_s + exchange_s,
        exchange_s=exchange_s,
        gpu_alone_s=copy_s,
        cpu_s=cpu_s,
        copy_s=copy_s,
        compute_s=copy_s / 10,
    )


def test_gpu_and_cpus_finish_a_layer_at_the_same_time() -> None:
    assert measured(512, 0.03, 0.01).gpu_experts(0.0, EXPERTS) == 90  # 90 / 120 * 10 ms, and 30 / 120 * 30 ms


def test_the_gpu_also_copies_during_the_exchange() -> None:
    number = measured(512, 0.03, 0.02, exchange_s=0.005).gpu_experts(0.0, EXPERTS)
    assert number / EXPERTS * 0.02 == pytest.approx(0.005 + (1 - number / EXPERTS) * 0.03, abs=5e-4)


def test_the_gpu_also_copies_in_gaps_if_the_ring_has_room() -> None:
    times = measured(512, 0.03, 0.02)
    numbers = [times.gpu_experts(0.005, ahead) for ahead in (0, 30, EXPERTS)]
    assert numbers == sorted(numbers)
    assert numbers[0] == times.gpu_experts(0.0, EXPERTS) < numbers[-1]


def test_the_gpu_takes_all_experts_if_it_is_about_as_fast_alone() -> None:
    """Without CPUs, the GPU does not wait for answers, so the time of a layer varies less."""
    times = measured(8192, 1.0, 0.022)
    assert times.period_s(119, 0.0, EXPERTS) < times.period_s(EXPERTS, 0.0, EXPERTS)
    assert times.gpu_experts(0.0, EXPERTS) == EXPERTS


def test_cpus_compute_all_experts_for_fewer_rows_than_measured() -> None:
    balance = Balance([measured(64, 0.01, 0.01), measured(128, 0.02, 0.01)])
    assert balance.gpu_experts(63, 0.0, EXPERTS) == 0
    assert balance.gpu_experts(64, 0.0, EXPERTS) == 60
    assert balance.gpu_experts(96, 0.0, EXPERTS) == 72
    assert balance.gpu_experts(128, 0.0, EXPERTS) == 80


def test_more_rows_than_measured_need_more_time_except_for_copies() -> None:
    balance = Balance([measured(64, 0.01, 0.01)])
    assert balance.gpu_experts(192, 0.0, EXPERTS) == measured(192, 0.03, 0.01).gpu_experts(0.0, EXPERTS)


def test_finds_the_fewest_rows_with_which_the_gpu_computes_experts() -> None:
    balance = Balance([measured(64, 0.001, 1.0), measured(128, 0.02, 0.01)])
    first = balance.min_gpu_rows(EXPERTS, 256)
    assert 64 < first < 128
    assert balance.gpu_experts(first - 1, 0.0, EXPERTS) == 0 < balance.gpu_experts(first, 0.0, EXPERTS)
    assert Balance([measured(64, 0.001, 10.0)]).min_gpu_rows(EXPERTS, 256) == 0


def test_cpus_compute_all_experts_if_the_gpu_does_not_help() -> None:
    balance = Balance([measured(64, 0.001, 1.0), measured(128, 0.02, 0.01)])
    assert balance.gpu_experts(64, 0.0, EXPERTS) == 0
    assert balance.gpu_experts(128, 0.0, EXPERTS) > 0


@given(
    times=st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    gap_s=SECONDS,
    experts=st.integers(2, 256),
    data=st.data(),
)
def test_the_chosen_number_of_experts_is_nearly_the_fastest(
    times: tuple[float, ...], gap_s: float, experts: int, data: st.DataObject
) -> None:
    ahead = data.draw(st.integers(0, experts))
    names = ("cpus_alone_s", "exchange_s", "gpu_alone_s", "cpu_s", "copy_s", "compute_s")
    point = Measured(rows=64, experts=experts, **dict(zip(names, times, strict=True)))
    number = point.gpu_experts(gap_s, ahead)
    fastest_s = min(point.period_s(each, gap_s, ahead) for each in range(experts + 1))
    assert point.period_s(number, gap_s, ahead) <= fastest_s / LEAST_GAIN**2 * (1 + 1e-9)


@given(cpu_s=st.floats(1e-6, 1e-3), gpu_s=st.floats(1e-4, 1e-1), experts=st.integers(2, 256))
def test_measurements_find_the_rates_with_any_number_of_experts(
    cpu_s: float, gpu_s: float, experts: int
) -> None:
    """The simulated host has constant rates."""

    def run(rows: int, number: int) -> LayerTimes:
        assert 0 <= number <= experts
        cpus, gpu = rows * cpu_s * (experts - number) / experts, gpu_s * number / experts
        return LayerTimes(period_s=max(cpus, gpu), cpu_s=cpus, copy_s=gpu, compute_s=gpu / 4)

    for point in measure(run, [64, 128], experts):
        assert point.cpu_s == pytest.approx(point.rows * cpu_s)
        assert (point.copy_s, point.gpu_alone_s, point.compute_s) == pytest.approx((gpu_s, gpu_s, gpu_s / 4))
        assert point.exchange_s == pytest.approx(0.0, abs=1e-9)


def test_does_not_count_the_first_run_of_gpu_and_cpus_together() -> None:
    used: list[int] = []

    def run(rows: int, number: int) -> LayerTimes:
        first = 0 < number < 128 and not used
        used.extend([number] if 0 < number < 128 else [])
        cpus, gpu = 0.012 * (128 - number) / 128, 0.022 * number / 128
        compute_s = 0.037 if first else 0.001 * number / 128
        return LayerTimes(period_s=max(cpus, gpu, compute_s), cpu_s=cpus, copy_s=gpu, compute_s=compute_s)

    (point,) = measure(run, [128], 128)
    assert point.compute_s == pytest.approx(0.001)
    assert 40 < point.gpu_experts(0.0, 128) < 50


def test_stops_measuring_when_cpus_take_long() -> None:
    runs: list[tuple[int, int]] = []

    def run(rows: int, number: int) -> LayerTimes:
        runs.append((rows, number))
        cpu_s = rows / 128 * LONGEST_S * 1.1 * (16 - number) / 16
        return LayerTimes(period_s=cpu_s, cpu_s=cpu_s, copy_s=0.01 * number, compute_s=0.001 * number)

    assert [each.rows for each in measure(run, [64, 128, 256], 16)] == [64, 128]
    assert runs.count((128, 0)) == 1


def test_measured_numbers_of_rows_are_above_captured_graphs() -> None:
    assert list(rows_to_measure(64, 1000)) == [65, 128, 256, 512, 1000]
    assert list(rows_to_measure(0, 200)) == [64, 128, 200]
    assert list(rows_to_measure(0, 64)) == [64]
    assert list(rows_to_measure(0, 16)) == [16]


def test_uses_the_gap_of_fewer_rows_for_more_rows_but_not_the_reverse() -> None:
    gaps = Gaps()
    assert gaps.gap_s(512) == 0.0
    gaps.note(512, 0.001)
    assert gaps.gap_s(256) == 0.0
    assert gaps.gap_s(700) == gaps.gap_s(8192) == 0.001
    gaps.note(8192, 0.003)
    gaps.note(8192, 0.004)
    assert gaps.gap_s(8192) == pytest.approx(0.00325)
    assert gaps.gap_s(4095) == 0.001


def test_returns_the_first_number_of_each_kind() -> None:
    assert first_of_each_kind(lambda number: number // 10, range(8, 35, 3)) == [8, 11, 20, 32]


def test_times_between_two_measurements_lie_between_them() -> None:
    low, high = measured(64, 0.01, 0.01), measured(128, 0.03, 0.01)
    assert low.interpolate(high, 96) == replace(low, rows=96, cpu_s=0.02, cpus_alone_s=0.02)
