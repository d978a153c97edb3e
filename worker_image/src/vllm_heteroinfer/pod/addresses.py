"""Where a pod is reached, and where its processes listen. Stdlib only."""

import ipaddress
import socket
from collections.abc import Mapping

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod.threads import call_aside


def resolve(host: str) -> str:
    """Returns the IPv4 address of a host; raises OSError naming it when it has none."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
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


def bind_host_ipv4(host: str) -> str:
    """Returns `bind_host` for sockets that want an address: 0.0.0.0 for every interface.

    `kubectl port-forward` and probes of sidecars come in by loopback, so a pod listens on both.
    """
    return bind_host(host) or "0.0.0.0"  # noqa: S104 - guarded by NetworkPolicy
