"""`python -m tests.watching` writes the dashboards of the chart; `pictures`: their pictures for the docs.

For the pictures a group serves for a minute, on this machine's processes.
"""

import argparse
import tempfile
from pathlib import Path

from tests.cluster.folders import REPOSITORY
from tests.watching.board import render
from tests.watching.boards import BOARDS

FOLDER = REPOSITORY / "charts/heteroinfer/dashboards"
PICTURES = REPOSITORY / "docs/images"
WATCHED_S = 75.0


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.watching", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["dashboards", "pictures"], default="dashboards")
    if parser.parse_args().what == "dashboards":
        write_dashboards()
    else:
        draw_pictures()


def write_dashboards() -> None:
    """Writes a file for each dashboard, and removes what is no longer one."""
    wanted = {FOLDER / f"{board.uid}.json": render(board) for board in BOARDS}
    for path in set(FOLDER.glob("*.json")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)


def draw_pictures() -> None:
    """Writes a picture of each dashboard, of a group that serves meanwhile."""
    from tests.cluster.cluster import start_control_plane_only
    from tests.integration.watching.stack import start_stack, watch
    from tests.integration.worker.conftest import make
    from tests.watching.pictures import draw

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hi-watching-") as scratch:
        folder = Path(scratch)
        model = make(folder / "model")
        with start_control_plane_only() as plane, start_stack(plane, model, folder) as stack:
            watched = watch(stack, WATCHED_S)
            for board in BOARDS:
                draw(board, watched, PICTURES / f"{board.uid}.png")


if __name__ == "__main__":
    main()
