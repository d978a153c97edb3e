"""Where a pod is reached, and where its processes listen. Stdlib only."""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Mapping

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError


def resolve(host: str) -> str:
    """Returns the IPv4 address of a host; raises OSError naming it when it has none."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise OSError(f"{host}: {error}; the pods of a group find each other by these names") from error


async def look_up(host: str, port: int) -> str:
    """Returns the first IP address of a host; raises OSError when it has none.

    In a thread that no end of the process waits for: a resolver may take half a minute, and asyncio's own
    threads are joined.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def settle(answer: str | OSError) -> None:
        if found.done():  # nobody waits any more
            return
        if isinstance(answer, OSError):
            found.set_exception(answer)
        else:
            found.set_result(answer)

    def ask() -> None:
        answer: str | OSError
        try:
            answer = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            answer = error
        except UnicodeError as error:
            answer = OSError(f"{host!r} is no name: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=ask, name="name", daemon=True).start()
    return await found


def own_address(env: Mapping[str, str]) -> str:
    """Returns the IP address at which peers reach this pod, as its supervisor has found it.

    Raises:
        ContractError: this process was not started by a supervisor.
    """
    if not env.get(names.ENV_OWN_ADDRESS):
        raise ContractError(f"{names.ENV_OWN_ADDRESS} is not set; ranks are started by `heteroinfer-worker`")
    return env[names.ENV_OWN_ADDRESS]


def bind_host(host: str) -> str | None:
    """Returns where to listen so that `host` is reached: itself if it is loopback, else everywhere.

    A pod's own name may not resolve yet when its supervisor starts.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None


def bind_host_ipv4(host: str) -> str:
    """Returns `bind_host` for sockets that want an address: 0.0.0.0 for every interface.

    `kubectl port-forward` and probes of sidecars come in by loopback, so a pod listens on both.
    """
    return bind_host(host) or "0.0.0.0"  # noqa: S104 - guarded by NetworkPolicy
