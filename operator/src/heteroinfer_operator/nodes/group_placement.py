"""Finds nodes for a group, within one topology domain and apart from the resource's other groups. Pure."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from heteroinfer_operator.nodes.demand import PodDemand, larger_label, sum_requests, with_required_label
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
"""At most this many sizes of GPUs are excluded in turn. Node labels may contain thousands of sizes."""


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

    Compares the best placements for the values of the topology key. If several placements are equally good,
    returns the placement whose value sorts first.

    Args:
        topology_key: node label that must have one value on all nodes; "" for any nodes.
        others: groups from which this group prefers to be apart; None if the resource has one group.
    """
    domains = domains_of(free_nodes, topology_key) if topology_key else {"": free_nodes}
    placements = [
        Placement(nodes=nodes, domain=value)
        for value, inside in domains.items()
        if (nodes := _assign_within(demands, inside, others, searches=len(domains))) is not None
    ]
    if len(placements) < 2:
        return placements[0] if placements else None
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    return min(placements, key=lambda found: _placement_cost(demands, found.nodes, by_name, others))


def find_farther_placements(
    demands: Sequence[PodDemand],
    free_nodes: Sequence[FreeNode],
    topology_key: str,
    others: OtherGroups,
    placement: Placement,
) -> Iterator[Placement]:
    """Yields placements that are farther from the other groups than a given placement, the farthest first.

    A placement is farther if its fullest node has fewer other groups, or if its nodes have fewer in total.
    In these placements the distance outweighs the size of GPUs, so their GPUs may be smaller. If the group
    has pods with GPUs, its pods without GPUs still leave nodes with free GPUs to other pods. The first
    placement uses GPUs of any size. Each later placement excludes one more of the smallest sizes.
    """
    by_name = {free_node.node.name: free_node.node for free_node in free_nodes}
    devices = {name for demand in demands for name in demand.devices}
    distance_first = replace(others, outweigh_devices=True, spare_devices=bool(devices))
    sizes_mib: dict[str, set[int]] = {}
    """For each labelled kind of GPU, its sizes on the nodes."""
    for node, name in product(by_name.values(), devices):
        if (size_mib := device_memory_mib(node, name)) is not None:
            sizes_mib.setdefault(name, set()).add(size_mib)
    tried = {placement.nodes}
    all_sizes_mib: set[int] = set().union(*sizes_mib.values())
    for more_than_mib in (None, *sorted(all_sizes_mib)[:_MAX_GPU_SIZES]):
        limited_demands = [_with_larger_gpus(demand, sizes_mib, more_than_mib) for demand in demands]
        found = assign_nodes(limited_demands, free_nodes, topology_key, distance_first)
        if found is None:  # with larger GPUs, even fewer nodes remain
            return
        is_farther = others.count_shared(found.nodes) < others.count_shared(placement.nodes)
        if is_farther and found.nodes not in tried:
            tried.add(found.nodes)
            yield found


def _with_larger_gpus(demand: PodDemand, labelled: Container[str], more_than_mib: int | None) -> PodDemand:
    """Returns a demand for nodes whose devices have more memory than `more_than_mib`.

    Args:
        labelled: names of the devices whose memory at least one node has as a label.
        more_than_mib: None for any memory.
    """
    for name in demand.requests:
        if more_than_mib is not None and name in labelled:
            demand = with_required_label(demand, larger_label(device_memory_label(name), more_than_mib))
    return demand


def _assign_within(
    demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], others: OtherGroups | None, *, searches: int
) -> tuple[str, ...] | None:
    """Returns nodes on which all pods fit together, or None.

    If the resource has other groups, prefers nodes of one zone that are as good as the best nodes of all
    zones. If a group spanned several zones, each failure of a zone would end the group, and the next group
    might find no zone without other groups. For the same reason, a group that has to share a node
    with other groups prefers one node for all its pods.

    Args:
        searches: number of calls that share the limit of attempts.
    """
    anywhere = search_nodes(demands, free_nodes, others, searches=searches)
    if anywhere is None or others is None:
        return anywhere
    zones = domains_of(free_nodes, ZONE)
    candidates = [
        _assign_to_one_node(demands, free_nodes, others, anywhere),
        *(
            search_nodes(demands, zone, others, searches=searches * len(zones))
            for zone in (zones.values() if len(zones) > 1 else ())
        ),
        anywhere,
    ]
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    found = [nodes for nodes in candidates if nodes is not None]
    return min(found, key=lambda nodes: _placement_cost(demands, nodes, by_name, others))


def _assign_to_one_node(
    demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], others: OtherGroups, anywhere: Sequence[str]
) -> tuple[str, ...] | None:
    """Returns the best placement of all pods on one node.

    The node must not be nearer to other groups than the nearest node of `anywhere`. Returns None without such
    a node, and if `anywhere` is a single node or has no other groups.

    Args:
        anywhere: names of the best nodes without these limits, in the order of the demands.
    """
    names = set(anywhere)
    if len(names) == 1 or not others.any_is_shared(names):
        return None
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    max_nearness = max(others.nearness(by_name[name].node) for name in names)
    requests = sum_requests(demand.requests for demand in demands)
    able = [
        free_node
        for free_node in free_nodes
        if free_node.has(requests) and others.nearness(free_node.node) <= max_nearness
    ]
    # Only the cheapest node can win, so the nodes are searched in this order until one accepts all pods.
    able.sort(key=lambda node: _placement_cost(demands, (node.node.name,) * len(demands), by_name, others))
    for free_node in able:
        if (nodes := search_nodes(demands, [free_node], others)) is not None:
            return nodes
    return None


def _placement_cost(
    demands: Sequence[PodDemand],
    nodes: Sequence[str],
    by_name: Mapping[str, FreeNode],
    others: OtherGroups | None,
) -> tuple[Any, ...]:
    """Returns the sort key of a placement; the smallest key is the best.

    The parts of the key, in their order:

    1. nearness to other groups, on nodes of pods for which nearness matters more than devices
       (`outweigh_devices_of`)
    2. cost of the GPUs that pods with GPUs get (`device_cost`)
    3. cost of free GPUs on the nodes of pods without GPUs
    4. nearness to other groups, on all nodes
    """
    pods = [(demand, by_name[name]) for demand, name in zip(demands, nodes, strict=True)]
    # Each node counts once, because its loss ends the group once.
    nearness = {name: 0 if others is None else others.nearness(by_name[name].node) for name in nodes}
    decisive_nearness = {  # of the nodes with pods for which nearness matters more than devices
        free_node.node.name: nearness[free_node.node.name]
        for demand, free_node in pods
        if others is not None and others.outweigh_devices_of(demand)
    }
    with_devices = [device_cost(demand, free_node) for demand, free_node in pods if demand.devices]
    without_devices = [device_cost(demand, free_node) for demand, free_node in pods if not demand.devices]
    # The smallest GPU of a role limits all pods of the role. So the largest cost is compared before the sum.
    return (
        *_worst_and_sum(decisive_nearness.values()),
        *_worst_and_sum(with_devices),
        sum(without_devices),
        *_worst_and_sum(nearness.values()),
    )


def _worst_and_sum(costs: Collection[float]) -> tuple[float, float]:
    """Returns the largest cost and the sum, as a sort key."""
    return max(costs, default=0.0), sum(costs)
