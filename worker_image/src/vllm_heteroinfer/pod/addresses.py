"""Where a pod is reached, and where its processes listen. Stdlib only."""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod.threads import call_aside

IPV6: Final = 6
"""The version of an IPv6 address."""


def resolve(host: str) -> str:
    """Returns the first IP address of a host; raises OSError naming it when it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise OSError(f"{host}: {error}; the pods of a group find each other by these names") from error


async def look_up(host: str, port: int) -> str:
    """Returns the first IP address of a host; raises OSError when it has none.

    A resolver may take half a minute, for which no end of the process waits.
    """

    def ask() -> str:
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except UnicodeError as error:
            raise OSError(f"{host!r} is no name: {error}") from error

    return await call_aside("name", ask)


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


def bind_address(host: str) -> str:
    """Returns `bind_host` for sockets that want an address: `::` takes IPv4 too.

    `kubectl port-forward` and probes of sidecars come in by loopback, so a pod listens on both. It is
    0.0.0.0 on a kernel without IPv6.
    """
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - guarded by NetworkPolicy
    return bind_host(host) or everywhere


def family_of(address: str) -> socket.AddressFamily:
    """Returns the address family of an IP address."""
    return socket.AF_INET6 if ipaddress.ip_address(address).version == IPV6 else socket.AF_INET


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound where `host` is reached, by IPv4 and IPv6; it does not listen yet.

    Raises:
        OSError: the port is taken.
    """
    address = bind_address(host)
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    return listener


def host_in_url(host: str) -> str:
    """Returns a host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
