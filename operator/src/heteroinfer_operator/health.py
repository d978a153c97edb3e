"""The operator's HTTP port: /healthz, /readyz and /metrics."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.metrics import OperatorMetrics

LABELS_SHOWN: Final = 5


@dataclass(slots=True, kw_only=True)
class Health:
    """The progress of the operator's start, and the time of its last resync.

    Attributes:
        stale_s: highest age of the last resync, in seconds. If the resync is older, the process is stuck.
        waits_for: the thing that the start waits for; "" once the operator works.
        describe_missing: describes functions that are missing while the operator works; returns "" if none is
            missing.
        standby: whether another replica holds the Lease. A standby replica counts as ready.
        resynced_at: time of the last resync attempt, or of the start of work before the first resync; None
            before the start of work.
        stale_caches: labels of caches that received nothing for a long time. A resync with stale caches does
            not count.
        clock: monotonic clock, in seconds.
    """

    stale_s: float
    waits_for: str = "the API server"
    describe_missing: Callable[[], str] = str
    standby: bool = False
    resynced_at: float | None = None
    stale_caches: tuple[str, ...] = ()
    clock: Callable[[], float] = field(default=time.monotonic)

    def record_resync(self) -> None:
        self.resynced_at = self.clock()

    def stuck_reason(self) -> str:
        """Returns why Kubernetes must restart this process, or ""."""
        if self.resynced_at is None:
            return ""
        age_s = self.clock() - self.resynced_at
        if age_s <= self.stale_s:
            return ""
        why = f": no data received about {list_some(self.stale_caches)}" if self.stale_caches else ""
        return f"no resync for {age_s:.0f} s{why}"


def list_some(labels: Sequence[str]) -> str:
    """Lists at most LABELS_SHOWN labels, and the number of further labels.

    With many namespaces there are hundreds of labels.
    """
    more = len(labels) - LABELS_SHOWN
    return ", ".join(labels[:LABELS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _listen(port: int) -> socket.socket:
    """Opens a listening socket for both IPv4 and IPv6. Port 0 selects one free port for both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


@contextlib.asynccontextmanager
async def serve(health: Health, metrics: OperatorMetrics, port: int) -> AsyncIterator[int]:
    """Serves the HTTP port while the context is open; yields the port's number.

    Raises:
        HeteroInferError: the port cannot be opened, for example because it is in use.
    """

    async def healthz(request: web.Request) -> web.Response:
        stuck = health.stuck_reason()
        return web.Response(text=stuck or "ok", status=500 if stuck else 200)

    async def readyz(request: web.Request) -> web.Response:
        """Answers 503 until the operator works; a standby replica counts as ready."""
        missing = health.describe_missing()
        working_text = f"ok, but {missing}" if missing else "ok"
        text = f"waiting for {health.waits_for}" if health.waits_for else working_text
        is_ready = health.standby or not health.waits_for
        return web.Response(text=text, status=200 if is_ready else 503)

    async def exposition(request: web.Request) -> web.Response:
        # In a thread, because a thousand resources have tens of thousands of lines, and reconciles must not
        # wait while these lines are built.
        body = await asyncio.to_thread(metrics.exposition)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.SockSite(runner, _listen(port)).start()
        except OSError as error:
            raise HeteroInferError(
                f"port {port}: cannot listen ({error.strerror}). Set HETEROINFER_HTTP_PORT to a free port",
                reason="PortTaken",
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
