"""Finds free ports for programs that need a port number."""

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

FIRST_PORT, END_PORT = 10000, 20000
"""Below the kernel's own range of ports (ip_local_port_range), and apart from the ports of
`heteroinfer up`."""
BLOCK_PORTS = 50
HELD_BLOCKS = 2
"""Seconds after which a port may be given away again. A program listens seconds after it got its port."""


class _Ports:
    """Blocks of ports that only this process gives away.

    The process that holds the lock of a block's file has the block.
    """

    def __init__(self) -> None:
        self._held: deque[int] = deque()
        self._left: Iterator[int] = iter(())

    def next(self) -> int:
        """Returns a port that no other process has got for a long time."""
        port = next(self._left, None)
        if port is None:
            self._left = self._claim()
            port = next(self._left)
        return port

    def _claim(self) -> Iterator[int]:
        """Locks a random free block of ports, and returns its ports. Releases the oldest block if needed."""
        folder = Path(tempfile.gettempdir()) / f"heteroinfer-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        first_ports = list(range(FIRST_PORT, END_PORT, BLOCK_PORTS))
        random.SystemRandom().shuffle(first_ports)
        for first_port in first_ports:
            lock = os.open(folder / str(first_port), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._held.append(lock)
            if len(self._held) > HELD_BLOCKS:
                os.close(self._held.popleft())
            return iter(range(first_port, first_port + BLOCK_PORTS))
        raise RuntimeError(f"every block of ports is held by a process; see {folder}")


_ports = _Ports()
_lock = threading.Lock()


def _start_anew() -> None:
    """Gives a forked process its own blocks."""
    global _ports, _lock
    _ports, _lock = _Ports(), threading.Lock()


os.register_at_fork(after_in_child=_start_anew)


def free_ports(count: int) -> list[int]:
    """Returns free loopback ports that no caller has got recently."""
    found: list[int] = []
    with _lock:
        while len(found) < count:
            port = _ports.next()
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found


def free_port() -> int:
    """Returns one free loopback port."""
    return free_ports(1)[0]


def contiguous_ports(count: int) -> int:
    """Returns the first of `count` neighbouring free ports. `count` is at most BLOCK_PORTS."""
    while True:
        ports = free_ports(count)
        if ports[-1] == ports[0] + count - 1:
            return ports[0]
