"""HTTP client of pods' health ports: group reports, progress of a fetch, and readiness."""

import asyncio
import errno
import re
import socket
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import aiohttp

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import QUESTION_HEADER, FetchProgress
from heteroinfer_contract.report_access import ReportReader, credentials_headers

MAX_REPORT_BYTES: Final = 2**20
NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, ContractError)
"""Errors of a request without a usable answer. Invalid answers raise ContractError or UnicodeDecodeError."""
_CONNECT_SHARE: Final = 0.8
"""Share of the timeout for the connection. A connection must fail earlier than an answer, so that a failed
connection differs from a missing answer: the kernel accepts connections even if the leader is busy."""
_OWN_FAULTS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection whose cause is this machine. These errors prove nothing about the pod."""
_QUESTION: Final = re.compile(r"[0-9]{1,4}", re.ASCII)
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class ReportClient:
    """Sends requests to pods.

    The client checks each answer, because any process may answer at the address of a pod.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def read_group(
        self, host: str, port: int, reader: ReportReader, *, timeout_s: float
    ) -> GroupReport:
        """Returns a leader's report on its group, complete if the leader accepts the reader's key.

        Raises:
            NO_ANSWER: the request failed (any class of this tuple). ContractError: the report is not signed.
        """
        async with asyncio.timeout(timeout_s):
            # A first answer without a report has the leader's challenge. The second request then contains the
            # answer to this challenge.
            for _ in range(2):
                text, headers = await self._get(
                    host, port, names.PATH_GROUP, timeout_s, reader.request_headers()
                )
                report = reader.read(headers, text)
                if report is not None:
                    break
        return parse_report(text)

    async def read_fetch(self, host: str, port: int, *, timeout_s: float) -> tuple[FetchProgress, int | None]:
        """Returns the progress of a fetch pod, and the number of its open question (None without a question).

        The question is whether the pod may remove old commits.

        Raises:
            NO_ANSWER: the request failed (any class of this tuple).
        """
        text, headers = await self._get(host, port, names.PATH_FETCH, timeout_s)
        question = headers.get(QUESTION_HEADER)
        if question is not None and not _QUESTION.fullmatch(question):
            raise ContractError(f"{QUESTION_HEADER} must be a number of up to 4 digits (got {question!r})")
        return FetchProgress.from_json(text), None if question is None else int(question)

    async def allow_removal(self, host: str, port: int, token: str, *, timeout_s: float) -> None:
        """Allows a fetch pod to remove old commits: answers yes to its open question (`read_fetch`).

        The answer is a GET with the token. A pod without an open question ignores the token.

        Args:
            token: proves that the operator answers, and that it answers this question.

        Raises:
            NO_ANSWER: the request failed (any class of this tuple).
        """
        await self._get(host, port, names.PATH_FETCH, timeout_s, credentials_headers(token))

    async def is_ready(self, host: str, port: int, path: str, *, timeout_s: float) -> bool:
        """Returns whether a readiness probe of this path succeeds."""
        try:
            await self._get(host, port, path, timeout_s)
        except NO_ANSWER:
            return False
        return True

    async def _get(
        self, host: str, port: int, path: str, timeout_s: float, headers: Mapping[str, str] = _NO_HEADERS
    ) -> tuple[str, Mapping[str, str]]:
        """Returns the body and the headers of an answer with status 200; raises one of NO_ANSWER."""
        if self._session is None:
            # Connect directly, without a proxy from the environment. Use a new connection for each request,
            # because a kept connection would not show that the node is gone.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SHARE * timeout_s)
        url = f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"
        async with self._session.get(
            url, headers=headers, allow_redirects=False, timeout=timeout
        ) as response:
            response.raise_for_status()
            if response.status != HTTPStatus.OK:
                raise ContractError(f"HTTP status must be {HTTPStatus.OK.value} (got {response.status})")
            body = bytearray()
            # Not read(n), which may return fewer than n bytes.
            async for piece in response.content.iter_any():
                body += piece
                _check_size(len(body))
            return body.decode(), response.headers


def parse_report(text: str) -> GroupReport:
    """Parses a report; raises ContractError if the text is too long or not a report."""
    _check_size(len(text))
    return GroupReport.from_json(text)


def is_unreached(error: Exception) -> bool:
    """Returns whether an error of NO_ANSWER proves that the pod accepted no connection."""
    has_no_connection = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return has_no_connection and getattr(error, "errno", None) not in _OWN_FAULTS


async def is_reached(host: str, port: int, *, timeout_s: float) -> bool:
    """Returns whether a port accepts a connection. Also True if an error of this process prevents the check.

    The kernel accepts a connection even if the process that listens is busy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a fault of this process proves nothing about the pod
        return True
    with connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
        except TimeoutError:  # perhaps connected, but this event loop was too busy to notice
            return _is_connected(connection)
        except (OSError, ValueError, OverflowError) as error:  # no listener, or an invalid address or port
            return getattr(error, "errno", None) in _OWN_FAULTS
    return True


def _is_connected(connection: socket.socket) -> bool:
    """Returns whether a connection succeeded although the busy event loop did not notice that in time."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _check_size(size: int) -> None:
    if size > MAX_REPORT_BYTES:
        raise ContractError(
            f"the report must have at most {MAX_REPORT_BYTES} bytes (got more). Check which program listens "
            "on the health port of the pod"
        )
