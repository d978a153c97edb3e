"""One way to say a size."""

import pytest

from heteroinfer_contract.byte_size import format_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 MiB"), (60 * 2**20, "60.0 MiB"), (2**30 // 10, "0.10 GiB"), (5 * 2**29, "2.50 GiB")],
)
def test_a_size_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
