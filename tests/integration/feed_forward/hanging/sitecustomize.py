"""On the PYTHONPATH of a group's pods: the rank in HANGS hangs before it tells how fast it reads."""

import os
import sys
import time
from importlib.machinery import ModuleSpec


class Hanging:
    """Finds no module, and in that rank never returns for one."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        hangs = os.environ.get("HETEROINFER_RANK") == os.environ.get("HANGS")  # a fork's, too
        if hangs and name == "vllm_heteroinfer.feed_forward.read_rate":
            time.sleep(3600)
        return None


sys.meta_path.insert(0, Hanging)
