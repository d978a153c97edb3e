"""The measurement of a network as it is written, read and refused."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.network_measurement import NetworkMeasurement
from tests.unit.calibrated import NETWORK


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(NETWORK.to_json()), **fields})


def test_a_written_measurement_is_read_back() -> None:
    assert NetworkMeasurement.from_json(NETWORK.to_json()) == NETWORK
    assert NETWORK.hash != replace(NETWORK, time=1.0).hash


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be JSON"),
        ("{}", "'version' is missing"),
        (changed(other=1), "has unknown field 'other'"),
        (changed(round_trip_s=0), "NetworkMeasurement.round_trip_s: must be 1e-06 to 10 seconds (got 0)"),
        (changed(round_trip_s=-1.0), "NetworkMeasurement.round_trip_s: must be 1e-06 to 10 seconds (got -1)"),
        (changed(round_trip_s=11), "NetworkMeasurement.round_trip_s: must be 1e-06 to 10 seconds (got 11)"),
        (changed(round_trip_s=math.nan), "NetworkMeasurement.round_trip_s: must be a finite number"),
        (
            changed(to_listener_bytes_per_s=0),
            "to_listener_bytes_per_s: must be 1000 to 1e+12 bytes",
        ),
        (
            changed(to_client_bytes_per_s=1e13),
            "to_client_bytes_per_s: must be 1000 to 1e+12 bytes",
        ),
        (changed(to_client_bytes_per_s=math.inf), "must be a finite number"),
        (changed(to_client_bytes_per_s="fast"), "must be a number"),
        (changed(time=-1), "time: must be at least 0"),
        (changed(time=1e300), "time: must be at most"),
        (changed(version=""), "version: must have 1 to 128 characters (got 0)"),
        (changed(version="1" * 129), "version: must have 1 to 128 characters (got 129)"),
    ],
)
def test_a_measurement_that_cannot_be_right_is_refused(text: str, words: str) -> None:
    with pytest.raises(ContractError) as refused:
        NetworkMeasurement.from_json(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_number_that_was_never_written_is_refused_too(value: float) -> None:
    with pytest.raises(ContractError, match=r"round_trip_s: must be 1e-06 to 10 seconds \(got "):
        replace(NETWORK, round_trip_s=value).check()


def test_an_exchange_takes_the_round_trip_and_the_time_of_both_directions() -> None:
    assert NETWORK.exchange_s(0) == NETWORK.round_trip_s
    # 1 MB there at 1 GB/s takes 1 ms, and 1 MB back at 4 GB/s a quarter of that.
    assert NETWORK.exchange_s(2e6) == pytest.approx(NETWORK.round_trip_s + 1.25e-3)
    reversed_ends = replace(
        NETWORK,
        to_listener_bytes_per_s=NETWORK.to_client_bytes_per_s,
        to_client_bytes_per_s=NETWORK.to_listener_bytes_per_s,
    )
    assert reversed_ends.bytes_per_s == pytest.approx(NETWORK.bytes_per_s)
