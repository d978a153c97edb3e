"""Formats rows of cells as lines with aligned columns. Pure."""

from collections.abc import Sequence


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, with aligned columns. Lines have no spaces at their ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*padded, row[-1]]).rstrip())
    return lines
