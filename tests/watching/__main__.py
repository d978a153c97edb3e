"""Draws the dashboards of a serving group for the docs: `python -m tests.watching`."""

import tempfile
from pathlib import Path

from charts.dashboards import BOARDS
from tests.cluster.folders import REPOSITORY
from tests.cluster.running_cluster import start_control_plane_only
from tests.integration.watching.stack import start_stack, watch
from tests.integration.worker.conftest import make
from tests.watching.pictures import draw

PICTURES = REPOSITORY / "docs/images"
WATCHED_S = 75.0


def main() -> None:
    """Writes a picture of each dashboard."""
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
