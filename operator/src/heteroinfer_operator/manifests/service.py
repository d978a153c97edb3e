"""Services of a resource: one for clients, one headless for each group. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner

_ALIAS: Final = "ExternalName"
"""Type of a Service that is another name's, whatever it selects."""

LEFT_TO_OTHER_PROXIES: Final = frozenset(
    {"service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"}
)
"""Labels of a Service that kube-proxy leaves alone (`cmd/kube-proxy/app/server.go`): it leads nowhere."""
_EVERYWHERE: Final = "Cluster"
"""Traffic policy of a Service that leads clients of every node to every leader."""


def build_client_service(owner: Owner, ports: Sequence[int]) -> dict[str, Any]:
    """Returns the Service in front of the leaders: only Ready ones are its endpoints.

    Args:
        ports: of clients: that of the spec first, then those of groups that were made with another one.
    """
    first, *others = dict.fromkeys(ports)
    named = {names.PORT_API: first, **{f"{names.PORT_API}-{port}": port for port in sorted(others)}}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": identity.metadata(owner, identity.client_service(owner), {}),
        "spec": {
            "type": "ClusterIP",
            # On a cluster of one family it is that one.
            "ipFamilyPolicy": "PreferDualStack",
            "internalTrafficPolicy": _EVERYWHERE,
            "selector": identity.leader_labels(owner),
            "ports": [
                {"name": name, "port": port, "protocol": "TCP", "targetPort": names.PORT_API}
                for name, port in named.items()
            ],
        },
    }


def client_ports(stored: Mapping[str, Any], owner: Owner) -> frozenset[int]:
    """Returns the ports at which a stored Service of clients leads to leaders; none if it leads elsewhere."""
    spec = stored.get("spec") or {}
    labels = stored["metadata"].get("labels") or {}
    if spec.get("selector") != identity.leader_labels(owner) or spec.get("type") == _ALIAS:
        return frozenset()
    if labels.keys() & LEFT_TO_OTHER_PROXIES or spec.get("internalTrafficPolicy", _EVERYWHERE) != _EVERYWHERE:
        return frozenset()
    ports = [port for port in spec.get("ports") or () if isinstance(port.get("port"), int)]
    return frozenset(port["port"] for port in ports if _leads_to_api(port))


def _leads_to_api(port: Mapping[str, Any]) -> bool:
    by_number = port["port"]  # of the groups that were made with it
    is_tcp = port.get("protocol", "TCP") == "TCP"
    return is_tcp and port.get("targetPort", by_number) in (names.PORT_API, by_number)


def build_group_service(group: GroupRef) -> dict[str, Any]:
    """Returns the headless Service that gives the pods of a group their names.

    It answers for pods that are not ready (publishNotReadyAddresses): ranks must find
    each other before any of them can be.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": identity.group_metadata(group, identity.group_service(group.owner, group.index)),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": identity.group_labels(group),
            "ports": [
                {
                    "name": names.PORT_HEALTH,
                    "port": names.DEFAULT_HEALTH_PORT,
                    "protocol": "TCP",
                    "targetPort": names.DEFAULT_HEALTH_PORT,
                }
            ],
        },
    }
