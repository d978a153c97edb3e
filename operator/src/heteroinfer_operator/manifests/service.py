"""Services of a resource: one for clients, and a headless one for each group. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner

_ALIAS: Final = "ExternalName"
"""Type of a Service that is an alias for another host name, and ignores its selector."""

LEFT_TO_OTHER_PROXIES: Final = frozenset(
    {"service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"}
)
"""Labels with which kube-proxy ignores a Service (`cmd/kube-proxy/app/server.go`): clients then reach no
pod."""
_ALL_NODES: Final = "Cluster"
"""Traffic policy with which clients on every node reach every leader."""


def build_client_service(owner: Owner, ports: Sequence[int]) -> dict[str, Any]:
    """Returns the Service for clients. Its endpoints are the Ready leaders.

    Args:
        ports: ports for clients: first the spec's, then ports of groups that run with an older spec.
    """
    spec_port, older_ports = ports[0], sorted(set(ports[1:]) - {ports[0]})
    port_by_name = {names.PORT_API: spec_port}
    port_by_name |= {f"{names.PORT_API}-{port}": port for port in older_ports}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": identity.metadata(owner, identity.client_service(owner), {}),
        "spec": {
            "type": "ClusterIP",
            # A cluster with only one IP family gives the Service this family.
            "ipFamilyPolicy": "PreferDualStack",
            "internalTrafficPolicy": _ALL_NODES,
            "selector": identity.leader_labels(owner),
            "ports": [
                {"name": name, "port": port, "protocol": "TCP", "targetPort": names.PORT_API}
                for name, port in port_by_name.items()
            ],
        },
    }


def client_ports(stored: Mapping[str, Any], owner: Owner) -> frozenset[int]:
    """Returns the ports at which a stored Service for clients forwards to the leaders.

    Returns no ports if another user has changed the Service so that it forwards nowhere, to other pods, or
    only on some nodes.
    """
    spec = stored.get("spec") or {}
    labels = stored["metadata"].get("labels") or {}
    selects_leaders = spec.get("selector") == identity.leader_labels(owner) and spec.get("type") != _ALIAS
    is_ignored_by_proxy = bool(labels.keys() & LEFT_TO_OTHER_PROXIES)
    reaches_all_nodes = spec.get("internalTrafficPolicy", _ALL_NODES) == _ALL_NODES
    if not selects_leaders or is_ignored_by_proxy or not reaches_all_nodes:
        return frozenset()
    ports = [port for port in spec.get("ports") or () if isinstance(port.get("port"), int)]
    return frozenset(port["port"] for port in ports if _leads_to_api(port))


def _leads_to_api(port: Mapping[str, Any]) -> bool:
    """Reports whether a port of a Service forwards to the API of the leaders."""
    # Without `targetPort`, or with the Service's own number, clients reach this number in the pods. The API
    # listens there, because the Service has the port of each spec that groups run with.
    service_port = port["port"]
    is_tcp = port.get("protocol", "TCP") == "TCP"
    return is_tcp and port.get("targetPort", service_port) in (names.PORT_API, service_port)


def build_group_service(group: GroupRef) -> dict[str, Any]:
    """Returns the headless Service for the DNS names of a group's pods.

    DNS also has the names of pods that are not ready (publishNotReadyAddresses), because ranks must find each
    other before any pod can be ready.
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
