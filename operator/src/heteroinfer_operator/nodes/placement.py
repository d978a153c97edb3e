"""Finds nodes on which all pods fit, by the scheduler's rules. Pure.

The search places the largest pods first and backtracks. It is exact up to its limit of attempts. Of pods
outside the group only the requests are known, so affinity terms are checked only among the pods of the group
(`pod_affinity`).
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod
from typing import Final, NamedTuple

from heteroinfer_operator.nodes.demand import PodDemand, selects_node, sum_requests, tolerates
from heteroinfer_operator.nodes.node_platform import describe_other_platform
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.pod_affinity import GroupTerms, PodSeries, Values

MAX_TRIES: Final = 5000
"""Placements of a pod until the search gives up: about 20 ms of one core (2026-11-21)."""
_MAX_CHOICES: Final = 1000
"""At most this many combinations of topology values are tried for pods that must be together."""
_MIN_TRIES: Final = 100
"""At least this many placements are tried for each combination of topology values."""
_DEVICE_MIB: Final = re.compile(r"[1-9][0-9]{0,11}")
"""A plausible label of a device's memory. Users who may label nodes can write up to 63 digits."""
_TOLERANCE: Final = 1e-6
"""Smaller amounts are rounding errors."""


@dataclass(slots=True, kw_only=True, eq=False)
class FreeNode:
    """A node and its free resources. Equal to itself only.

    Attributes:
        free: free amount by resource name. `reserve` reduces it.
        by_priority: used resources by the priority of the pods.
    """

    node: NodeView
    free: dict[str, float]
    by_priority: dict[int, Mapping[str, float]] = field(default_factory=dict)
    promised: list[str] = field(default_factory=list)
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
        """Returns the node as if the scheduler had preempted all pods of lower priority."""
        freed = sum_requests(taken for other, taken in self.by_priority.items() if other < priority)
        free = {name: left + freed.get(name, 0.0) for name, left in self.free.items()}
        return FreeNode(node=self.node, free=free, promised=self.promised)

    def has(self, requests: Mapping[str, float]) -> bool:
        """Reports whether the requests fit into the free resources."""
        for name, asked in requests.items():  # noqa: SIM110 - a generator for each node and pod costs twice
            if self.free_amount(name) + _TOLERANCE < asked:
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
        """Whether more is used than the node has. The scheduler then preempts pods of lower priority."""
        return any(left < -_TOLERANCE for left in self.free.values())

    def reserve(self, requests: Mapping[str, float], *, times: int = 1) -> None:
        """Subtracts requests from the free resources; `times` = -1 adds them back."""
        for name, asked in requests.items():
            if name in self.free:
                self.free[name] -= asked * times

    def max_pods(self, requests: Mapping[str, float]) -> int:
        """Returns the number of pods with these requests that fit."""
        counts = [
            int((self.free_amount(name) + _TOLERANCE) // asked)
            for name, asked in requests.items()
            if asked > 0 and self.free_amount(name) != float("inf")
        ]
        return max(min(counts, default=2**31), 0)


def build_free_nodes(nodes: Sequence[NodeView], promised: Sequence[PodDemand] = ()) -> list[FreeNode]:
    """Returns the free resources of each node after placing pods that have no node yet.

    Such a pod takes its preferred node if it fits there, otherwise the first node on which it fits.

    Args:
        promised: demands of the pods without a node.
    """
    free_nodes = [FreeNode.from_node(node) for node in nodes]
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    searched: dict[Hashable, int] = {}
    """By kind of pod, the number of leading nodes without room. Free capacity only shrinks here."""
    for demand in promised:
        chosen = by_name.get(demand.node)
        if chosen is None or not _can_place(demand, chosen):
            kind = _demand_key(demand)
            full = searched.get(kind, 0)
            while full < len(free_nodes) and not _can_place(demand, free_nodes[full]):
                full += 1
            searched[kind] = full
            if full < len(free_nodes):
                chosen = free_nodes[full]
            elif chosen is None or not _can_place_by_preemption(demand, chosen):
                continue
        chosen.reserve(demand.requests)
        chosen.promised.append(demand.name)
        if demand.priority is not None:
            taken = chosen.by_priority.get(demand.priority, {})
            chosen.by_priority[demand.priority] = sum_requests((taken, demand.requests))
    return free_nodes


def _can_place(demand: PodDemand, free_node: FreeNode) -> bool:
    """Reports whether a node accepts a pod and has the free resources for it."""
    return free_node.has(demand.requests) and not find_obstacle(demand, free_node.node)


def _can_place_by_preemption(demand: PodDemand, free_node: FreeNode) -> bool:
    """Reports whether a pod fits on a node after the preemption of all pods of lower priority."""
    priority = demand.priority
    return priority is not None and _can_place(demand, free_node.without_lower_priority(priority))


def _demand_key(demand: PodDemand) -> Hashable:
    """Returns a key that is equal for pods with equal demands."""
    requirements = frozenset(demand.requests.items()), frozenset(demand.node_selector.items())
    return requirements, repr((demand.node_terms, demand.tolerations, demand.near))


class Obstacle(NamedTuple):
    """Why a pod cannot run on a node.

    Attributes:
        excludes: whether the node rejects the pod regardless of capacity. Otherwise it lacks capacity or a
            label.
        rest: the problem, as a text that follows "is" if the node rejects the pod, otherwise "has".
    """

    excludes: bool
    rest: str

    def describe(self, nodes: int) -> str:
        """Returns the text that follows the nodes' names.

        Args:
            nodes: number of nodes.
        """
        verbs = ("is", "are") if self.excludes else ("has", "have")
        return f"{verbs[nodes > 1]} {self.rest}"


def find_obstacle(demand: PodDemand, node: NodeView) -> Obstacle | None:
    """Returns why a node rejects a pod regardless of capacity, or None."""
    return (
        find_lasting_obstacle(demand, node)
        if node.schedulable
        else Obstacle(excludes=True, rest=node.problem)
    )


def find_lasting_obstacle(demand: PodDemand, node: NodeView) -> Obstacle | None:
    """Returns why a node rejects a pod even when the node is Ready and not cordoned, or None."""
    taint = next((t for t in node.taints if t.keeps_away and not tolerates(demand.tolerations, t)), None)
    if taint is not None:
        return Obstacle(excludes=True, rest=f"tainted {taint}")
    key = next((t["topologyKey"] for t in demand.near if t["topologyKey"] not in node.labels), None)
    if key is not None:
        return Obstacle(excludes=False, rest=f"no label {key}, which the pod's podAffinity names")
    if other_platform := describe_other_platform(demand.node_selector, node.labels):
        return Obstacle(excludes=True, rest=other_platform)
    selected = selects_node(demand, node.name, node.labels)
    return None if selected else Obstacle(excludes=True, rest="not selected by the pod's node rules")


def domains_of(free_nodes: Sequence[FreeNode], topology_key: str) -> dict[str, list[FreeNode]]:
    """Returns the nodes with each value of a topology key, sorted; leaves out nodes without the label."""
    domains: dict[str, list[FreeNode]] = {}
    for free_node in free_nodes:
        value = free_node.node.labels.get(topology_key)
        if value is not None:
            domains.setdefault(value, []).append(free_node)
    return dict(sorted(domains.items()))


@dataclass(slots=True, kw_only=True)
class EqualPods:
    """Pods with equal demands.

    Attributes:
        pods: indexes into the demands.
        free_nodes: nodes that accept these pods.
    """

    demand: PodDemand
    pods: list[int]
    free_nodes: list[FreeNode] = field(default_factory=list)


def group_equal_pods(demands: Sequence[PodDemand]) -> list[EqualPods]:
    """Groups pods with equal demands."""
    kinds: list[EqualPods] = []
    for index, demand in enumerate(demands):
        demand_of_kind = replace(demand, name="", node="")
        kind = next((kind for kind in kinds if kind.demand == demand_of_kind), None)
        if kind is None:
            kinds.append(EqualPods(demand=demand_of_kind, pods=[index]))
        else:
            kind.pods.append(index)
    return kinds


def search_nodes(
    demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], others: OtherGroups | None = None
) -> tuple[str, ...] | None:
    """Returns nodes on which all pods fit together.

    Returns:
        Node names in the order of the demands, or None.
    """
    kinds = group_equal_pods(demands)
    terms = GroupTerms(kinds=[kind.demand for kind in kinds])
    for kind in kinds:
        kind.free_nodes = [
            free_node for free_node in free_nodes if not find_obstacle(kind.demand, free_node.node)
        ]
        if not _is_enough(kind, kind.free_nodes):
            return None
        kind.free_nodes.sort(key=lambda each, kind=kind: preference(kind.demand, each, others))  # type: ignore[misc]  # bound at once
    choices = [find_topology_values(series, kinds) for series in terms.series]
    tries = max(MAX_TRIES // max(prod(map(len, choices)), 1), _MIN_TRIES)
    for chosen in islice(product(*choices), _MAX_CHOICES):
        found = _search_with_values(demands, kinds, terms, chosen, tries)
        if found is not None:
            return found
    return None


def _is_enough(kind: EqualPods, free_nodes: Sequence[FreeNode]) -> bool:
    """Reports whether these nodes have capacity for all pods of a kind."""
    return sum(free_node.max_pods(kind.demand.requests) for free_node in free_nodes) >= len(kind.pods)


def _nodes_with_values(series: PodSeries, values: Values, free_nodes: Sequence[FreeNode]) -> list[FreeNode]:
    """Returns the nodes that have these values of a series' topology keys."""
    return [free_node for free_node in free_nodes if series.values(free_node.node.labels) == values]


def find_topology_values(series: PodSeries, kinds: Sequence[EqualPods]) -> list[Values]:
    """Returns the topology values that have capacity for each kind of a series, preferred values first.

    Each kind is checked as if it were the only one.
    """
    members = [kinds[index] for index in sorted(series.kinds)]
    values_of_nodes = dict.fromkeys(
        series.values(free_node.node.labels) for free_node in members[0].free_nodes
    )
    return [
        values
        for values in values_of_nodes
        if values is not None
        and all(_is_enough(kind, _nodes_with_values(series, values, kind.free_nodes)) for kind in members)
    ]


def _search_with_values(
    demands: Sequence[PodDemand],
    kinds: Sequence[EqualPods],
    terms: GroupTerms,
    chosen_values: Sequence[Values],
    max_tries: int,
) -> tuple[str, ...] | None:
    """Returns nodes for all pods, or None if the search finds none.

    Args:
        chosen_values: topology values that the pods of each series must share, by index of the series.
        max_tries: most placements of a pod that the search may try.
    """
    limited_kinds = []
    for index, kind in enumerate(kinds):
        nodes_of_kind = kind.free_nodes
        for series, values in zip(terms.series, chosen_values, strict=True):
            nodes_of_kind = (
                _nodes_with_values(series, values, nodes_of_kind) if index in series.kinds else nodes_of_kind
            )
        limited_kinds.append(EqualPods(demand=kind.demand, pods=kind.pods, free_nodes=nodes_of_kind))
    kind_of = {pod: index for index, kind in enumerate(kinds) for pod in kind.pods}
    limited_kinds.sort(key=_sort_key_of_hard_kinds, reverse=True)
    return _Search(
        demands=demands, kinds=limited_kinds, terms=terms, kind_of=kind_of, tries_left=max_tries
    ).run()


def preference(
    demand: PodDemand, free_node: FreeNode, others: OtherGroups | None = None
) -> tuple[float, ...]:
    """Returns the sort key of nodes for a pod; the smallest key is the best.

    The cost of the node's devices comes first, then nodes without other groups of the resource, then fuller
    nodes. If the other groups outweigh devices, nodes without these groups come first.
    """
    cost = device_cost(demand, free_node)
    nearness = 0 if others is None else others.nearness(free_node.node)
    outweigh = others is not None and others.outweigh_devices_of(demand)
    first = (nearness, cost) if outweigh else (cost, nearness)
    devices = [name for name in demand.requests if "/" in name]
    fullness = (sum(free_node.free_amount(name) for name in devices), free_node.free_amount("memory"))
    return (*first, *fullness)


def device_cost(demand: PodDemand, free_node: FreeNode) -> float:
    """Returns how little the devices of a node suit a pod; the smallest cost is the best.

    Large GPUs suit pods with devices. Nodes without free devices suit other pods.
    """
    devices = [name for name in demand.requests if "/" in name]
    if devices:
        return -sum(device_memory_mib(free_node.node, name) or 0 for name in devices)
    return float(any(left > 0 for name, left in free_node.free.items() if "/" in name))


def device_memory_label(resource: str) -> str:
    """Returns the node label with the memory of one device in MiB, which GPU feature discovery sets.

    It is `<resource>.memory`: `nvidia.com/gpu.memory`, `nvidia.com/mig-1g.10gb.memory`
    (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery).
    """
    return f"{resource}.memory"


def device_memory_mib(node: NodeView, resource: str) -> int | None:
    """Returns the memory of one device in MiB from the node's label, or None."""
    text = node.labels.get(device_memory_label(resource), "")
    return int(text) if _DEVICE_MIB.fullmatch(text) else None


def _sort_key_of_hard_kinds(kind: EqualPods) -> tuple[float, ...]:
    """Returns the sort key of a kind of pods: kinds that are hard to place have larger keys.

    Pods with devices are the hardest; then pods whose requests are a large share of the largest node.
    """
    requests = kind.demand.requests
    largest = {
        name: max((free_node.free.get(name, 0.0) for free_node in kind.free_nodes), default=0.0)
        for name in requests
    }
    shares = [asked / largest[name] for name, asked in requests.items() if largest[name] > 0]
    return (float(any("/" in name for name in requests)), max(shares, default=0.0))


@dataclass(slots=True, kw_only=True)
class _Search:
    """A depth-first search that places the hardest kind first.

    Two rules keep it small: equal pods are placed in the order of nodes, and of equal nodes only one is
    tried.
    """

    demands: Sequence[PodDemand]
    kinds: list[EqualPods]
    terms: GroupTerms
    kind_of: Mapping[int, int]
    tries_left: int
    chosen: dict[int, FreeNode] = field(default_factory=dict)
    before: dict[FreeNode, dict[str, float]] = field(default_factory=dict)
    """Free capacity of each used node before the search."""
    nodes_of: list[set[FreeNode]] = field(init=False)
    """Nodes of each kind. Nodes with the same kinds and free amounts are equal."""

    def __post_init__(self) -> None:
        """Collects the nodes of each kind."""
        self.nodes_of = [set(kind.free_nodes) for kind in self.kinds]

    def run(self) -> tuple[str, ...] | None:
        """Returns node names for the pods, or None. Restores the nodes' free capacity."""
        try:
            return self._search()
        finally:
            for free_node, free in self.before.items():
                free_node.free = free

    def _search(self) -> tuple[str, ...] | None:
        """Places pods one after the other, and takes back placements that lead to no solution."""
        order = [(kind, pod) for kind in self.kinds for pod in kind.pods]
        # An explicit stack, because a group may have a thousand pods and Python's stack is not that deep.
        stack: list[Iterator[tuple[int, FreeNode]]] = []
        chosen_nodes: list[int] = []
        while len(chosen_nodes) < len(order):
            if len(stack) == len(chosen_nodes):
                kind, _ = order[len(chosen_nodes)]
                first = chosen_nodes[-1] if chosen_nodes and order[len(chosen_nodes) - 1][0] is kind else 0
                stack.append(self._candidates(kind, first))
            found = next(stack[-1], None)
            if found is None:
                stack.pop()
                if not chosen_nodes:
                    return None
                self._undo(order[len(chosen_nodes) - 1][1])
                chosen_nodes.pop()
                continue
            self.tries_left -= 1
            if self.tries_left < 0:
                return None
            index, free_node = found
            if self._place(order[len(chosen_nodes)][1], free_node):
                chosen_nodes.append(index)
        return tuple(self.chosen[pod].node.name for pod in range(len(self.demands)))

    def _candidates(self, kind: EqualPods, first: int) -> Iterator[tuple[int, FreeNode]]:
        """Yields the nodes on which a pod of this kind may be placed, from index `first` on.

        Of equal nodes it yields only one, unless affinity terms make a difference.
        """
        seen: list[tuple[dict[str, float], list[bool]]] = []
        paired = any(demand.near or demand.away for demand in self.demands)
        for index in range(first, len(kind.free_nodes)):
            free_node = kind.free_nodes[index]
            if not free_node.has(kind.demand.requests):
                continue
            state = (dict(free_node.free), [free_node in nodes for nodes in self.nodes_of])
            if not paired and state in seen:
                continue
            seen.append(state)
            yield index, free_node

    def _place(self, pod: int, free_node: FreeNode) -> bool:
        """Places a pod on a node; returns False if affinity terms forbid that."""
        self.chosen[pod] = free_node
        if not self._are_terms_met(pod, free_node):
            del self.chosen[pod]
            return False
        self.before.setdefault(free_node, dict(free_node.free))
        free_node.reserve(self.demands[pod].requests)
        return True

    def _undo(self, pod: int) -> None:
        """Takes back the placement of a pod."""
        self.chosen.pop(pod).reserve(self.demands[pod].requests, times=-1)

    def _are_terms_met(self, pod: int, free_node: FreeNode) -> bool:
        """Reports whether the affinity terms between the pods placed so far hold."""
        for other, its_node in self.chosen.items():
            keys = self.terms.away[self.kind_of[pod]][self.kind_of[other]]
            if other != pod and any(_have_same_value(free_node, its_node, key) for key in keys):
                return False
        if self.terms.has_no_terms:
            return True
        if not all(self._may_be_near(other) for other in self.chosen):
            return False
        return len(self.chosen) < len(self.demands) or self.terms.is_placed_in_any_order(
            [self.kind_of[each] for each in self.chosen],
            [its_node.node.labels for its_node in self.chosen.values()],
        )

    def _may_be_near(self, pod: int) -> bool:
        """Reports whether a placed pod is near its required peers, or some peers are not placed yet."""
        kind = self.kind_of[pod]
        peers, keys = self.terms.peers[kind], [term["topologyKey"] for term in self.demands[pod].near]
        others = [other for other, its_kind in self.kind_of.items() if other != pod and its_kind in peers]
        if any(other not in self.chosen for other in others):
            return True
        places = [self.chosen[other] for other in others]
        counted = [place for place in places if any(key in place.node.labels for key in keys)]
        if not counted:
            return not peers or kind in peers
        return all(any(_have_same_value(self.chosen[pod], place, key) for place in counted) for key in keys)


def _have_same_value(one: FreeNode, other: FreeNode, key: str) -> bool:
    """Reports whether two nodes have the same value of a topology key."""
    value = one.node.labels.get(key)
    return value is not None and value == other.node.labels.get(key)
