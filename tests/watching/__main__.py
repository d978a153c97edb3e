"""`python -m tests.watching` writes the chart's dashboards from their definitions."""

from tests.cluster.folders import REPOSITORY
from tests.watching.board import render
from tests.watching.boards import BOARDS

FOLDER = REPOSITORY / "charts/heteroinfer/dashboards"


def main() -> None:
    """Writes a file for each dashboard, and removes what is no longer one."""
    wanted = {FOLDER / f"{board.uid}.json": render(board) for board in BOARDS}
    for path in set(FOLDER.glob("*.json")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
