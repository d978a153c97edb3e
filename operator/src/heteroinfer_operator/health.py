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
    """How far the operator has come, and when it last showed that it works.

    Attributes:
        stale_s: working, but without a resync for so long: stuck.
        waits_for: what it waits for in words; "" once it works.
        left_out: returns what it cannot do while it works, in words; "" if it does all.
        standby: whether it waits for another replica, and so is as ready as it will be.
        resynced_at: when the last resync was tried, or work began; None before.
        stale_caches: copies of what the API server stores that nothing was received of for long; a resync
            over them does not count.
        clock: seconds that never go back.
    """

    stale_s: float
    waits_for: str = "the API server"
    left_out: Callable[[], str] = str
    standby: bool = False
    resynced_at: float | None = None
    stale_caches: tuple[str, ...] = ()
    clock: Callable[[], float] = field(default=time.monotonic)

    def resynced(self) -> None:
        """Notes that a resync was tried."""
        self.resynced_at = self.clock()

    def stuck(self) -> str:
        """Returns why the process should be started again, or ""."""
        if self.resynced_at is None:
            return ""
        age_s = self.clock() - self.resynced_at
        if age_s <= self.stale_s:
            return ""
        why = f": nothing received of {some_of(self.stale_caches)}" if self.stale_caches else ""
        return f"no resync for {age_s:.0f} s{why}"


def some_of(labels: Sequence[str]) -> str:
    """Returns the first few labels, and how many more there are: many namespaces have hundreds."""
    more = len(labels) - LABELS_SHOWN
    return ", ".join(labels[:LABELS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _listen(port: int) -> socket.socket:
    """Returns a socket for IPv4 and IPv6 alike, on one port also when that is left open (0)."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


@contextlib.asynccontextmanager
async def serve(health: Health, metrics: OperatorMetrics, port: int) -> AsyncIterator[int]:
    """Serves as long as the context lasts; yields the port.

    Raises:
        HeteroInferError: the port is taken.
    """

    async def healthz(request: web.Request) -> web.Response:
        stuck = health.stuck()
        return web.Response(text=stuck or "ok", status=500 if stuck else 200)

    async def readyz(request: web.Request) -> web.Response:
        waiting = health.waits_for if not health.standby else ""
        left_out = health.left_out()
        works = f"ok, but {left_out}" if left_out else "ok"
        text = f"waiting for {health.waits_for}" if health.waits_for else works
        return web.Response(text=text, status=503 if waiting else 200)

    async def exposition(request: web.Request) -> web.Response:
        # Some tens of thousands of lines with a thousand resources: reconciles must not wait for them.
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
                f"port {port} is taken ({error.strerror}): set HETEROINFER_HTTP_PORT to a free one",
                reason="PortTaken",
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
