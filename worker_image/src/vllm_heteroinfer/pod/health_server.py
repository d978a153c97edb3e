"""HTTP on a pod's health port: /healthz, /readyz and /group of a supervisor, /fetch of a fetch pod.

A few lines of HTTP/1.1 of our own, since the supervisor has the standard library only
and its answers must come from the loop that knows. GET only, one request a connection.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod.addresses import bind_host

REQUEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAnswer:
    """What is sent for a path; `body` is text, or JSON if `content_type` says so."""

    status: HTTPStatus
    body: str
    content_type: str = "text/plain; charset=utf-8"


class HealthServer:
    """Answers GET requests through `answer`, a function of the path, until closed."""

    def __init__(self, answer: Callable[[str], HealthAnswer]) -> None:
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

    def _route(self, request: bytes) -> HealthAnswer:
        line = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(line) != 3 or line[0] not in ("GET", "HEAD"):
            return HealthAnswer(status=HTTPStatus.METHOD_NOT_ALLOWED, body="GET only")
        return self._answer(line[1].split("?", 1)[0])


def _response(answer: HealthAnswer) -> bytes:
    body = (answer.body + "\n").encode()
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
