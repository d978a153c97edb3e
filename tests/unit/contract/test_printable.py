"""Text for people: sizes in one form, and foreign text made safe for a terminal and a log."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.printable import format_bytes, format_layers, printable


def test_escapes_terminal_sequences() -> None:
    assert printable("a\x1b]52;c;aGk=\x07b\u202ec\r\n") == "a\\x1b]52;c;aGk=\\x07b\\u202ec\\r\\n"


def test_keeps_readable_text() -> None:
    assert printable("Größe: 日本語, 5 µs") == "Größe: 日本語, 5 µs"
    assert printable("one\ntwo\x1b", keep="\n") == "one\ntwo\\x1b"


@given(st.text(st.characters()))
def test_any_text_becomes_printable(text: str) -> None:
    assert printable(text).isprintable()


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 MiB"), (60 * 2**20, "60.0 MiB"), (2**30 // 10, "0.10 GiB"), (5 * 2**29, "2.50 GiB")],
)
def test_formats_a_size_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (range(12), "0-11"),
        ((5,), "5"),
        ((0, 1, 2, 7), "0-2, 7"),
        ((7, 15, 23), "7, 15, 23"),
        ((3, 7, 11, 15), "spread over 3-15"),
    ],
)
def test_layers_are_ranges_if_they_are_few(layers: Sequence[int], text: str) -> None:
    assert format_layers(layers) == text
