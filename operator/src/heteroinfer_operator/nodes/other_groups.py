"""Locations of a resource's other groups. A group prefers nodes and zones without other groups. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    """Numbers of a resource's other groups on nodes and in zones.

    Attributes:
        nodes: number of groups by node name. Nodes without groups are missing.
        zones: number of groups by value of the label `topology.kubernetes.io/zone`.
        outweigh_devices: whether the distance to these groups matters more than the GPUs of a node.
        spare_devices: whether pods without devices still leave nodes with free devices to other pods, even if
            `outweigh_devices`.
    """

    nodes: Mapping[str, int] = field(default_factory=dict)
    zones: Mapping[str, int] = field(default_factory=dict)
    outweigh_devices: bool = False
    spare_devices: bool = False

    @classmethod
    def on_nodes(cls, nodes_of_groups: Iterable[Collection[str]], nodes: Sequence[NodeView]) -> "OtherGroups":
        """Counts the other groups on each node and in each zone.

        Args:
            nodes_of_groups: names of the nodes of each group.
            nodes: all nodes, for their zones.
        """
        zone_by_node = {node.name: node.labels[ZONE] for node in nodes if ZONE in node.labels}
        on_node, in_zone = Counter[str](), Counter[str]()
        for nodes_of_group in nodes_of_groups:
            on_node.update(set(nodes_of_group))
            in_zone.update({zone_by_node[name] for name in nodes_of_group if name in zone_by_node})
        return cls(nodes=on_node, zones=in_zone)

    def any_is_shared(self, names: Iterable[str]) -> bool:
        """Returns whether any given node has a pod of another group."""
        return any(name in self.nodes for name in names)

    def count_shared(self, names: Iterable[str]) -> tuple[int, int]:
        """Returns the largest number of other groups on one of these nodes, and the sum over all nodes.

        As a sort key, a smaller result is better: the loss of a node ends at most the first number of other
        groups together with a group on these nodes.
        """
        on_nodes = [self.nodes.get(name, 0) for name in set(names)]
        return max(on_nodes, default=0), sum(on_nodes)

    def outweigh_devices_of(self, demand: PodDemand) -> bool:
        """Returns whether the distance to these groups matters more for a pod than a node's devices."""
        return self.outweigh_devices and (bool(demand.devices) or not self.spare_devices)

    def nearness(self, node: NodeView) -> int:
        """Returns a number that grows with the number of other groups on a node.

        Of two nodes with equally many other groups, the node with more other groups in its zone has the
        larger number. The number is 0 only if neither the node nor its zone has another group.
        """
        more_than_any_zone = max(self.zones.values(), default=0) + 1
        groups_in_zone = self.zones.get(node.labels.get(ZONE, ""), 0)
        return self.nodes.get(node.name, 0) * more_than_any_zone + groups_in_zone


def apart_terms(resource: str, group: int) -> list[dict[str, Any]]:
    """Returns anti-affinity terms by which a group's pods prefer nodes and zones without other groups."""
    selector = {
        "matchLabels": {names.LABEL_RESOURCE: resource, names.LABEL_COMPONENT: names.COMPONENT_WORKER},
        "matchExpressions": [{"key": names.LABEL_GROUP, "operator": "NotIn", "values": [str(group)]}],
    }
    return [
        {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        for key, weight in _WEIGHTS
    ]
