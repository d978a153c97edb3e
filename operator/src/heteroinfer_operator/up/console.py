"""The output of `heteroinfer up`: a line for each event, and on a terminal a live table of ranks."""

from datetime import datetime
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from heteroinfer_contract.printable import printable
from heteroinfer_operator.fleet.lines import GroupLine, RankLine, ResourceLine
from heteroinfer_operator.fleet.screen import UP_COLUMNS, build_group_rows, build_table


class Display:
    """Prints lines and, on a terminal, a live table below the lines.

    Without a terminal (`live` is False), prints a line for each change of a rank's phase.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False) if live else None
        self._reported: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def print_line(self, text: str, *, warning: bool = False) -> None:
        """Prints a line with the time of day."""
        style = "yellow" if warning else None
        self._print(f"{datetime.now().astimezone():%H:%M:%S} {text}", style)

    def print_plain(self, text: str) -> None:
        """Prints text without the time, for the user to copy."""
        self._print(text, None)

    def show_ranks(self, resource: ResourceLine) -> None:
        """Updates the live table, or prints a line for each rank whose phase has changed."""
        if self._live is not None:
            self._live.update(_build_table_of_ranks(resource), refresh=True)
            return
        for group in resource.lines:
            for rank in group.ranks:
                rank_text = _describe_rank(group, rank)
                if self._reported.get(rank_text) != rank.phase:
                    self._reported[rank_text] = rank.phase
                    self.print_line(f"{rank_text}: {rank.phase}")

    def print_table(self, resource: ResourceLine) -> None:
        """Prints the table once, if there are ranks. A terminal already shows the live table."""
        if self._live is None and any(group.ranks for group in resource.lines):
            self._console.print(_build_table_of_ranks(resource))

    def _print(self, text: str, style: str | None) -> None:
        # Print the text as it is, without line breaks or markup, because programs read the lines, too.
        self._console.print(
            printable(text, keep="\n"), style=style, markup=False, highlight=False, soft_wrap=True
        )


def _build_table_of_ranks(resource: ResourceLine) -> Table:
    rows = (row for group in resource.lines for row in build_group_rows(group))
    return build_table(rows, UP_COLUMNS)


def _describe_rank(group: GroupLine, rank: RankLine) -> str:
    group_text = f"group {group.index} " if group.index else ""
    return f"{group_text}rank {rank.rank} ({rank.role}, {rank.device}, layers {rank.layers})"
