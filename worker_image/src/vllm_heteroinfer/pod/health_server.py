"""HTTP on a pod's health port: /healthz, /readyz and /group of a supervisor, /fetch of a fetch pod.

This module implements a small part of HTTP/1.1, because the supervisor uses only the standard library and
must answer from its own event loop. GET and HEAD only, one request per connection.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod.addresses import bind_host
from vllm_heteroinfer.pod.listening import ConnectionLimit, listen

REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRequest:
    """A request to the health port.

    Attributes:
        path: without the query.
        credentials: the header `Authorization`; "" if the request has none.
    """

    path: str
    credentials: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAnswer:
    """The answer to a request; `content_type` is the type of `body`, plain text by default."""

    status: HTTPStatus
    body: str
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


class HealthServer:
    """Answers GET requests through `answer` until closed."""

    def __init__(self, answer: Callable[[HealthRequest], HealthAnswer]) -> None:
        self._answer = answer
        self._connections = ConnectionLimit(MAX_CONNECTIONS)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens on the port, at addresses by which `host` is reached (`addresses.bind_host`).

        Raises:
            ContractError: the port is in use or cannot be opened.
        """
        try:
            self._server = await listen(self._serve, bind_host(host), port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise ContractError(
                f"health port {port} is not available: {error}. End the process that uses the port, or set "
                f"another health_port in {names.ENV_ADDRESSES}"
            ) from error

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection, which counts against the limit until it is closed."""
        abort = writer.transport.abort
        with self._connections.counting(abort):
            try:
                # After these errors, the client has left, is too slow, or sent no complete request.
                with contextlib.suppress(
                    OSError, TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError
                ):
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        _limit_unread(writer)
                        request = await reader.readuntil(b"\r\n\r\n")
                        response = _response(self._route(request), only_head=request.startswith(b"HEAD "))
                        writer.write(response)
                        writer.close()
                        await writer.wait_closed()
            finally:
                abort()

    def _route(self, request: bytes) -> HealthAnswer:
        """Parses a request and returns its answer."""
        request_line, *header_lines = request.decode("latin-1").split("\r\n")
        words = request_line.split(" ")  # such as GET /healthz HTTP/1.1
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return HealthAnswer(status=HTTPStatus.METHOD_NOT_ALLOWED, body="use GET or HEAD")
        fields = (line.partition(":") for line in header_lines)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        path = words[1].split("?", 1)[0]
        return self._answer(HealthRequest(path=path, credentials=headers.get("authorization", "")))


def _limit_unread(writer: asyncio.StreamWriter) -> None:
    """Lets the kernel drop the connection if the client does not read the answer in time.

    The limit also applies to data that this process has already passed to the kernel.
    """
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(REQUEST_TIMEOUT_S * 1000))


def _response(answer: HealthAnswer, *, only_head: bool) -> bytes:
    """Returns the bytes of an HTTP response."""
    body = (answer.body + "\n").encode()
    extra_headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{extra_headers}\r\n"
    )
    return head.encode() + (b"" if only_head else body)
