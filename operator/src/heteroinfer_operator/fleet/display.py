"""The table of `heteroinfer top`."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heteroinfer_operator.fleet.view import HEADINGS, ResourceLine, build_cells, waits

_NUMBERS = frozenset({"steps", "step", "compute", "wait", "kv", "restarts"})
_CAPTION = "times in ms; step = compute + wait + transfer: a straggler's compute is long"


def build_table(resources: Sequence[ResourceLine], note: str) -> RenderableType:
    """Returns the table, what it waits for, and a note on where the values are from."""
    if not resources:
        return Text("no HeteroInference here; -A looks in all namespaces")
    table = Table(box=None, pad_edge=False, caption=_CAPTION, caption_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    for cells in build_cells(resources):
        table.add_row(*(Text(cell) for cell in cells))
    words = [Text(line) for line in (*waits(resources), *([note] if note else ()))]
    return Group(table, *words)
