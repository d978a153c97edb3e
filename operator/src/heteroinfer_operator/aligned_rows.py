"""Formats rows of cells as lines with aligned columns. Pure."""

from collections.abc import Sequence


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, with aligned columns. The last cell of a row is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
