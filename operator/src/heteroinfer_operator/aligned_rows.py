"""Rows of cells as lines of text. Pure."""

from collections.abc import Sequence


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, with aligned columns. The last column may be of any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
