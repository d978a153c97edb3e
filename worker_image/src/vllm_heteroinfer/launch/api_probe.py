"""The leader's supervisor asks its API server for its health. Stdlib and the contract only."""

import asyncio
from collections.abc import Awaitable, Callable

from heteroinfer_contract import names
from vllm_heteroinfer.pod.addresses import host_in_url

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 1.0
MOST_TRIES = 3
"""In a row, of which none is counted but the last: so often this process may have no turn while it waits."""


async def probe_api(
    address: Awaitable[str], port: int, on_result: Callable[[bool], None], awake_s: Callable[[], float]
) -> None:
    """Asks the API server for its health for ever, and says after each try whether it answered 200.

    No answer says nothing if this process had no turn for half of the time: the answer may lie in the kernel,
    unread, and who shares the machine had no turn either. Then it asks again at once.

    Args:
        address: the pod's own, at which the clients' Service sends requests. An answer on loopback alone
            would make a pod Ready that refuses every client, such as one without IPv4.
        awake_s: a time that goes on only while this process has its turns (LoopClock), in seconds.
    """
    host = await address
    while True:
        healthy: bool | None = None
        for _ in range(MOST_TRIES):
            began_s = awake_s()
            healthy = await _api_is_healthy(host, port)
            if healthy is not None or awake_s() - began_s > PROBE_TIMEOUT_S / 2:
                break
        on_result(bool(healthy))
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _api_is_healthy(host: str, port: int) -> bool | None:
    """Returns whether it answered 200, None if it has not answered in time."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                server = host_in_url(host)
                request = (
                    f"GET {names.PATH_API_HEALTH} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n"
                )
                writer.write(request.encode())
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    except TimeoutError:
        return None
    except (OSError, ValueError):  # ValueError: its first line has no end
        return False
