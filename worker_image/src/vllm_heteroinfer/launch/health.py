"""The supervisor's HTTP: /healthz, /readyz and, on the leader, /group; and its probe of the API server.

A few lines of HTTP/1.1 of our own, since the supervisor has the standard library only
and its answers must come from the loop that knows. GET only, one request a connection.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.launch.link import bind_host

REQUEST_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent for a path; `body` is text, or JSON if `content_type` says so."""

    status: HTTPStatus
    body: str
    content_type: str = "text/plain; charset=utf-8"


class HealthServer:
    """Answers GET requests through `answer`, a function of the path, until closed."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens where `host` is reached.

        Raises:
            ContractError: the port cannot be taken.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host=bind_host(host), port=port)
        except OSError as error:
            raise ContractError(
                f"health port {port} cannot be used: {error}; end the process that has it, or set another "
                f"health_port in {names.ENV_ADDRESSES}"
            ) from error

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                try:
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(self._route(request)))
                    await writer.drain()
                except asyncio.IncompleteReadError:
                    pass  # the client left
                finally:
                    writer.close()

    def _route(self, request: bytes) -> Answer:
        line = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(line) != 3 or line[0] not in ("GET", "HEAD"):
            return Answer(status=HTTPStatus.METHOD_NOT_ALLOWED, body="GET only")
        return self._answer(line[1].split("?", 1)[0])


def _response(answer: Answer) -> bytes:
    body = (answer.body + "\n").encode()
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def probe_api(host: str, port: int, on_result: Callable[[bool], None]) -> None:
    """Asks the API server for its health for ever, and says after each try whether it answered 200.

    Args:
        host: the pod's own host name or address; the server listens on it or on all.
        port: the OpenAI API's.
        on_result: called every half a second.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = "127.0.0.1"  # the server listens on all addresses when the pod has a name
    while True:
        on_result(await _api_is_healthy(host, port))
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _api_is_healthy(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                request = f"GET {names.PATH_API_HEALTH} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode())
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
