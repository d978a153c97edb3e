"""Changes a module in a test's pods right after its import. For sitecustomize.py on the PYTHONPATH of pods.

Pods do not have this package on their path, so they run this file: runpy.run_path(...)["change_on_import"].
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any


class _Finder:
    """Finds one module, and changes it after it is loaded."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Finds the module, and wraps its loader so that `change` runs after the module is loaded."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            self._change(module)

        loader.exec_module = exec_module
        return spec


def change_on_import(name: str, change: Callable[[Any], None]) -> None:
    """Calls `change` with the module of this name as soon as it is loaded."""
    sys.meta_path.insert(0, _Finder(name, change))
