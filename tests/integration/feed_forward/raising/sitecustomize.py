"""Makes the rank in the variable RAISES raise at an ask once the file RAISES_FROM exists.

For the PYTHONPATH of a group's pods.
"""

import os
import runpy
from pathlib import Path
from typing import Any

ANSWERING = "vllm_heteroinfer.rank.answering_rank"


def change(module: Any) -> None:
    """Makes the feed-forward rank check the file before each computation."""
    compute = module.AnsweringRank._compute_of_layer

    def raising(lane: Any, layer: int) -> Any:
        text = os.environ["RAISES_FROM"]
        if os.environ["HETEROINFER_RANK"] == os.environ["RAISES"] and Path(text).exists():
            raise OSError(Path(text).read_text())
        return compute(lane, layer)

    module.AnsweringRank._compute_of_layer = raising


if "RAISES" in os.environ:
    runpy.run_path(str(Path(__file__).parents[3] / "changed_module.py"))["change_on_import"](
        ANSWERING, change
    )
