"""A proxy between an operator and its API server: it tells what was asked, and can go silent.

Silent as a broken network is: connections stay open, nothing is refused, nothing comes.
"""

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "host", "keep-alive"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request.

    Attributes:
        method: of HTTP.
        path: without the query.
        watch: whether it asks for a watch.
    """

    method: str
    path: str
    watch: bool


Which = Callable[[Asked], bool]


class Between:
    """The proxy.

    Attributes:
        asked: every request that came, in order.
        held: those whose answer is being kept back now.
    """

    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._session = session
        self._silent: Which = lambda asked: False
        self._changed = asyncio.Event()
        self.asked: list[Asked] = []
        self.held: list[Asked] = []

    def silence(self, which: Which) -> None:
        """Keeps back, from now on, what these requests are answered; open watches too."""
        self._silent = which
        self._changed.set()
        self._changed = asyncio.Event()

    def restore(self) -> None:
        """Lets everything through again, first what was kept back."""
        self.silence(lambda asked: False)

    async def _pass(self, asked: Asked) -> None:
        if not self._silent(asked):
            return
        self.held.append(asked)
        try:
            while self._silent(asked):
                await self._changed.wait()
        finally:
            self.held.remove(asked)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Asks the API server the same, and streams its answer."""
        asked = Asked(method=request.method, path=request.path, watch="watch" in request.query)
        self.asked.append(asked)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method,
            self._server + request.raw_path,
            headers=headers,
            data=await request.read() or None,
            skip_auto_headers=("Content-Type",),
        ) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # who asked is gone
                await self._pass(asked)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await self._pass(asked)
                    await response.write(chunk)
                await response.write_eof()
            return response


@contextlib.asynccontextmanager
async def between(kubeconfig: Path, through: Path) -> AsyncIterator[Between]:
    """Runs a proxy on loopback, and writes `through`: the kubeconfig of whoever shall go through it.

    It speaks plain HTTP to its client, who needs a bearer token, and TLS to the API server.
    """
    config: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=authority), limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
    proxy = Between(cluster["server"], session)
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        through.touch(mode=0o600)
        through.write_text(yaml.safe_dump(config))
        yield proxy
    finally:
        proxy.restore()
        await runner.cleanup()
        await session.close()
