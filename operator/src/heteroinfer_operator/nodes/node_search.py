"""Searches for nodes on which all pods of a group fit. Pure.

The search places the pods that are hard to place first, and backtracks. The search finds a placement if one
exists, unless the limit of attempts is reached. The operator knows only the requests of pods outside the
group, so the search checks affinity terms only among the pods of the group (`pod_affinity`). A *series* is a
set of pods that must share one value of each topology key of their affinity terms.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from math import prod
from typing import Final

from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode, device_cost, find_obstacle
from heteroinfer_operator.nodes.pod_affinity import GroupTerms, PodSeries, Values

_MAX_TRIES: Final = 2500
"""Placements after which the search tries another order of the pods, or gives up. With 50 pods on 50
unequal nodes, both orders together took at most 0.6 s of one core (2026-11-28)."""
_MAX_CHOICES: Final = 1000
"""At most this many combinations of topology values are tried for pods that must be together."""
_MIN_TRIES: Final = 100
"""Each search tries at least this many placements, or four for each pod if that is more."""


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
    """Groups pods whose demands are equal apart from name and preferred node."""
    kinds: list[EqualPods] = []
    for index, demand in enumerate(demands):
        demand_of_kind = replace(demand, name="", preferred_node="")
        kind = next((kind for kind in kinds if kind.demand == demand_of_kind), None)
        if kind is None:
            kinds.append(EqualPods(demand=demand_of_kind, pods=[index]))
        else:
            kind.pods.append(index)
    return kinds


def search_nodes(
    demands: Sequence[PodDemand],
    free_nodes: Sequence[FreeNode],
    others: OtherGroups | None = None,
    *,
    searches: int = 1,
) -> tuple[str, ...] | None:
    """Returns nodes on which all pods fit together.

    Args:
        others: groups from which the pods prefer to be apart; None if there are none.
        searches: number of searches that share the limit of attempts.

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
        kind.free_nodes.sort(key=partial(preference, kind.demand, others=others))
    values_by_series = [find_topology_values(series, kinds) for series in terms.series]
    num_combinations = prod(map(len, values_by_series))  # of topology values; each has a search of its own
    num_searches = max(searches * num_combinations, 1)
    max_tries = max(_MAX_TRIES // num_searches, _MIN_TRIES, 4 * len(demands))
    for chosen_values in islice(product(*values_by_series), _MAX_CHOICES):
        found = _search_with_values(demands, kinds, terms, chosen_values, max_tries)
        if found is not None:
            return found
    return None


def _is_enough(kind: EqualPods, free_nodes: Sequence[FreeNode]) -> bool:
    """Reports whether these nodes have capacity for all pods of a kind, without any other pods."""
    return sum(free_node.max_pods(kind.demand.requests) for free_node in free_nodes) >= len(kind.pods)


def _nodes_with_values(series: PodSeries, values: Values, free_nodes: Sequence[FreeNode]) -> list[FreeNode]:
    """Returns the nodes that have these values of a series' topology keys."""
    return [free_node for free_node in free_nodes if series.values(free_node.node.labels) == values]


def find_topology_values(series: PodSeries, kinds: Sequence[EqualPods]) -> list[Values]:
    """Returns the topology values whose nodes have capacity for the pods of a series, in the nodes' order.

    Checks the capacity for each kind of these pods alone. The search later checks all kinds together.
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
        max_tries: maximum number of placements of a pod that the search may try.
    """
    limited_kinds = []
    for index, kind in enumerate(kinds):
        nodes_of_kind = kind.free_nodes
        for series, values in zip(terms.series, chosen_values, strict=True):
            if index in series.kinds:
                nodes_of_kind = _nodes_with_values(series, values, nodes_of_kind)
        limited_kinds.append(EqualPods(demand=kind.demand, pods=kind.pods, free_nodes=nodes_of_kind))
    kind_of = {pod: index for index, kind in enumerate(kinds) for pod in kind.pods}
    limited_kinds.sort(key=_hardness, reverse=True)
    search = _Search(demands=demands, kinds=limited_kinds, terms=terms, kind_of=kind_of, tries_left=max_tries)
    found = search.run()
    if found is not None or search.tries_left >= 0:  # found nodes, or proved that there are none
        return found
    # The search had too few tries. Another order may succeed: kinds with the least spare capacity first.
    limited_kinds.sort(key=_num_spare_pods)
    return _Search(
        demands=demands, kinds=limited_kinds, terms=terms, kind_of=kind_of, tries_left=max_tries
    ).run()


def preference(
    demand: PodDemand, free_node: FreeNode, others: OtherGroups | None = None
) -> tuple[float, ...]:
    """Returns the sort key of a node for a pod; the node with the smallest key is the best.

    The best node has the devices that suit the pod best. Of equal nodes, nodes with fewer other groups of the
    resource are better, then fuller nodes. If the distance to other groups outweighs the devices, the
    distance comes first.
    """
    cost = device_cost(demand, free_node)
    nearness = 0 if others is None else others.nearness(free_node.node)
    outweigh = others is not None and others.outweigh_devices_of(demand)
    first = (nearness, cost) if outweigh else (cost, nearness)
    free_devices = sum(free_node.free_amount(name) for name in demand.devices)
    fullness = (free_devices, free_node.free_amount("memory"))
    return (*first, *fullness)


def _hardness(kind: EqualPods) -> tuple[float, ...]:
    """Returns the sort key of a kind of pods. Kinds that are hard to place have larger keys.

    Pods with devices are the hardest, then pods whose requests are a large share of the largest free amount
    on one node.
    """
    requests = kind.demand.requests
    largest = {
        name: max((free_node.free.get(name, 0.0) for free_node in kind.free_nodes), default=0.0)
        for name in requests
    }
    shares = [amount / largest[name] for name, amount in requests.items() if largest[name] > 0]
    return (float(bool(kind.demand.devices)), max(shares, default=0.0))


def _num_spare_pods(kind: EqualPods) -> int:
    """Returns how many more pods of a kind would fit on its nodes if they were the only pods."""
    requests = kind.demand.requests
    return sum(free_node.max_pods(requests) for free_node in kind.free_nodes) - len(kind.pods)


@dataclass(slots=True, kw_only=True)
class _Search:
    """A depth-first search that places the pods of one kind after the other.

    Three rules keep the search small: it places equal pods in the order of the nodes, tries only one of equal
    nodes, and undoes a placement at once if the placement leaves too little capacity for the pods of any
    kind.

    Attributes:
        terms: affinity between the pods.
        kind_of: index into `terms.kinds` of each pod. The index into `kinds` differs, because `kinds` are
            sorted.
    """

    demands: Sequence[PodDemand]
    kinds: Sequence[EqualPods]
    terms: GroupTerms
    kind_of: Mapping[int, int]
    tries_left: int
    """Number of placements that the search may still try; negative after the search gave up."""
    chosen: dict[int, FreeNode] = field(default_factory=dict)
    before: dict[FreeNode, dict[str, float]] = field(default_factory=dict)
    """Free capacity of each used node before the search."""
    num_fit_on: list[dict[FreeNode, int]] = field(init=False)
    """For each kind and each of its nodes, the number of pods of this kind that still fit on the node."""
    num_fit: list[int] = field(init=False)
    """For each kind, the sum of `num_fit_on`."""
    waiting: list[int] = field(init=False)
    """For each kind, the number of pods that are not placed yet."""

    def __post_init__(self) -> None:
        """Counts the pods of each kind that fit, and the pods to place."""
        self.num_fit_on = [
            {free_node: free_node.max_pods(kind.demand.requests) for free_node in kind.free_nodes}
            for kind in self.kinds
        ]
        self.num_fit = [sum(num_fit_on.values()) for num_fit_on in self.num_fit_on]
        self.waiting = [len(kind.pods) for kind in self.kinds]

    def run(self) -> tuple[str, ...] | None:
        """Returns node names for the pods, or None. Restores the nodes' free capacity."""
        try:
            return self._search()
        finally:
            for free_node, free in self.before.items():
                free_node.free = free

    def _search(self) -> tuple[str, ...] | None:
        """Places pods one after the other, and undoes placements that lead to no solution.

        Returns the node of each pod, or None if the search found no placement within the permitted tries.
        """
        order = [(index, pod) for index, kind in enumerate(self.kinds) for pod in kind.pods]
        # An explicit stack, because a group may have a thousand pods and Python's stack is not that deep. It
        # has the nodes that are still to try: of each placed pod, and of the pod that is next.
        stack: list[Iterator[tuple[int, FreeNode]]] = []
        chosen_indexes: list[int] = []
        """For each placed pod, the index of its node in `free_nodes` of its kind."""
        while (num_placed := len(chosen_indexes)) < len(order):
            if len(stack) == num_placed:
                kind, _ = order[num_placed]
                # Equal pods are placed in the order of the nodes: begin at the node of the last such pod.
                follows_equal_pod = num_placed > 0 and order[num_placed - 1][0] == kind
                first = chosen_indexes[-1] if follows_equal_pod else 0
                stack.append(self._candidates(self.kinds[kind], first))
            candidate = next(stack[-1], None)
            if candidate is None:  # the next pod fits nowhere: undo the placement of the last pod
                stack.pop()
                if not chosen_indexes:
                    return None
                self._undo(*order[num_placed - 1])
                chosen_indexes.pop()
                continue
            self.tries_left -= 1
            if self.tries_left < 0:
                return None
            index, free_node = candidate
            if self._place(*order[num_placed], free_node):
                chosen_indexes.append(index)
        return tuple(self.chosen[pod].node.name for pod in range(len(self.demands)))

    def _candidates(self, kind: EqualPods, first: int) -> Iterator[tuple[int, FreeNode]]:
        """Yields the nodes on which a pod of this kind may be placed, with their indexes, from `first` on.

        Yields only one of equal nodes, which have the same free amounts and accept the same kinds. With
        affinity terms, yields all nodes, because the labels of the nodes matter, too.
        """
        seen: set[Hashable] = set()
        has_affinity = any(demand.near or demand.away for demand in self.demands)
        for index in range(first, len(kind.free_nodes)):
            free_node = kind.free_nodes[index]
            if not free_node.has(kind.demand.requests):
                continue
            accepted_kinds = tuple(free_node in num_fit_on for num_fit_on in self.num_fit_on)
            state = (frozenset(free_node.free.items()), accepted_kinds)
            if state in seen and not has_affinity:
                continue
            seen.add(state)
            yield index, free_node

    def _place(self, kind: int, pod: int, free_node: FreeNode) -> bool:
        """Places a pod on a node. Returns False if affinity terms or the needs of other pods forbid that."""
        self.chosen[pod] = free_node
        if not self._are_terms_met(pod, free_node):
            del self.chosen[pod]
            return False
        self.before.setdefault(free_node, dict(free_node.free))
        self._reserve(kind, free_node, 1)
        if any(num_fit < waiting for num_fit, waiting in zip(self.num_fit, self.waiting, strict=True)):
            self._undo(kind, pod)  # the pods of some kind would no longer fit
            return False
        return True

    def _undo(self, kind: int, pod: int) -> None:
        """Undoes the placement of a pod."""
        self._reserve(kind, self.chosen.pop(pod), -1)

    def _reserve(self, kind: int, free_node: FreeNode, pods: int) -> None:
        """Reserves capacity for `pods` pods of a kind on a node, and updates the counts of pods.

        -1 releases the capacity of one pod.
        """
        free_node.reserve(self.kinds[kind].demand.requests, times=pods)
        for index, num_fit_on in enumerate(self.num_fit_on):
            if free_node in num_fit_on:
                num_fit = free_node.max_pods(self.kinds[index].demand.requests)
                self.num_fit[index] += num_fit - num_fit_on[free_node]
                num_fit_on[free_node] = num_fit
        self.waiting[kind] -= pods

    def _are_terms_met(self, pod: int, free_node: FreeNode) -> bool:
        """Reports whether the placed pods, to which this pod now belongs, meet their affinity terms."""
        for other, other_node in self.chosen.items():  # anti-affinity: no equal topology value
            keys = self.terms.away[self.kind_of[pod]][self.kind_of[other]]
            if other != pod and any(_have_same_value(free_node, other_node, key) for key in keys):
                return False
        if self.terms.has_no_terms:
            return True
        if not all(self._may_be_near(other) for other in self.chosen):
            return False
        if len(self.chosen) < len(self.demands):  # the last check needs the nodes of all pods
            return True
        return self.terms.is_placed_in_any_order(
            [self.kind_of[each] for each in self.chosen],
            [chosen_node.node.labels for chosen_node in self.chosen.values()],
        )

    def _may_be_near(self, pod: int) -> bool:
        """Reports whether a placed pod is near its peers, or may still be: some peers are not placed yet.

        The peers of a pod are the other pods of the group that match all its required affinity terms.
        """
        kind = self.kind_of[pod]
        peers, keys = self.terms.peers[kind], [term["topologyKey"] for term in self.demands[pod].near]
        others = [other for other, other_kind in self.kind_of.items() if other != pod and other_kind in peers]
        if any(other not in self.chosen for other in others):
            return True
        places = [self.chosen[other] for other in others]
        places_with_key = [place for place in places if any(key in place.node.labels for key in keys)]
        if not places_with_key:  # only a pod that matches its own terms may be the first of a series
            return not peers or kind in peers
        # Different pods may satisfy different topology keys.
        return all(
            any(_have_same_value(self.chosen[pod], place, key) for place in places_with_key) for key in keys
        )


def _have_same_value(one: FreeNode, other: FreeNode, key: str) -> bool:
    """Reports whether two nodes have the same value of a topology key."""
    value = one.node.labels.get(key)
    return value is not None and value == other.node.labels.get(key)
