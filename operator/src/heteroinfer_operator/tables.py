"""The table that `heteroinfer up` and `heteroinfer top` show, on a terminal or as text."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from heteroinfer_contract.printable import printable

_NUMBERS: Final = frozenset(
    {"rank", "stage", "steps", "step", "compute", "wait", "seen", "predicted", "kv", "restarts"}
)
"""Columns that are aligned at their last digit."""


def build_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> Table:
    """Returns a table of cells that are shown as they are, without a line broken or marked up."""
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
