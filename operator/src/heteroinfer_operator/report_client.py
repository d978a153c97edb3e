"""The one client of `/group`, and of the other answers of pods' health ports."""

import asyncio
import errno
import socket
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import aiohttp

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_contract.report_access import ReportReader

MOST_BYTES: Final = 2**20
NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, ContractError)
"""What every question raises without a usable answer; ContractError and UnicodeDecodeError for nonsense."""
_CONNECT_SHARE: Final = 0.8
"""Of the time for an answer. The kernel accepts a connection however busy the leader itself is."""
_OWN_FAULTS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that this machine causes when it connects: they prove nothing about the pod."""
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class ReportClient:
    """Asks pods directly. Anything may answer at a pod's address, so each answer is bounded and checked."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    async def read_group(
        self, host: str, port: int, reader: ReportReader, *, timeout_s: float
    ) -> GroupReport:
        """Returns what a leader says of its group, all of it if it takes the reader's key.

        Raises:
            NO_ANSWER: one of them; ContractError also if the leader has not signed its report.
        """
        async with asyncio.timeout(timeout_s):
            for _ in range(2):  # without an earlier challenge, the first answer only holds one
                text, headers = await self._get(host, port, names.PATH_GROUP, timeout_s, reader.headers())
                whole = reader.read(headers, text)
                if whole is not None:
                    break
        return parse_report(text)

    async def read_fetch(self, host: str, port: int, *, timeout_s: float) -> FetchProgress:
        """Returns how far a pod is with fetching a model; raises one of NO_ANSWER."""
        text, _ = await self._get(host, port, names.PATH_FETCH, timeout_s)
        return FetchProgress.from_json(text)

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
        """Returns the body and the headers of a 200; raises one of NO_ANSWER."""
        if self._session is None:
            # Pods are reached directly: no proxy of the environment, and no redirects below.
            # Each question has a connection of its own: a kept one would not tell that the node is gone.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SHARE * timeout_s)
        url = f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"
        async with self._session.get(
            url, headers=headers, allow_redirects=False, timeout=timeout
        ) as response:
            response.raise_for_status()
            if response.status != HTTPStatus.OK:
                raise ContractError(f"got HTTP status {response.status}, expected {HTTPStatus.OK.value}")
            body = bytearray()
            async for piece in response.content.iter_any():  # read(n) gives what has arrived, not n bytes
                body += piece
                _check_size(len(body))
            return body.decode(), response.headers


def parse_report(text: str) -> GroupReport:
    """Returns the report that `text` is; raises ContractError for too much text, or another one."""
    _check_size(len(text))
    return GroupReport.from_json(text)


def is_unreached(error: Exception) -> bool:
    """Returns whether one of NO_ANSWER proves that the pod took no connection."""
    unreached = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return unreached and getattr(error, "errno", None) not in _OWN_FAULTS


async def is_reached(host: str, port: int, *, timeout_s: float) -> bool:
    """Returns whether a port takes a connection, as the kernel does for a busy process too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # of this process: it says nothing of the pod
        return True
    with connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
        except TimeoutError:
            return _is_connected(connection)
        except (OSError, ValueError, OverflowError) as error:  # nobody listens, no address, no port
            return getattr(error, "errno", None) in _OWN_FAULTS
    return True


def _is_connected(connection: socket.socket) -> bool:
    """Returns whether a connection was made that this process, being busy, has not seen in time."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ContractError(f"got more than {MOST_BYTES} bytes, expected the report of a group")
