"""Delays each DNS answer by SLOW_NAMES_SECONDS. For the PYTHONPATH of a pod's processes.

glibc asks again after 5 s without an answer (resolv.conf(5)). As there, the calling thread waits.

glibc asks again after 5 s when an answer was lost (resolv.conf(5)); the caller's thread waits as here.
"""

import os
import socket
import sys
import time
from typing import Any

_getaddrinfo = socket.getaddrinfo


def slow(host: Any, *args: Any, **options: Any) -> Any:
    """Returns the addresses of a host, after the delay if the host is a name."""
    if isinstance(host, str) and not host.replace(".", "").isdigit():
        print(f"asks for {host}", file=sys.stderr, flush=True)
        time.sleep(float(os.environ["SLOW_NAMES_SECONDS"]))
    return _getaddrinfo(host, *args, **options)


socket.getaddrinfo = slow
