"""Finds nodes for a group, within one topology domain and apart from the resource's other groups. Pure."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from heteroinfer_operator.nodes.demand import PodDemand, larger_label, with_required_label
from heteroinfer_operator.nodes.node_search import search_nodes
from heteroinfer_operator.nodes.other_groups import ZONE, OtherGroups
from heteroinfer_operator.nodes.placement import (
    FreeNode,
    device_cost,
    device_memory_label,
    device_memory_mib,
    domains_of,
)

_MAX_GPU_SIZES: Final = 16
"""At most this many sizes of GPUs are tried as the smallest size. Users who may label nodes could invent
thousands."""


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


def find_farther_placements(
    demands: Sequence[PodDemand],
    free_nodes: Sequence[FreeNode],
    topology_key: str,
    others: OtherGroups,
    placement: Placement,
) -> Iterator[Placement]:
    """Yields placements that are farther from the other groups than a given placement, the farthest first.

    In these placements the distance outweighs the size of GPUs, so their GPUs may be smaller. Pods without
    GPUs still leave nodes with free GPUs to other pods, unless no pod of the group has a GPU. The first
    placement uses GPUs of any size, later ones use only larger and larger GPUs.
    """
    by_name = {free_node.node.name: free_node.node for free_node in free_nodes}

    def nearness(found: Placement) -> tuple[int, int]:
        each = [others.nearness(by_name[name]) for name in found.nodes]
        return max(each), sum(each)

    devices = {name for demand in demands for name in demand.requests if "/" in name}
    far = replace(others, outweigh_devices=True, spare_devices=bool(devices))
    sizes: dict[str, set[int]] = {}
    for node, name in product(by_name.values(), devices):
        if (size := device_memory_mib(node, name)) is not None:
            sizes.setdefault(name, set()).add(size)
    tried = {placement.nodes}
    for more_than in (None, *sorted(set().union(*sizes.values()))[:_MAX_GPU_SIZES]):
        limited = [_with_larger_gpus(each, sizes, more_than) for each in demands]
        found = assign_nodes(limited, free_nodes, topology_key, far)
        if found is None:
            return
        if found.nodes not in tried and nearness(found) < nearness(placement):
            tried.add(found.nodes)
            yield found


def _with_larger_gpus(demand: PodDemand, labelled: Container[str], more_than_mib: int | None) -> PodDemand:
    """Returns a demand for nodes with larger devices than this; None means any size.

    Args:
        labelled: devices whose memory some node has as a label.
    """
    for name in demand.requests:
        if more_than_mib is not None and name in labelled:
            demand = with_required_label(demand, larger_label(device_memory_label(name), more_than_mib))
    return demand


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

    def cost(nodes: tuple[str, ...]) -> tuple[Any, ...]:
        pods = [(demand, by_name[name]) for demand, name in zip(demands, nodes, strict=True)]
        nearness = [others.nearness(each.node) for _, each in pods]
        first = sum(
            n for n, (demand, _) in zip(nearness, pods, strict=True) if others.outweigh_devices_of(demand)
        )
        return first, tuple(device_cost(demand, each) for demand, each in pods), sum(nearness)

    zone_placements = [
        found for zone in zones.values() if (found := search_nodes(demands, zone, others)) is not None
    ]
    return min([*zone_placements, anywhere], key=cost)
