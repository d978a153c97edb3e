"""Quantities and durations: numbers, and the same texts that the schema takes."""

import contextlib
import re
import time
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
        # Forms that the API server stores as they are (seen with Kubernetes 1.35.4).
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("+5", 5),
        ("-.5Gi", -(2**29)),
        ("1E", 10**18),
        ("1E3", 1000),
        ("1e+3", 1000),
        ("1e-1", Fraction(1, 10)),
        ("0" * 43 + "1", 1),
        ("1" + "0" * 17 + "e-17", 1),
        ("0e999999999", 0),
        ("-0", 0),
        ("0." + "0" * 99 + "1e100", 1),
    ],
)
def test_a_quantity_is_parsed_exactly(text: object, value: Fraction) -> None:
    assert quantity.parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "1 Gi",
        "1gi",
        ".",
        "-",
        "1Gi\n",
        "1e",
        "1e3Ki",
        "1.1.1",
        "--1",
        "1i",
        "8 GB",
        "x",
        "1KiB",
        "\N{ARABIC-INDIC DIGIT ONE}",
        None,
    ],
)
def test_invalid_quantities_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="must be a quantity such as 80Gi"):
        quantity.parse_quantity(text)


@pytest.mark.parametrize(
    "text",
    [
        "1e1000",
        "10e999",
        "9" * 44,
        "9" * 10**6,
        "1e2147483648",
        f"1e{'9' * 5000}",
        "9223372036854775808",
        "100E",
    ],
)
def test_a_huge_quantity_is_the_largest_number_of_kubernetes(text: str) -> None:
    started = time.monotonic()
    assert quantity.parse_quantity(text) == 2**63 - 1
    assert quantity.parse_quantity(f"-{text}") == -(2**63 - 1)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "text", ["1e-1000", "1e-10", "0.0000000001", f"0.{'0' * 10**6}1", f"1e-{'9' * 5000}"]
)
def test_a_tiny_quantity_is_a_billionth(text: str) -> None:
    assert quantity.parse_quantity(text) == Fraction(1, 10**9)


_DIGITS = st.text("0123456789", max_size=60)
_FORMS = st.builds(
    lambda sign, whole, part, end: f"{sign}{whole}{part}{end}",
    st.sampled_from(["", "+", "-"]),
    _DIGITS.filter(bool),
    st.just("") | _DIGITS.map(lambda digits: f".{digits}"),
    st.sampled_from(["", *"numkMGTPE", *(f"{prefix}i" for prefix in "KMGTPE")])
    | st.builds(lambda mark, power: f"{mark}{power}", st.sampled_from("eE"), st.integers(-(10**12), 10**12)),
)


@given(_FORMS)
def test_every_form_of_kubernetes_is_a_number_within_its_bounds(text: str) -> None:
    """The result is the exact number within the bounds, rounded away from zero, if it can be computed."""
    number = quantity.parse_quantity(text)
    assert -(2**63 - 1) <= number <= 2**63 - 1
    parts = re.fullmatch(r"([^a-zA-Z]*)(?:[eE]([+-]?[0-9]+)|([a-zA-Z]*))", text)
    assert parts is not None
    if abs(int(parts[2] or 0)) > 200:
        return
    exact = (
        abs(Fraction(parts[1].rstrip("."))) * Fraction(10) ** int(parts[2] or 0) * _FACTORS[parts[3] or ""]
    )
    billionths = -(-exact * 10**9 // 1)
    expected = min(Fraction(billionths, 10**9), Fraction(2**63 - 1))
    assert abs(number) == expected


_FACTORS = {
    "": Fraction(1),
    **{name: Fraction(1, 1000**power) for power, name in enumerate("mun", start=1)},
    **{name: Fraction(1000**power) for power, name in enumerate("kMGTPE", start=1)},
    **{f"{name}i": Fraction(1024**power) for power, name in enumerate("KMGTPE", start=1)},
}


@given(st.text(max_size=20) | st.text("0123456789.eE+-mkKiG", max_size=20))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert abs(quantity.parse_quantity(text)) < 2**63


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("30m", 1800),
        ("1h", 3600),
        ("1h30m5s", 5405),
        ("0s", 0),
        ("1500ms", 1.5),
        ("1s500ms", 1.5),
        ("100000s", 1e5),
    ],
)
def test_a_duration_is_parsed_into_seconds(text: str, seconds: float) -> None:
    assert quantity.parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "m", "1d", "1.5h", "-1s", "1m ", "1m1m1m1m1m", "1000000s"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        quantity.parse_duration_s(text)


@settings(max_examples=30)  # building examples from a pattern is slow
@given(st.from_regex(quantity.RESOURCE_PATTERN.replace("$", r"\Z")))
def test_quantities_that_the_schema_accepts_can_be_parsed(text: str) -> None:
    assert quantity.parse_quantity(text) >= 0


@settings(max_examples=30)  # as above
@given(st.from_regex(quantity.DURATION_PATTERN.replace("$", r"\Z")).filter(bool))
def test_durations_that_the_schema_accepts_can_be_parsed(text: str) -> None:
    assert quantity.parse_duration_s(text) >= 0


@given(st.text(max_size=12, alphabet="0123456789.hmsGiMkKTPe-"))
def test_schema_and_parser_accept_the_same_durations(text: str) -> None:
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


def test_only_numbers_with_a_binary_suffix_end_at_the_largest_integer() -> None:
    """The API server refuses a request of 294590482P with a limit of 293590482P.

    Earlier, our classes accepted it.
    """
    assert quantity.exact_quantity("294590482P") > quantity.exact_quantity("293590482P")
    assert quantity.exact_quantity("1.5P") == quantity.parse_quantity("1.5P")
    assert (
        quantity.exact_quantity("999999999999999Pi")
        == quantity.exact_quantity("99999999999999Pi")
        == 2**63 - 1
    )
    assert quantity.exact_quantity("999999999999999.5P") == Fraction(9999999999999995, 10) * 10**15
