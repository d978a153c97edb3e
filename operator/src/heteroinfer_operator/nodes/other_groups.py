"""Locations of a resource's other groups. A group prefers nodes and zones without them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.node_view import NodeView

HOSTNAME: Final = "kubernetes.io/hostname"
ZONE: Final = "topology.kubernetes.io/zone"
_WEIGHTS: Final = ((HOSTNAME, 100), (ZONE, 50))
"""Weights of the preferred terms, by topology key. Nodes weigh more, because they fail more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGroups:
    """Nodes and zones with pods of a resource's other groups.

    Attributes:
        nodes: node names.
        zones: values of the label `topology.kubernetes.io/zone`.
        outweigh_devices: whether the distance to these groups matters more than the GPUs of a node.
        spare_devices: whether pods without devices still leave nodes with free devices to other pods, even if
            `outweigh_devices`.
    """

    nodes: frozenset[str] = field(default_factory=frozenset)
    zones: frozenset[str] = field(default_factory=frozenset)
    outweigh_devices: bool = False
    spare_devices: bool = False

    @classmethod
    def on_nodes(cls, occupied: Iterable[str], nodes: Sequence[NodeView]) -> "OtherGroups":
        """Returns the nodes that other groups occupy, with their zones."""
        occupied_nodes = frozenset(occupied)
        zones = frozenset(
            node.labels[ZONE] for node in nodes if node.name in occupied_nodes and ZONE in node.labels
        )
        return cls(nodes=occupied_nodes, zones=zones)

    def any_is_shared(self, names: Iterable[str]) -> bool:
        """Returns whether one of these nodes has a pod of another group."""
        return not self.nodes.isdisjoint(names)

    def outweigh_devices_of(self, demand: PodDemand) -> bool:
        """Returns whether the distance to these groups matters more for a pod than a node's devices."""
        return self.outweigh_devices and (bool(demand.devices) or not self.spare_devices)

    def nearness(self, node: NodeView) -> int:
        """Returns 2 for a node with another group, 1 for a node in such a group's zone, otherwise 0."""
        if node.name in self.nodes:
            return 2
        return int(node.labels.get(ZONE, "") in self.zones)


def apart_terms(resource: str, group: int) -> list[dict[str, Any]]:
    """Returns preferred anti-affinity terms of a group's pods against the resource's other groups."""
    selector = {
        "matchLabels": {names.LABEL_RESOURCE: resource, names.LABEL_COMPONENT: names.COMPONENT_WORKER},
        "matchExpressions": [{"key": names.LABEL_GROUP, "operator": "NotIn", "values": [str(group)]}],
    }
    return [
        {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        for key, weight in _WEIGHTS
    ]
