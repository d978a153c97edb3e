"""Destinations that the operator's NetworkPolicies allow for pods that download a model. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.stored_fields import read_json_parts

METADATA_ADDRESSES: Final = (
    "169.254.0.0/16",  # link-local: AWS, Azure, GCP, Oracle and others, agents of nodes
    "100.100.100.200/32",  # Alibaba
    "168.63.129.16/32",  # Azure's WireServer
    "fe80::/10",  # link-local
    "fd00:ec2::/32",  # AWS
    "fd20:ce::254/128",  # GCP
    "fd00:c1::a9fe:a9fe/128",  # Oracle
)
"""Addresses at which clouds give credentials to any process on a node."""
_URL_VARIABLES: Final = frozenset({names.ENV_HUB_ENDPOINT, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})
"""Variables, in upper case, with the URL to which the download connects."""
_DEFAULT_PORTS: Final = MappingProxyType(
    {"http": 80, "https": 443, "socks4": 1080, "socks4a": 1080, "socks5": 1080, "socks5h": 1080}
)
"""Default ports of URLs, by scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEgress:
    """Destinations that an installation allows for pods that download a model.

    Attributes:
        ports: TCP ports.
        cidrs: address ranges.
        excepted: address ranges that stay closed.
    """

    ports: tuple[int, ...] = (80, 443)
    cidrs: tuple[str, ...] = ("0.0.0.0/0", "::/0")
    excepted: tuple[str, ...] = METADATA_ADDRESSES

    @classmethod
    def from_json(cls, text: str) -> "FetchEgress":
        """Reads the chart's fetchEgress; "" gives the defaults.

        Raises:
            HeteroInferError: the text is not valid.
        """
        try:
            parts = read_json_parts(text, ("ports", "cidrs", "except"))
            # `except` cannot be the name of a field, because Python reserves the word.
            key_by_field = {"ports": "ports", "cidrs": "cidrs", "excepted": "except"}
            given = {field: parts[key] for field, key in key_by_field.items() if parts.get(key) is not None}
        except ValueError as error:
            raise _build_error(str(error)) from error
        if not all(isinstance(values, list) for values in given.values()):
            raise _build_error(f"ports, cidrs and except must be lists (got {text[:200]!r})")
        fields = {field: tuple(values) for field, values in given.items()}
        egress = cls(**fields)
        for port in egress.ports:
            if type(port) is not int or not 1 <= port <= 65535:  # isinstance would accept true
                raise _build_error(f"ports: must be whole numbers from 1 to 65535 (got {port!r})")
        for cidr in (*egress.cidrs, *egress.excepted):
            _parse_network(cidr)
        return egress

    def rules(self) -> list[Manifest]:
        """Returns the egress rules of a policy; no rule if no address or no port is open.

        A rule without destinations would open all addresses, and a rule without ports all ports.
        """
        excepted_networks = [_parse_network(cidr) for cidr in self.excepted]
        blocks = []
        for cidr in self.cidrs:
            network = _parse_network(cidr)
            is_closed = any(_is_within(network, excepted) for excepted in excepted_networks)
            if is_closed:
                continue
            # The API server refuses an exception outside the range of its block.
            exceptions = [str(excepted) for excepted in excepted_networks if _is_within(excepted, network)]
            blocks.append(
                {"ipBlock": {"cidr": str(network), **({"except": exceptions} if exceptions else {})}}
            )
        ports = [{"protocol": "TCP", "port": port} for port in self.ports]
        return [{"to": blocks, "ports": ports}] if blocks and ports else []

    def describe_closed(self, spec: HeteroInferenceSpec) -> str:
        """Describes the variables of a spec whose port is closed or unknown, with the fix; "" for none."""
        return "; ".join(self._find_closed(spec))

    def _find_closed(self, spec: HeteroInferenceSpec) -> Iterator[str]:
        """Yields a message for each variable of a spec whose port is closed or unknown."""
        open_ports = ", ".join(map(str, self.ports)) or "none"
        for variable in spec.engine.env:
            if variable.name.upper() not in _URL_VARIABLES or variable.value == "":
                continue
            if variable.value is None:  # the value is in a Secret or a ConfigMap
                yield (
                    f"the NetworkPolicy of the fetch pod opens only ports {open_ports}, and the operator "
                    f"cannot read the port of {variable.name} (engine.env, valueFrom). If the pod cannot "
                    "connect, set the URL as a plain value, or add its port to the chart's fetchEgress.ports"
                )
                continue
            port = _port_of(variable.value)
            if port is not None and port not in self.ports:
                yield (
                    f"the NetworkPolicy of the fetch pod opens only ports {open_ports}, but {variable.name} "
                    f"(engine.env) needs port {port}. Use an open port, or add {port} to the chart's "
                    "fetchEgress.ports"
                )


_Network = IPv4Network | IPv6Network


def _parse_network(cidr: object) -> _Network:
    """Returns an address range; raises HeteroInferError if the text is not a range."""
    try:
        if not isinstance(cidr, str) or "/" not in cidr:
            raise ValueError
        return ip_network(cidr, strict=False)
    except ValueError as error:
        raise _build_error(
            f"cidrs and except: must be address ranges such as 10.0.0.0/8 (got {cidr!r})"
        ) from error


def _is_within(part: _Network, whole: _Network) -> bool:
    """Reports whether an address range lies within another range of the same family."""
    if isinstance(part, IPv4Network):
        return isinstance(whole, IPv4Network) and part.subnet_of(whole)
    return isinstance(whole, IPv6Network) and part.subnet_of(whole)


def _port_of(url: str) -> int | None:
    """Returns the port of a URL; None if the text is not a URL or its scheme has no known port."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        return None
    return port or _DEFAULT_PORTS.get(parts.scheme)


def _build_error(message: str) -> HeteroInferError:
    """Returns the error for an invalid fetchEgress of the chart."""
    return HeteroInferError(
        f"HETEROINFER_FETCH_EGRESS (fetchEgress of the chart): {message}. "
        "Correct fetchEgress in the chart's values",
        reason=FailureReason.BAD_SETTINGS.value,
    )
