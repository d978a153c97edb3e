"""Runs a real supervisor with small Python processes as ranks. Run it with `python -m`.

The first rank of a pod forks the other ranks and the API server, as in the product. With TINY_NO_FORKS, each
process is started separately. With TINY_NO_API, there is no API server.
"""

import os
import sys

from vllm_heteroinfer.launch.cli import supervise
from vllm_heteroinfer.launch.pod_processes import Commands

HERE = "tests.integration.launch"

if __name__ == "__main__":
    api = (sys.executable, "-m", f"{HERE}.tiny_api") if "TINY_NO_API" not in os.environ else ()
    commands = Commands(
        rank=(sys.executable, "-m", f"{HERE}.tiny_rank"),
        api_server=api,
        forks="TINY_NO_FORKS" not in os.environ,
    )
    sys.exit(supervise(os.environ, commands))
