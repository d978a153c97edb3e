"""The leader's supervisor asks its API server for its health. Stdlib and the contract only."""

import asyncio
import ipaddress
from collections.abc import Callable

from heteroinfer_contract import names

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 1.0


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
    except (OSError, TimeoutError, ValueError):  # ValueError: its first line has no end
        return False
