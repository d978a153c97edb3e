"""`python -m charts.dashboards` writes the chart's dashboards from their definitions."""

from pathlib import Path
from typing import Final

from charts.dashboards import BOARDS
from charts.dashboards.board import render

FOLDER: Final = Path(__file__).parents[1] / "heteroinfer/dashboards"


def main() -> None:
    """Writes a file for each dashboard, and removes files of dashboards that no longer exist."""
    wanted = {FOLDER / f"{board.uid}.json": render(board) for board in BOARDS}
    for path in set(FOLDER.glob("*.json")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
