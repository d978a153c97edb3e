"""The GPU's part of the experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_heteroinfer.feed_forward.stream_balance import LEAST_GAIN, Balance, Measured

SECONDS = st.floats(1e-5, 10.0)


def measured(rows: int, cpu_s: float, gpu_s: float, exchange_s: float = 0.0) -> Measured:
    return Measured(rows=rows, alone_s=cpu_s + exchange_s, exchange_s=exchange_s, cpu_s=cpu_s, gpu_s=gpu_s)


def test_both_sides_end_at_the_same_time() -> None:
    part = Balance([measured(512, 0.03, 0.01)]).gpu_part(512)
    assert part * 0.01 == pytest.approx((1 - part) * 0.03)


def test_the_gpu_copies_during_the_exchange_too() -> None:
    part = Balance([measured(512, 0.03, 0.02, exchange_s=0.01)]).gpu_part(512)
    assert part * 0.02 == pytest.approx(0.01 + (1 - part) * 0.03)


def test_the_gpu_takes_all_experts_if_it_is_faster_than_the_exchange() -> None:
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


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6), st.integers(1, 5000))
def test_a_part_is_used_only_if_it_is_faster(times: list[tuple[float, float, float]], rows: int) -> None:
    points = [measured(64 << index, *each) for index, each in enumerate(times)]
    part = Balance(points).gpu_part(rows)
    assert 0 <= part <= 1
    at = [point for point in points if point.rows == rows]
    if part and at:
        assert part * at[0].gpu_s <= LEAST_GAIN * at[0].alone_s
