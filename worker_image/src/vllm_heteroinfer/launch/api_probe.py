"""The leader's health checks of vLLM's API server. Stdlib and the contract only."""

import asyncio
from collections.abc import Awaitable, Callable

from heteroinfer_contract import names
from vllm_heteroinfer.pod.addresses import host_in_url

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 1.0
MAX_TRIES = 3
"""Maximum attempts of one check. A check repeats an attempt if this process hardly ran (see `probe_api`)."""


async def probe_api(
    address: Awaitable[str], port: int, on_result: Callable[[bool], None], awake_s: Callable[[], float]
) -> None:
    """Checks the health of vLLM's API server without end. Reports after each check whether it answered 200.

    Repeats an attempt without an answer immediately if this process ran for at most half of the time-out.
    The missing answer then proves nothing: it may wait unread in the kernel, or vLLM's API server did not run
    either.

    Args:
        address: the pod's own address, the target of the clients' Service. If it were loopback, a pod that
            refuses every client could be Ready, for example one without IPv4.
        awake_s: time that advances only while this process is scheduled (LoopClock), in seconds.
    """
    host = await address
    while True:
        healthy: bool | None = None
        for _ in range(MAX_TRIES):
            began_s = awake_s()
            healthy = await _api_is_healthy(host, port)
            if healthy is not None or awake_s() - began_s > PROBE_TIMEOUT_S / 2:
                break
        on_result(bool(healthy))
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _api_is_healthy(host: str, port: int) -> bool | None:
    """Returns whether vLLM's API server answered 200; None if no answer came in time.

    Returns False if the server refuses or breaks the connection.
    """
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                server = host_in_url(host)
                request = (
                    f"GET {names.PATH_API_HEALTH} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n"
                )
                writer.write(request.encode())
                status_line = await reader.readline()
                return status_line.split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    except TimeoutError:
        return None
    except (OSError, ValueError):  # ValueError: the first line is too long
        return False
