"""Follows the API server's watches, and records the time at which each change arrived."""

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import OK, HTTPException, HTTPSConnection
from typing import Any

from tests.cluster.control_plane import site_of
from tests.cluster.running_cluster import Cluster

POLL_S = 0.02
RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One event of a watch.

    Attributes:
        at: Unix time of its arrival, in seconds.
        kind: ADDED, MODIFIED or DELETED.
        stored: the object.
    """

    at: float
    kind: str
    stored: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.stored["metadata"]["name"])


class Watch:
    """Follows a collection. `changes` has the events since the begin of the context.

    If a watch breaks, for example because the API server is killed, a new one starts: existing objects arrive
    again as ADDED.

    Args:
        cluster: cluster to watch.
        path: path of the collection, with a selector if not all of it is needed.
    """

    def __init__(self, cluster: Cluster, path: str) -> None:
        self.changes: list[Change] = []
        self._site, pki = site_of(cluster.state)
        self._context: ssl.SSLContext = pki.client_context("admin")
        self._path = f"{path}{'&' if '?' in path else '?'}watch=true"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = threading.Event()
        self._ended = threading.Event()
        self._connection: HTTPSConnection | None = None

    def __enter__(self) -> "Watch":
        self._thread.start()
        assert self._began.wait(10), "the API server did not start the watch"
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            # This ends the other thread's read. Closing the connection would free its buffer during the read.
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def find(self, accept: Callable[[Change], bool], *, since: float = 0.0) -> Change | None:
        """Returns the first change after `since` that `accept` accepts, or None."""
        return next((change for change in list(self.changes) if change.at >= since and accept(change)), None)

    def wait_for(
        self, what: str, accept: Callable[[Change], bool], timeout_s: float, *, since: float = 0.0
    ) -> Change:
        """Waits for a change after `since` that `accept` accepts, and returns it.

        Raises:
            AssertionError: no change was accepted in time. The message has the last change.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.find(accept, since=since)) is None:
            if time.monotonic() > deadline:
                last = json.dumps(self.changes[-1].stored.get("status")) if self.changes else "none"
                raise AssertionError(f"not within {timeout_s:g} s: {what}; the last state: {last[:4000]}")
            time.sleep(POLL_S)
        return found

    def _run(self) -> None:
        """Reads events until the context ends. Starts a new watch whenever one breaks."""
        while not self._ended.is_set():
            self._connection = HTTPSConnection(
                self._site.address, self._site.api_port, context=self._context, timeout=1200
            )
            with contextlib.suppress(OSError, HTTPException), contextlib.closing(self._connection):
                self._connection.request("GET", self._path)
                answer = self._connection.getresponse()
                if answer.status == OK:  # a starting API server refuses requests for a moment
                    self._began.set()
                    while line := answer.readline():
                        self._note(json.loads(line))
            self._ended.wait(RETRY_S)

    def _note(self, line: dict[str, Any]) -> None:
        if line["type"] in {"ADDED", "MODIFIED", "DELETED"}:
            self.changes.append(Change(at=time.time(), kind=line["type"], stored=line["object"]))


def condition_of(stored: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns a condition of a stored object, or an empty one if there is none of this type."""
    conditions = stored.get("status", {}).get("conditions", ())
    return next((dict(each) for each in conditions if each["type"] == kind), {})
