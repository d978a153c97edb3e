"""Calibrations are written, read and checked, and rates are interpolated."""

import json
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.calibration import (
    ALL_NODES,
    Calibration,
    Hardware,
    HopPath,
    KernelPart,
    MemoryReading,
    Skipped,
)
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from heteroinfer_contract.model import SchemeName
from tests.unit.calibrated import AMX, CALIBRATION, CPU, calibration, kernel


def test_a_written_calibration_is_read_back() -> None:
    assert Calibration.from_json(CALIBRATION.to_json()) == CALIBRATION
    assert len(CALIBRATION.to_json().encode()) < MAX_TERMINATION_MESSAGE_BYTES
    assert CALIBRATION.hash == Calibration.from_json(CALIBRATION.to_json()).hash
    assert CALIBRATION.hash != calibration(time=1.0).hash


def changed(path: str, value: Any) -> str:
    raw = json.loads(CALIBRATION.to_json())
    at = raw
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name) if name.isdecimal() else name]
    at[int(last) if last.isdecimal() else last] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "'hardware' is missing"),
        (changed("readings", []), "must contain a reading of all NUMA nodes"),
        (changed("readings.0.bytes_per_s", 0), "MemoryReading.bytes_per_s: must be at least 1.0 (got 0.0)"),
        (
            changed("readings.0.bytes_per_s", 1e-300),
            "MemoryReading.bytes_per_s: must be at least 1.0 (got 1e-300)",
        ),
        (changed("operations_per_s", 0.5), "Calibration.operations_per_s: must be at least 1.0 (got 0.5)"),
        (changed("time", 1e12), "Calibration.time: must be at most"),
        (changed("hops.0.seconds", 1e-300), "Hop.seconds: must be at least"),
        (changed("hops.0.seconds", 1e18), "Hop.seconds: must be at most"),
        (changed("readings.0.bytes_per_s", 1e300), "MemoryReading.bytes_per_s"),
        (changed("readings.0.threads", 0), "MemoryReading.threads: must be at least 1 (got 0)"),
        (changed("kernels.0.more_rows", [1.0, 0.0]), "KernelRate.more_rows: must be at least 1.0 (got 0.0)"),
        (changed("kernels.0.more_rows", [1.0] * 6), "more_rows: must be at most 5 (got 6)"),
        (changed("kernels.0.scheme", "int3"), "Calibration.kernels[0].scheme: must be one of"),
        (changed("kernels.0.kernel", "x" * 200), "text_length: must be at most 128 (got 200)"),
        (
            changed("kernels", [json.loads(CALIBRATION.to_json())["kernels"][0]] * 65),
            "kernels: must be at most 64 (got 65)",
        ),
        (changed("hops.0.seconds", -1), "Hop.seconds"),
        (changed("hardware.cores", 0), "cores: must be at least 1 (got 0)"),
        (changed("hardware.colour", "red"), "unknown field 'colour'"),
        (changed("gpu", {"bytes_per_s": 0, "operations_per_s": 1}), "GpuRate.bytes_per_s"),
    ],
)
def test_refuses_an_invalid_calibration_and_names_the_field(text: str, words: str) -> None:
    with pytest.raises(ContractError) as caught:
        Calibration.from_json(text)
    assert words in str(caught.value)


def test_rates_between_measured_thread_counts_are_interpolated() -> None:
    assert CALIBRATION.read_rate(16) == 160e9
    assert CALIBRATION.read_rate(6) == pytest.approx(60e9)
    assert CALIBRATION.read_rate(64) == 160e9
    assert CALIBRATION.read_rate(0.5) == pytest.approx(5e9)


def test_threads_that_fit_on_one_numa_node_have_the_rate_of_the_slower_node() -> None:
    both = (
        MemoryReading(threads=16, bytes_per_s=300e9, node=ALL_NODES),
        MemoryReading(threads=8, bytes_per_s=120e9, node=0),
        MemoryReading(threads=8, bytes_per_s=100e9, node=1),
    )
    hardware = Hardware(cpu=CPU, instruction_sets=AMX, cpus=16, cores=16, numa_nodes=2)
    measured = calibration(hardware=hardware, readings=both)
    assert measured.read_rate(8) == 100e9
    assert measured.read_rate(8, combine=max) == 120e9
    assert measured.read_rate(16) == 300e9


def test_finds_the_fastest_kernel_and_the_smallest_matching_message() -> None:
    found = CALIBRATION.fastest_kernel(KernelPart.LINEAR, SchemeName.AWQ, "bfloat16")
    assert found is not None
    assert found.bytes_per_s == 320e9
    assert CALIBRATION.fastest_kernel(KernelPart.LINEAR, SchemeName.AWQ, "float16") is None
    assert CALIBRATION.hop_s(HopPath.GLOO, 8193) == 1e-3
    assert CALIBRATION.hop_s(HopPath.GLOO, 1 << 30) == 1e-3
    assert calibration(hops=()).hop_s(HopPath.GLOO) is None


def test_texts_of_the_maximum_length_are_read_back() -> None:
    longest = calibration(skipped=(Skipped(what="w" * 128, why="y" * 256),))
    assert Calibration.from_json(longest.to_json()) == longest


def test_a_kernel_that_was_measured_for_many_rows_computes_beyond_them() -> None:
    one = kernel(KernelPart.LINEAR, SchemeName.NONE, 100)
    assert one.rate(1) == one.rate(2000) == 100e9
    many = replace(one, more_rows=(100e9, 100e9, 50e9, 10e9))
    assert (many.rate(1), many.rate(9), many.rate(64), many.rate(512)) == (100e9, 100e9, 50e9, 10e9)
    assert many.rate(1024) == 5e9
    # Between two measurements, the time per byte is interpolated, and not the rate.
    assert 1 / many.rate(288) == pytest.approx((1 / 50e9 + 1 / 10e9) / 2)
    assert replace(one, more_rows=(50e9,)).rate(8) == 25e9
    text = calibration(kernels=(many, one)).to_json()
    kept = Calibration.from_json(text).kernels
    assert [each.more_rows for each in kept] == [
        (100e9, 100e9, 50e9, 10e9),
        (),
    ]
    assert text.count("more_rows") == 1
