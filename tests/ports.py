"""Ports for programs that take one by number."""

import socket


def free_port() -> int:
    """Returns a port of loopback that is free now; another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
