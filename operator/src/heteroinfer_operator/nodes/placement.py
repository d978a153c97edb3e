"""Counts free resources of nodes, and checks whether nodes accept pods, by the scheduler's rules. Pure."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from heteroinfer_operator.nodes.demand import PodDemand, selects_node, sum_requests, tolerates
from heteroinfer_operator.nodes.node_platform import describe_other_platform
from heteroinfer_operator.nodes.node_view import NodeView

_DEVICE_MIB: Final = re.compile(r"[1-9][0-9]{0,11}")
"""A plausible value of the label with a device's memory. A label may have up to 63 digits."""
_TOLERANCE: Final = 1e-6
"""Smaller amounts are rounding errors."""


@dataclass(slots=True, kw_only=True, eq=False)
class FreeNode:
    """A node and its free resources. Equal to itself only.

    Attributes:
        free: free amounts by resource name. `reserve` reduces these amounts.
        by_priority: used and reserved amounts, by the priority of their pods.
    """

    node: NodeView
    free: dict[str, float]
    by_priority: dict[int, Mapping[str, float]] = field(default_factory=dict)
    reserved: list[str] = field(default_factory=list)
    """Names of the pods without a node that have a reservation here."""

    @classmethod
    def from_node(cls, node: NodeView) -> "FreeNode":
        """Returns a node with the resources that its pods leave free."""
        return cls(
            node=node,
            free={name: whole - node.requested.get(name, 0.0) for name, whole in node.allocatable.items()},
            by_priority=dict(node.by_priority),  # a shallow copy: entries are replaced, never changed
        )

    def has_lower_priority(self, priority: int) -> bool:
        """Reports whether the node has pods of lower priority."""
        return any(other < priority for other in self.by_priority)

    def without_lower_priority(self, priority: int) -> "FreeNode":
        """Returns the node as if the scheduler had preempted all pods of lower priority.

        `by_priority` of the result is empty, because no further pod can be preempted.
        """
        freed = sum_requests(taken for other, taken in self.by_priority.items() if other < priority)
        free = {name: left + freed.get(name, 0.0) for name, left in self.free.items()}
        return FreeNode(node=self.node, free=free, reserved=self.reserved)

    def has(self, requests: Mapping[str, float]) -> bool:
        """Reports whether the requests fit into the free resources."""
        for name, amount in requests.items():  # noqa: SIM110 - a generator for each node and pod costs twice
            if self.free_amount(name) + _TOLERANCE < amount:
                return False
        return True

    def free_amount(self, resource: str) -> float:
        """Returns the free amount of a resource.

        A device that the node does not list counts as missing. Resources that every node has (cpu, memory,
        pods) count as unlimited if the node does not list them: `heteroinfer up` and `plan --gpus` list
        devices only.
        """
        return self.free.get(resource, 0.0 if "/" in resource else float("inf"))

    @property
    def is_overfull(self) -> bool:
        """Whether pods use and reserve more than the node has. Then the scheduler preempts some of them."""
        return any(left < -_TOLERANCE for left in self.free.values())

    def reserve(self, requests: Mapping[str, float], *, times: int = 1) -> None:
        """Subtracts requests from the free resources; `times` = -1 adds them back."""
        for name, amount in requests.items():
            if name in self.free:
                self.free[name] -= amount * times

    def max_pods(self, requests: Mapping[str, float]) -> int:
        """Returns the number of pods with these requests that fit."""
        num_pods = 2**31  # more than any node runs
        for name, amount in requests.items():
            free = self.free_amount(name)
            if amount > 0 and free != float("inf"):
                num_pods = min(num_pods, int((free + _TOLERANCE) // amount))
        return max(num_pods, 0)


def build_free_nodes(nodes: Sequence[NodeView], reserved: Sequence[PodDemand] = ()) -> list[FreeNode]:
    """Returns the free resources of each node, less those reserved for pods that have no node yet.

    A pod without a node takes capacity of its preferred node if the pod fits there, otherwise of the first
    node on which the pod fits. A pod that fits on no node takes capacity of its preferred node if preemption
    would free enough there. Otherwise the pod takes no capacity.

    The nodes are in the order of their names, so that the same cluster always gives the same placements.

    Args:
        reserved: demands of the pods without a node.
    """
    free_nodes = [FreeNode.from_node(node) for node in sorted(nodes, key=lambda each: each.name)]
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    num_full: dict[Hashable, int] = {}
    for demand in reserved:
        target = _choose_node(demand, by_name.get(demand.preferred_node), free_nodes, num_full)
        if target is None:
            continue
        target.reserve(demand.requests)
        target.reserved.append(demand.name)
        if demand.priority is not None:
            taken = target.by_priority.get(demand.priority, {})
            target.by_priority[demand.priority] = sum_requests((taken, demand.requests))
    return free_nodes


def _choose_node(
    demand: PodDemand,
    preferred: FreeNode | None,
    free_nodes: Sequence[FreeNode],
    num_full: dict[Hashable, int],
) -> FreeNode | None:
    """Returns the node of which a pod without a node takes capacity, or None.

    Args:
        preferred: node that the pod prefers.
        num_full: for each kind of pod, the number of nodes at the beginning of `free_nodes` on which the kind
            does not fit. These nodes need no second check, because free capacity only falls. This function
            updates the number.
    """
    if preferred is not None and _can_place(demand, preferred):
        return preferred
    kind = _demand_key(demand)
    index = num_full.get(kind, 0)
    while index < len(free_nodes) and not _can_place(demand, free_nodes[index]):
        index += 1
    num_full[kind] = index
    if index < len(free_nodes):
        return free_nodes[index]
    if preferred is not None and _can_place_by_preemption(demand, preferred):
        return preferred
    return None


def _can_place(demand: PodDemand, free_node: FreeNode) -> bool:
    """Reports whether a node accepts a pod and has the free resources for it."""
    return free_node.has(demand.requests) and not find_obstacle(demand, free_node.node)


def _can_place_by_preemption(demand: PodDemand, free_node: FreeNode) -> bool:
    """Reports whether a pod fits on a node after the preemption of all pods of lower priority."""
    priority = demand.priority
    return priority is not None and _can_place(demand, free_node.without_lower_priority(priority))


def _demand_key(demand: PodDemand) -> Hashable:
    """Returns a key of the fields that `_can_place` reads: pods with equal keys fit on the same nodes."""
    requirements = frozenset(demand.requests.items()), frozenset(demand.node_selector.items())
    return requirements, repr((demand.node_terms, demand.tolerations, demand.near, demand.mounts_images))


class Obstacle(NamedTuple):
    """Why a pod cannot run on a node.

    Attributes:
        excludes: whether the node rejects the pod regardless of capacity. Otherwise it lacks capacity or a
            label.
        rest: the problem, as the words that follow "is" if the node rejects the pod, and "has" otherwise.
    """

    excludes: bool
    rest: str

    def describe(self, nodes: int) -> str:
        """Returns the text that follows the nodes' names.

        Args:
            nodes: number of nodes.
        """
        if self.excludes:
            return f"{'are' if nodes > 1 else 'is'} {self.rest}"
        return f"{'have' if nodes > 1 else 'has'} {self.rest}"


def find_obstacle(demand: PodDemand, node: NodeView) -> Obstacle | None:
    """Returns why a node rejects a pod regardless of capacity, or None."""
    if not node.schedulable:
        return Obstacle(excludes=True, rest=node.problem)
    return find_lasting_obstacle(demand, node)


def find_lasting_obstacle(demand: PodDemand, node: NodeView) -> Obstacle | None:
    """Returns why a node rejects a pod even while the node is Ready and not cordoned, or None.

    A specific cause comes first: a selector that does not match may have one of the other causes.
    """
    taint = next(
        (each for each in node.taints if each.keeps_away and not tolerates(demand.tolerations, each)), None
    )
    if taint is not None:
        return Obstacle(excludes=True, rest=f"tainted {taint}")
    topology_keys = [term["topologyKey"] for term in demand.near]
    key = next((key for key in topology_keys if key not in node.labels), None)
    if key is not None:
        return Obstacle(excludes=False, rest=f"no label {key}, which the pod's podAffinity names")
    if other_platform := describe_other_platform(demand.node_selector, node.labels):
        return Obstacle(excludes=True, rest=other_platform)
    if demand.mounts_images and node.no_image_volumes:
        return Obstacle(excludes=False, rest=node.no_image_volumes)
    if not selects_node(demand, node.name, node.labels):
        return Obstacle(excludes=True, rest="not matched by the pod's nodeSelector or node affinity")
    return None


def domains_of(free_nodes: Sequence[FreeNode], topology_key: str) -> dict[str, list[FreeNode]]:
    """Returns the nodes with each value of a topology key, sorted by value. Omits nodes without the label."""
    domains: dict[str, list[FreeNode]] = {}
    for free_node in free_nodes:
        value = free_node.node.labels.get(topology_key)
        if value is not None:
            domains.setdefault(value, []).append(free_node)
    return dict(sorted(domains.items()))


def device_cost(demand: PodDemand, free_node: FreeNode) -> float:
    """Returns the cost of a node's devices for a pod; the node with the smallest cost is the best.

    For pods with devices, larger GPUs are better. For other pods, nodes without free devices are better, so
    that free devices stay for pods that need them.
    """
    if demand.devices:
        return -sum(device_memory_mib(free_node.node, name) or 0 for name in demand.devices)
    return float(any(left > 0 for name, left in free_node.free.items() if "/" in name))


def device_memory_label(resource: str) -> str:
    """Returns the node label with the memory of one device in MiB, which GPU feature discovery sets.

    The label is `<resource>.memory`: `nvidia.com/gpu.memory`, `nvidia.com/mig-1g.10gb.memory`
    (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery).
    """
    return f"{resource}.memory"


def device_memory_mib(node: NodeView, resource: str) -> int | None:
    """Returns the memory of one device in MiB from the node's label, or None."""
    text = node.labels.get(device_memory_label(resource), "")
    return int(text) if _DEVICE_MIB.fullmatch(text) else None
