"""Runs a network between follower and leader that records the data, and that can be cut."""

import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Iterator

from tests.integration.launch.groups import TinyGroup


class Wire:
    """A relayed connection: it records the data, and can be cut like a network.

    Attributes:
        swallows: number of next connections that are accepted but not relayed.
        refuses: whether connections are reset immediately.
    """

    def __init__(self, port: int) -> None:
        self.sent: list[bytes] = []
        self._target = port
        self._ends: list[socket.socket] = []
        self._all: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._closed = False
        self.swallows = 0
        self.refuses = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        """Accepts connections, and swallows, refuses or relays each."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self._closed:
                    near.close()
                    return
                if self.swallows:
                    self.swallows -= 1
                    self._all.append(near)
                    continue
                if self.refuses:
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._ends = [near, far]
                self._all += self._ends
                threading.Thread(target=self._copy, args=(near, far, self.sent), daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, []), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, record: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                record.append(chunk)
                target.sendall(chunk)
        for end in (source, target) if source in self._ends else ():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Cuts the connection. Both ends get a RST."""
        cut, self._ends = self._ends, []  # or the copying threads would close the connection in order
        for end in cut:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)
                end.close()

    def close(self) -> None:
        """Ends the accepting thread, and closes all connections."""
        self._closed = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._accepting.join(5)
        self._server.close()
        for end in self._all:
            end.close()


@contextlib.contextmanager
def wired(group: TinyGroup) -> Iterator[Wire]:
    """Starts the group with a wire between follower and leader."""
    group.start_pod(0)
    leader = group.launches[0].address
    wire = Wire(leader.control_port)
    through = dataclasses.replace(leader, control_port=wire.port)
    launch = dataclasses.replace(group.launches[1], addresses=(through, group.launches[1].addresses[1]))
    group.start_pod(1, launch=launch)
    try:
        yield wire
    finally:
        wire.close()
