"""The table of `heteroinfer top`."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from heteroinfer_contract.printable import printable
from heteroinfer_operator.fleet.lines import HEADINGS, ResourceLine, build_cells, predictions, waits
from heteroinfer_operator.tables import build_table

_CAPTION = (
    "times in ms; step = compute + wait + transfer: a straggler's compute is long; predicted: a group's "
    "step, a rank's compute, with one request"
)


def build_screen(resources: Sequence[ResourceLine], note: str) -> RenderableType:
    """Returns the table, what it waits for, and a note on where the values are from."""
    if not resources:
        return Text("no HeteroInference here; -A looks in all namespaces")
    table = build_table(HEADINGS, build_cells(resources), caption=_CAPTION)
    lines = (*waits(resources), *predictions(resources), *([note] if note else ()))
    words = [Text(printable(line)) for line in lines]
    return Group(table, *words)
