"""Runs a proxy in front of the API server, which fails as a test requests."""

import asyncio
import base64
import contextlib
import json
import re
import socket
import ssl
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

TLS_END_S = 30.0

_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "host", "keep-alive"})


@dataclass(slots=True, kw_only=True, eq=False)
class Fault:
    """How the proxy treats matching requests. The first matching fault applies.

    Attributes:
        path: regular expression, searched in the path with its query; a watch contains `watch=true`.
        method: regular expression of the whole HTTP method.
        status: if not 0, the proxy answers with this status, and the API server gets no request.
        message: message of the Status object in that answer.
        delay_s: wait before the request is forwarded or answered, and before each part of a watch.
        hang: blocks requests and open watches until the fault is removed.
        change: replaces the JSON body of the request, as a mutating webhook would.
        times: number of requests after which the fault ends (not with `hang`); None until it is removed.
        hits: number of requests that matched.
    """

    path: str
    method: str = ".*"
    status: int = 0
    message: str = "injected by the test"
    delay_s: float = 0.0
    hang: bool = False
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    times: int | None = None
    hits: int = 0

    def matches(self, method: str, path: str) -> bool:
        """Checks whether the fault applies to this request."""
        return re.fullmatch(self.method, method) is not None and re.search(self.path, path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that reached the proxy.

    Attributes:
        at: `time.monotonic()` of its arrival.
        method: HTTP method.
        path: path with the query.
    """

    at: float
    method: str
    path: str


class ApiProxy:
    """The proxy, which runs in the test's event loop.

    Attributes:
        kubeconfig: kubeconfig of clients that use the proxy.
        requests: all requests in their order.
    """

    def __init__(self, kubeconfig: Path, server: str, session: aiohttp.ClientSession) -> None:
        self.kubeconfig = kubeconfig
        self.requests: list[Request] = []
        self._server = server
        self._session = session
        self._faults: list[Fault] = []
        self._changed = asyncio.Event()
        self._watches: dict[asyncio.Task[Any], str] = {}

    def inject(self, path: str, **fields: Any) -> Fault:
        """Adds a `Fault` with these fields."""
        fault = Fault(path=path, **fields)
        self._faults.append(fault)
        self._notify()
        return fault

    def heal(self, *faults: Fault) -> None:
        """Removes these faults, or all."""
        self._faults = [fault for fault in self._faults if faults and fault not in faults]
        self._notify()

    def cut_watches(self, path: str = "") -> None:
        """Closes the connections of open watches whose path matches."""
        for task, watched in list(self._watches.items()):
            if re.search(path, watched):
                task.cancel()

    def count(self, path: str, method: str = ".*") -> int:
        """Counts the requests that match."""
        wanted = Fault(path=path, method=method)
        return sum(wanted.matches(request.method, request.path) for request in self.requests)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fault_of(self, method: str, path: str) -> Fault | None:
        return next((fault for fault in self._faults if fault.matches(method, path)), None)

    async def _hold(self, method: str, path: str) -> None:
        while (fault := self._fault_of(method, path)) is not None and fault.hang:
            await self._changed.wait()
        if fault is not None:
            await asyncio.sleep(fault.delay_s)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers a request according to the faults, otherwise from the API server."""
        method, path = request.method, request.path_qs
        self.requests.append(Request(at=time.monotonic(), method=method, path=path))
        body = await request.read()
        fault = self._fault_of(method, path)
        if fault is not None:
            fault.hits += 1
            if fault.times is not None and fault.hits >= fault.times:
                self._faults.remove(fault)
            await asyncio.sleep(fault.delay_s)
            if fault.hang:
                await self._hold(method, path)
            if fault.status:
                return _refuse(fault)
            if fault.change is not None and body:
                body = json.dumps(fault.change(json.loads(body))).encode()
        return await self._forward(request, body)

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Forwards a request to the API server, and its answer to the client."""
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method,
            self._server + request.raw_path,
            headers=headers,
            data=body or None,
            skip_auto_headers=("Content-Type",),
        ) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # the client has disconnected
                await response.prepare(request)
                if "watch" in request.query:
                    return await self._watch(request, answer, response)
                await response.write(await answer.read())
                await response.write_eof()
            return response

    async def _watch(
        self, request: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> web.StreamResponse:
        """Relays the parts of a watch until the watch ends, or until the test cuts it."""
        task = asyncio.current_task()
        assert task is not None
        self._watches[task] = request.path_qs
        try:
            async for part in answer.content.iter_any():
                await self._hold(request.method, request.path_qs)
                await response.write(part)
            await response.write_eof()
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            del self._watches[task]
        return response


def _refuse(fault: Fault) -> web.Response:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": fault.message,
        "reason": "Injected",
        "code": fault.status,
    }
    return web.json_response(status, status=fault.status)


def _ssl_context(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    """Builds a TLS context that trusts the cluster, with the user's client certificate if it exists."""
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile() as pem:
            pem.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
            pem.write(base64.b64decode(user["client-key-data"]))
            pem.flush()
            context.load_cert_chain(pem.name)
    return context


@contextlib.asynccontextmanager
async def api_proxy(kubeconfig: Path, through: Path) -> AsyncIterator[ApiProxy]:
    """Runs a proxy on loopback.

    It speaks plain HTTP to clients and TLS to the API server. A user with a token authenticates as without
    a proxy; for a user with a client certificate, the proxy presents the certificate.

    Args:
        kubeconfig: kubeconfig of the API server.
        through: file for the kubeconfig of clients that use the proxy.
    """
    config: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        made = socket.socket(*address[:3])
        sockets.add(made)
        return made

    connector = aiohttp.TCPConnector(ssl=_ssl_context(cluster, user), limit=0, socket_factory=make_socket)
    timeout = aiohttp.ClientTimeout(total=None)
    session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
    proxy = ApiProxy(through, cluster["server"], session)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        config["users"][0]["user"] = {"token": user["token"]} if "token" in user else {}
        through.touch(mode=0o600)
        through.write_text(yaml.safe_dump(config))
        yield proxy
    finally:
        proxy.heal()
        proxy.cut_watches()
        await runner.cleanup()
        await session.close()
        # The loop ends with the test and must close all connections first.
        while runner.server is not None and runner.server.connections:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The TLS connection of an aborted request ends once the API server has confirmed.
        async with asyncio.timeout(TLS_END_S):
            while any(each.fileno() >= 0 for each in sockets):
                await asyncio.sleep(0.01)
