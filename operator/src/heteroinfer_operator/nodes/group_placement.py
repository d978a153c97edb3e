"""Finds nodes for a group, within one topology domain and apart from the resource's other groups. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.other_groups import ZONE, OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode, domains_of, preference, search_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A node for each pod.

    Attributes:
        nodes: node names, in the order of the demands.
        domain: value of the topology key on all nodes; "" without a key.
    """

    nodes: tuple[str, ...]
    domain: str = ""


def assign_nodes(
    demands: Sequence[PodDemand],
    free_nodes: Sequence[FreeNode],
    topology_key: str = "",
    others: OtherGroups | None = None,
) -> Placement | None:
    """Returns nodes on which all pods fit together, or None. Does not reserve capacity.

    Args:
        topology_key: node label that must have one value on all nodes; "" for any nodes.
        others: groups from which this group prefers to be apart; None if the resource has one group.
    """
    if topology_key:
        domains = domains_of(free_nodes, topology_key)
        for value in sorted(domains, key=lambda value: _count_shared_nodes(domains[value], others)):
            nodes = search_nodes(demands, domains[value], others)
            if nodes is not None:
                return Placement(nodes=nodes, domain=value)
        return None
    nodes = search_nodes(demands, free_nodes, others)
    if nodes is None:
        return None
    if others is not None:
        nodes = _prefer_one_zone(demands, free_nodes, others, nodes)
    return Placement(nodes=nodes)


def _count_shared_nodes(inside: Sequence[FreeNode], others: OtherGroups | None) -> int:
    """Returns the number of nodes that also have a pod of another group."""
    return sum(others.nearness(each.node) > 1 for each in inside) if others is not None else 0


def _prefer_one_zone(
    demands: Sequence[PodDemand],
    free_nodes: Sequence[FreeNode],
    others: OtherGroups,
    anywhere: tuple[str, ...],
) -> tuple[str, ...]:
    """Returns nodes of one zone if they are as good as `anywhere` and not nearer to other groups.

    If a group spans several zones, the failure of any zone ends it, and no zone is left for the next group.
    """
    zones = domains_of(free_nodes, ZONE)
    if len(zones) < 2:
        return anywhere
    by_name = {free_node.node.name: free_node for free_node in free_nodes}

    def cost(nodes: tuple[str, ...]) -> tuple[tuple[float, ...], int]:
        chosen = [by_name[name] for name in nodes]
        kinds = (preference(demand, each)[0] for demand, each in zip(demands, chosen, strict=True))
        return tuple(kinds), sum(others.nearness(each.node) for each in chosen)

    zone_placements = [
        found for zone in zones.values() if (found := search_nodes(demands, zone, others)) is not None
    ]
    return min([*zone_placements, anywhere], key=cost)
