"""Addresses of pods, and the addresses at which their processes listen. Stdlib only."""

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
    """Returns the first IP address of a host.

    Raises:
        OSError: the host has no address; the message names the host.
    """
    try:
        return _first_address(host, None)
    except OSError as error:
        raise OSError(f"{host}: has no address ({error}). Check the DNS names of the group's pods") from error


def _first_address(host: str, port: int | None) -> str:
    """Returns the first IP address that the resolver has for a host."""
    *_, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return str(socket_address[0])


async def look_up(host: str, port: int) -> str:
    """Returns the first IP address of a host; raises OSError if the host has none.

    A resolver may take half a minute. A process that ends does not wait for its resolver.
    """

    def resolve_blocking() -> str:
        """Returns the first address of the host."""
        try:
            return _first_address(host, port)
        except UnicodeError as error:
            raise OSError(
                f"{host!r}: is not a valid host name ({error}). Correct {names.ENV_ADDRESSES}"
            ) from error

    return await call_aside("name", resolve_blocking)


def own_address(env: Mapping[str, str]) -> str:
    """Returns the IP address at which peers reach this pod, which its supervisor looked up.

    Raises:
        ContractError: no supervisor started this process.
    """
    if not env.get(names.ENV_OWN_ADDRESS):
        raise ContractError(
            f"{names.ENV_OWN_ADDRESS}: must be set (the supervisor sets it when it starts a rank). Start "
            "the pod with `heteroinfer-worker`, which starts the ranks"
        )
    return env[names.ENV_OWN_ADDRESS]


def bind_host(host: str) -> str | None:
    """Returns the address to listen at for `host`: a loopback address itself, otherwise None (all addresses).

    A pod's own name may not resolve yet when its supervisor starts.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None


def bind_address(host: str) -> str:
    """Returns the address to listen at for `host`: a loopback address itself, otherwise all addresses.

    Use this function for sockets that need an address, and `bind_host` for other sockets. All addresses are
    `::`, which includes IPv4, or 0.0.0.0 on a kernel without IPv6. A pod listens on all addresses because
    `kubectl port-forward` and probes of sidecars use loopback.
    """
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - guarded by NetworkPolicy
    return bind_host(host) or everywhere


def family_of(address: str) -> socket.AddressFamily:
    """Returns the address family of an IP address."""
    return socket.AF_INET6 if ipaddress.ip_address(address).version == IPV6 else socket.AF_INET


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound at `bind_address`, for IPv4 and IPv6, and does not listen yet.

    Raises:
        OSError: the port is in use.
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
    """Formats a host for a URL. An IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host
