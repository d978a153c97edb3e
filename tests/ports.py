"""Ports for programs that take one by number."""

import contextlib
import random
import socket
import threading

FIRST_PORT, END_PORT = 10000, 20000
"""Below what the kernel gives to others unasked (ip_local_port_range) and what `heteroinfer up` takes."""

_next_port = random.SystemRandom().randrange(FIRST_PORT, END_PORT)
_lock = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that are free, and that this process has not been given for long.

    A program listens seconds after it got its ports: meanwhile nobody else may get them.
    """
    global _next_port  # noqa: PLW0603 - one counter for this process
    found: list[int] = []
    with _lock:
        while len(found) < count:
            _next_port = _next_port + 1 if _next_port + 1 < END_PORT else FIRST_PORT
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", _next_port))
                found.append(_next_port)
    return found


def free_port() -> int:
    """Returns one such port."""
    return free_ports(1)[0]


def contiguous_ports(count: int) -> int:
    """Returns the first of `count` such ports that are neighbours."""
    while True:
        ports = free_ports(count)
        if ports[-1] == ports[0] + count - 1:
            return ports[0]
