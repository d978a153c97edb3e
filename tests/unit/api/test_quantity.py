"""Quantities and durations: numbers, and the same texts that the schema takes."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heteroinfer_operator import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80Gi", 80 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("512Mi", 2**29),
        ("2", 2),
        ("1G", 10**9),
        ("500m", Fraction(1, 2)),
        ("0", 0),
        ("3920m", Fraction(392, 100)),
        ("32861324Ki", 32861324 * 1024),
        ("1e9", 10**9),
        ("250u", Fraction(1, 4000)),
        ("2Ei", 2**61),
        ("-1", -1),
        (4, 4),
    ],
)
def test_a_quantity_is_exact(text: object, value: Fraction) -> None:
    assert quantity.parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "Gi", "1 Gi", "1gi", ".5", "1Gi\n", "9" * 31, "8 GB", "x", "1KiB", None]
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a quantity such as 80Gi"):
        quantity.parse_quantity(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("30m", 1800), ("1h", 3600), ("1h30m5s", 5405), ("0s", 0)]
)
def test_a_duration_is_in_seconds(text: str, seconds: float) -> None:
    assert quantity.parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "m", "1d", "5s1m", "1.5h", "-1s", "1m "])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        quantity.parse_duration_s(text)


@settings(max_examples=30)  # building examples from a pattern is slow
@given(st.from_regex(quantity.RESOURCE_PATTERN.replace("$", r"\Z")))
def test_what_the_schema_takes_can_be_parsed(text: str) -> None:
    assert quantity.parse_quantity(text) >= 0


@settings(max_examples=30)  # as above
@given(st.from_regex(quantity.DURATION_PATTERN.replace("$", r"\Z")).filter(bool))
def test_a_duration_that_the_schema_takes_can_be_parsed(text: str) -> None:
    assert quantity.parse_duration_s(text) >= 0


@given(st.text(max_size=12, alphabet="0123456789.hmsGiMkKTPe-"))
def test_schema_and_parser_take_the_same_durations(text: str) -> None:
    matches = re.fullmatch(quantity.DURATION_PATTERN, text) is not None and text != ""
    try:
        quantity.parse_duration_s(text)
    except ValueError:
        assert not matches
    else:
        assert matches


@given(st.integers(0, 2**50))
def test_a_size_as_a_quantity_is_rounded_up(size: int) -> None:
    assert 0 <= quantity.parse_bytes(quantity.mebibytes(size)) - size < 2**20
