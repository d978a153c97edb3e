"""On the PYTHONPATH of a pod's processes: each answer to a name takes as long as SLOW_NAMES_SECONDS says.

glibc asks again after 5 s when an answer was lost (resolv.conf(5)); the caller's thread waits as here.
"""

import os
import socket
import sys
import time
from typing import Any

_getaddrinfo = socket.getaddrinfo


def slow(host: Any, *args: Any, **options: Any) -> Any:
    """Returns the addresses of a host, after a while if it is a name."""
    if isinstance(host, str) and not host.replace(".", "").isdigit():
        print(f"asks for {host}", file=sys.stderr, flush=True)
        time.sleep(float(os.environ["SLOW_NAMES_SECONDS"]))
    return _getaddrinfo(host, *args, **options)


socket.getaddrinfo = slow
