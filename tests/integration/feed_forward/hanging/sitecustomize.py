"""Makes the rank in the variable HANGS hang before it publishes its read rate.

For the PYTHONPATH of a group's pods.
"""

import os
import runpy
import time
from pathlib import Path
from typing import Any

READ_RATE = "vllm_heteroinfer.feed_forward.read_rate"


def change(module: Any) -> None:
    """Makes that rank sleep instead of publishing."""
    publish = module.publish_read_rate

    def hanging(*arguments: Any) -> None:
        if os.environ["HETEROINFER_RANK"] == os.environ["HANGS"]:  # a fork's, too
            time.sleep(3600)
        publish(*arguments)

    module.publish_read_rate = hanging


if "HANGS" in os.environ:
    runpy.run_path(str(Path(__file__).parents[3] / "changed_module.py"))["change_on_import"](
        READ_RATE, change
    )
