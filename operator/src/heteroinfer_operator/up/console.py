"""What `heteroinfer up` prints: lines as things happen, and on a terminal a live table of ranks."""

from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from heteroinfer_contract.printable import printable
from heteroinfer_operator.tables import build_table
from heteroinfer_operator.up.rank_rows import HEADINGS, RankRow

_CAPTION = "times in ms; predicted: compute of one request; seen: s since the last heart-beat"


class Display:
    """Lines, and a table below them where the output is a terminal.

    Without a terminal the progress of each rank becomes lines, one for each change.

    Args:
        console: where to.
        live: whether to draw the table.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False) if live else None
        self._reported: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)

    def line(self, text: str, *, warning: bool = False) -> None:
        """Prints a line with the time of day."""
        style = "yellow" if warning else None
        self._print(f"{datetime.now().astimezone():%H:%M:%S} {text}", style)

    def plain(self, text: str) -> None:
        """Prints text as it is, to be copied."""
        self._print(text, None)

    def show(self, rows: Sequence[RankRow]) -> None:
        """Shows the ranks as they are now."""
        if self._live is not None:
            self._live.update(_table(rows), refresh=True)
            return
        for row in rows:
            if self._reported.get(row.name) != row.state:
                self._reported[row.name] = row.state
                self.line(f"{row.name}: {row.state}")

    def table(self, rows: Sequence[RankRow]) -> None:
        """Prints the table once; on a terminal it stands there already."""
        if self._live is None and rows:
            self._console.print(_table(rows))

    def _print(self, text: str, style: str | None) -> None:
        # Never wrapped or marked up: lines are read by programs as well.
        self._console.print(
            printable(text, keep="\n"), style=style, markup=False, highlight=False, soft_wrap=True
        )


def _table(rows: Sequence[RankRow]) -> Table:
    return build_table(HEADINGS, (row.cells for row in rows), caption=_CAPTION)
