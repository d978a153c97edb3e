"""On the PYTHONPATH of a group's pods: the rank in HANGS hangs before it publishes its read rate."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

READ_RATE = "vllm_heteroinfer.feed_forward.read_rate"


class Hanging:
    """Finds the module of the read rate, and changes it in that rank once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != READ_RATE:
            return None
        sys.meta_path.remove(FINDER)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            publish = module.publish_read_rate

            def hanging(*arguments: Any) -> None:
                if os.environ["HETEROINFER_RANK"] == os.environ["HANGS"]:  # a fork's, too
                    time.sleep(3600)
                publish(*arguments)

            module.publish_read_rate = hanging

        loader.exec_module = exec_module
        return spec


FINDER = Hanging()
if "HANGS" in os.environ:
    sys.meta_path.insert(0, FINDER)
