"""A real supervisor whose ranks are small Python processes: `tiny_supervisor.py`, by environment."""

import os
import sys
from pathlib import Path

from vllm_heteroinfer.launch.cli import supervise
from vllm_heteroinfer.launch.pod_processes import Commands

HERE = Path(__file__).parent

if __name__ == "__main__":
    api = (sys.executable, str(HERE / "tiny_api.py")) if "TINY_NO_API" not in os.environ else ()
    sys.exit(
        supervise(os.environ, Commands(rank=(sys.executable, str(HERE / "tiny_rank.py")), api_server=api))
    )
