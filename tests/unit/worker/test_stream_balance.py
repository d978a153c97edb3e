"""The GPU's part of the experts, and its measurement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_heteroinfer.feed_forward.stream_balance import LEAST_GAIN, Balance, LayerTimes, Measured, measure

SECONDS = st.floats(1e-5, 10.0)
EXPERTS = 120


def measured(
    rows: int, cpu_s: float, gpu_s: float, exchange_s: float = 0.0, experts: int = EXPERTS
) -> Measured:
    return Measured(
        rows=rows,
        experts=experts,
        cpu_alone_s=cpu_s + exchange_s,
        exchange_s=exchange_s,
        gpu_alone_s=gpu_s,
        cpu_s=cpu_s,
        gpu_s=gpu_s,
    )


def test_both_sides_end_at_the_same_time() -> None:
    part = Balance([measured(512, 0.03, 0.01)]).gpu_part(512)
    assert part * 0.01 == pytest.approx((1 - part) * 0.03)


def test_the_gpu_copies_during_the_exchange_too() -> None:
    part = Balance([measured(512, 0.03, 0.02, exchange_s=0.0025)]).gpu_part(512)
    assert part * 0.02 == pytest.approx(0.0025 + (1 - part) * 0.03)


def test_the_gpu_takes_all_experts_if_it_is_faster_alone() -> None:
    assert Balance([measured(512, 0.03, 0.001, exchange_s=0.01)]).gpu_part(512) == 1.0


def test_fewer_rows_than_measured_are_left_to_the_cpus() -> None:
    balance = Balance([measured(64, 0.01, 0.01), measured(128, 0.02, 0.01)])
    assert balance.gpu_part(63) == 0.0
    assert balance.gpu_part(64) == 0.5
    assert balance.gpu_part(96) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert balance.gpu_part(4096) == pytest.approx(2 / 3)


def test_a_size_at_which_the_gpu_does_not_help_is_left_to_the_cpus() -> None:
    balance = Balance([measured(64, 0.001, 1.0), measured(128, 0.02, 0.01)])
    assert balance.gpu_part(64) == balance.gpu_part(100) == 0.0
    assert balance.gpu_part(128) > 0
    assert balance.first_rows == 128
    assert Balance([measured(64, 0.001, 1.0)]).first_rows is None


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6), st.integers(2, 256))
def test_a_part_is_used_only_if_it_is_faster(times: list[tuple[float, float, float]], experts: int) -> None:
    points = [measured(64 << index, *each, experts=experts) for index, each in enumerate(times)]
    for point in points:
        part = Balance(points).gpu_part(point.rows)
        assert 0 <= part <= 1
        assert part * experts == pytest.approx(round(part * experts))
        if part:
            cpus_s = point.exchange_s + (1 - part) * point.cpu_s if part < 1 else 0.0
            assert max(part * point.gpu_s, cpus_s) <= LEAST_GAIN * point.cpu_alone_s * (1 + 1e-9)


@given(cpu_s=SECONDS, gpu_s=SECONDS, experts=st.integers(2, 256), compiling_s=st.floats(0.0, 5.0))
def test_measurements_find_the_rates_with_any_number_of_experts(
    cpu_s: float, gpu_s: float, experts: int, compiling_s: float
) -> None:
    """Of a host with constant rates, on which the first run with a number of rows also compiles."""
    compiled: set[int] = set()

    def run(rows: int, number: int) -> LayerTimes:
        assert 0 <= number <= experts
        compiles_s = 0.0 if rows in compiled or not number else compiling_s
        if number:
            compiled.add(rows)
        cpus, gpu = rows * cpu_s * (experts - number) / experts, gpu_s * number / experts + compiles_s
        return LayerTimes(wall_s=max(cpus, gpu), cpu_s=cpus, gpu_s=gpu)

    for point in measure(run, [64, 128], experts):
        assert point.cpu_s == pytest.approx(point.rows * cpu_s)
        assert (point.gpu_s, point.gpu_alone_s) == pytest.approx((gpu_s, gpu_s))
        assert point.exchange_s == pytest.approx(0.0, abs=1e-9)
