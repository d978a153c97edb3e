"""The table of a timeline of shared experts."""

import pytest

from tests.bench.exchange_trace import summarize, to_table


def layer(number: int, begin: float) -> list[list[object]]:
    """Returns the spans of a layer of 20 ms, with a gap of 2 ms before its ask."""
    return [
        ["ask", number, begin + 2, begin + 3],
        ["copy", number, begin - 1, begin + 8],
        ["copy", number, begin + 9, begin + 18],
        ["unpack", number, begin + 8, begin + 8.5],
        ["compute", number, begin + 8.5, begin + 9],
        ["unpack", number, begin + 18, begin + 18.5],
        ["compute", number, begin + 18.5, begin + 19],
        ["answer", number, begin + 19, begin + 20],
    ]


def test_each_column_is_the_mean_over_all_layers_but_the_first_and_last() -> None:
    spans = [span for number in range(4) for span in layer(number, 20.0 * number)]
    step = {"rows": 8192, "busy_ns": [4 * 12e6, 4 * 14e6], "spans": spans}
    found = summarize(step)
    assert found == pytest.approx(
        {
            "layer": 20,
            "gap": 2,
            "ask": 1,
            "copy": 18,
            "link idle": 2,
            "wait for copies": 14,
            "unpack": 1,
            "compute": 1,
            "answer": 1,
            "CPUs": 14,
            "exchange": 3,
        }
    )
    assert "| 8192 | 20.00 | 2.00 |" in to_table([step])
