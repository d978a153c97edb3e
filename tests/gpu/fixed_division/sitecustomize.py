"""Makes the GPU compute the part GPU_PART of the experts, for any number of rows.

For the PYTHONPATH of a group's pods.
"""

import os
import runpy
from pathlib import Path
from typing import Any

BALANCE = "vllm_heteroinfer.feed_forward.stream_balance"


def change(module: Any) -> None:
    """Fixes the number of experts on the GPU. The rank still measures as usual."""
    part = float(os.environ["GPU_PART"])

    def gpu_experts(balance: Any, rows: int, gap_s: float, ahead: int) -> int:
        del rows, gap_s, ahead
        return round(part * int(balance.measured[0].experts))

    module.Balance.gpu_experts = gpu_experts


if "GPU_PART" in os.environ:
    runpy.run_path(str(Path(__file__).parents[2] / "changed_module.py"))["change_on_import"](BALANCE, change)
