"""On the PYTHONPATH of a group's pods: rank RAISES raises at an ask once the file RAISES_FROM is there."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ANSWERING = "vllm_heteroinfer.rank.answering_rank"


class Raising:
    """Finds the module of the answering rank, and changes it once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != ANSWERING:
            return None
        sys.meta_path.remove(FINDER)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        loader.exec_module = exec_module
        return spec


def change(module: Any) -> None:
    """Has the lane read its trigger before each computation."""
    compute = module.Lane._compute_of_layer

    def raising(lane: Any, layer: int) -> Any:
        text = os.environ["RAISES_FROM"]
        if os.environ["HETEROINFER_RANK"] == os.environ["RAISES"] and Path(text).exists():
            raise OSError(Path(text).read_text())
        return compute(lane, layer)

    module.Lane._compute_of_layer = raising


FINDER = Raising()
if "RAISES" in os.environ:
    sys.meta_path.insert(0, FINDER)
