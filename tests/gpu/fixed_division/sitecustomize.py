"""On the PYTHONPATH of a group's pods: the GPU computes the part GPU_PART of the experts, with any rows."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

BALANCE = "vllm_heteroinfer.feed_forward.stream_balance"


class FixedDivision:
    """Finds the module of the balance, and changes it once it is loaded. The rank measures as always."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != BALANCE:
            return None
        sys.meta_path.remove(FINDER)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            part = float(os.environ["GPU_PART"])

            def gpu_experts(balance: Any, rows: int, gap_s: float, ahead: int) -> int:
                del rows, gap_s, ahead
                return round(part * int(balance.measured[0].experts))

            module.Balance.gpu_experts = gpu_experts

        loader.exec_module = exec_module
        return spec


FINDER = FixedDivision()
if "GPU_PART" in os.environ:
    sys.meta_path.insert(0, FINDER)
