"""Pods onto nodes: whether all of them fit, as the scheduler counts, and if not what is in the way. Pure.

Nodes are searched largest pod first, and taken back where that leads nowhere: an exact search, but
for its bound on tries. Pods of strangers are known by what they request only: affinity terms are
checked among the pods of the group (`pod_affinity`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice
from math import prod
from typing import Final, NamedTuple

from heteroinfer_contract.byte_size import format_bytes
from heteroinfer_operator.nodes.demand import PodDemand, selects_node, tolerates
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.pod_affinity import GroupTerms, PodSeries, Values, combinations

MOST_TRIES: Final = 5000
"""Pods put onto a node before the search gives up: about 20 ms of one core (2026-11-21)."""
_MOST_CHOICES: Final = 1000
"""Values of topology keys that are tried for pods which must be together."""
_FEWEST_TRIES: Final = 100
"""For each such choice."""
_LEAST: Final = 1e-6
"""Below this an amount is rounding."""


@dataclass(slots=True, kw_only=True, eq=False)
class FreeNode:
    """A node and what is free on it; `take` uses it up. Equal to itself only."""

    node: NodeView
    free: dict[str, float]
    promised: list[str] = field(default_factory=list)
    """Names of the pods without a node for which some of it is kept."""

    @classmethod
    def of(cls, node: NodeView) -> "FreeNode":
        """Returns what the pods on a node leave free."""
        return cls(
            node=node,
            free={name: whole - node.requested.get(name, 0.0) for name, whole in node.allocatable.items()},
        )

    def has(self, requests: Mapping[str, float]) -> bool:
        """Returns whether so much is free."""
        return all(self.left(name) + _LEAST >= asked for name, asked in requests.items())

    def left(self, resource: str) -> float:
        """Returns what is free of a resource.

        A node lacks the devices that it doesn't name. What it says nothing of that every node has
        (cpu, memory, pods) is not bounded: `heteroinfer up` and `plan --gpus` know devices only.
        """
        return self.free.get(resource, 0.0 if "/" in resource else float("inf"))

    def take(self, requests: Mapping[str, float], *, times: int = 1) -> None:
        """Uses it up; `times` -1 gives it back."""
        for name, asked in requests.items():
            if name in self.free:
                self.free[name] -= asked * times

    def holds(self, requests: Mapping[str, float]) -> int:
        """Returns how many such pods it holds."""
        counts = [
            int((self.left(name) + _LEAST) // asked)
            for name, asked in requests.items()
            if asked > 0 and self.left(name) != float("inf")
        ]
        return max(min(counts, default=2**31), 0)


def build_free_nodes(nodes: Sequence[NodeView], promised: Sequence[PodDemand] = ()) -> list[FreeNode]:
    """Returns what is free on each node once pods without a node are placed.

    Such a pod is placed on the node that it names if it fits there, or else on the first node where it fits.
    """
    free_nodes = [FreeNode.of(node) for node in nodes]
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    searched: dict[Hashable, int] = {}
    """By kind of pod, how many nodes have no room for one. Free capacity only shrinks here."""
    for demand in promised:
        chosen = by_name.get(demand.node)
        if chosen is None or not _may_take(demand, chosen):
            kind = _kind(demand)
            full = searched.get(kind, 0)
            while full < len(free_nodes) and not _may_take(demand, free_nodes[full]):
                full += 1
            searched[kind] = full
            if full == len(free_nodes):
                continue
            chosen = free_nodes[full]
        chosen.take(demand.requests)
        chosen.promised.append(demand.name)
    return free_nodes


def _may_take(demand: PodDemand, free_node: FreeNode) -> bool:
    return free_node.has(demand.requests) and not obstacle(demand, free_node.node)


def _kind(demand: PodDemand) -> Hashable:
    """Returns an equal key for pods that ask the same of a node."""
    asked = frozenset(demand.requests.items()), frozenset(demand.node_selector.items())
    return asked, repr((demand.node_terms, demand.tolerations, demand.near))


class Nearness(IntEnum):
    """How near a node comes to a pod that cannot be on it; the nearest is named first."""

    LACKS = 0
    """It lacks capacity or a label."""
    EXCLUDED = 1
    """The pod may not be there, whatever is free."""


class Obstacle(NamedTuple):
    """Why a pod cannot be on a node.

    Attributes:
        kind: how near the node comes.
        verb: as one node does it; `verbs` is for several.
        verbs: the same of several nodes.
        rest: the words behind the verb.
    """

    kind: Nearness
    verb: str
    verbs: str
    rest: str

    def of(self, nodes: int) -> str:
        """Returns the words behind the names of so many nodes."""
        return f"{self.verb if nodes == 1 else self.verbs} {self.rest}"


def _lacks(rest: str) -> Obstacle:
    return Obstacle(Nearness.LACKS, "has", "have", rest)


def _is_excluded(rest: str) -> Obstacle:
    return Obstacle(Nearness.EXCLUDED, "is", "are", rest)


def obstacle(demand: PodDemand, node: NodeView) -> Obstacle | None:
    """Returns why a pod may not be on a node however much is free there, or None."""
    return lasting_obstacle(demand, node) if node.schedulable else _is_excluded(node.problem)


def lasting_obstacle(demand: PodDemand, node: NodeView) -> Obstacle | None:
    """Returns why a pod may not be on a node even once that is Ready and not cordoned, or None."""
    taint = next((t for t in node.taints if t.keeps_away and not tolerates(demand.tolerations, t)), None)
    if taint is not None:
        return _is_excluded(f"tainted {taint}")
    key = next((t["topologyKey"] for t in demand.near if t["topologyKey"] not in node.labels), None)
    if key is not None:
        return _lacks(f"no label {key}, which the pod's podAffinity names")
    selected = selects_node(demand, node.name, node.labels)
    return None if selected else _is_excluded("not selected by the pod's node rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A node for each pod.

    Attributes:
        nodes: names, in the order of the demands.
        domain: value of the topology key that all of them have; "" without a key.
    """

    nodes: tuple[str, ...]
    domain: str = ""


def assign_nodes(
    demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], topology_key: str = ""
) -> Placement | None:
    """Returns where all pods fit together, or None; takes nothing.

    Args:
        demands: of the pods of one group.
        free_nodes: of all nodes.
        topology_key: a node label of which the group keeps to one value; "" for any nodes.
    """
    if not topology_key:
        nodes = _search(demands, free_nodes)
        return None if nodes is None else Placement(nodes=nodes)
    for value, inside in _domains(free_nodes, topology_key).items():
        nodes = _search(demands, inside)
        if nodes is not None:
            return Placement(nodes=nodes, domain=value)
    return None


def _domains(free_nodes: Sequence[FreeNode], topology_key: str) -> dict[str, list[FreeNode]]:
    domains: dict[str, list[FreeNode]] = {}
    for free_node in free_nodes:
        value = free_node.node.labels.get(topology_key)
        if value is not None:
            domains.setdefault(value, []).append(free_node)
    return dict(sorted(domains.items()))


@dataclass(slots=True, kw_only=True)
class _AlikePods:
    """Pods that ask for the same, and where they may be."""

    demand: PodDemand
    pods: list[int]
    free_nodes: list[FreeNode] = field(default_factory=list)


def _kinds(demands: Sequence[PodDemand]) -> list[_AlikePods]:
    kinds: list[_AlikePods] = []
    for index, demand in enumerate(demands):
        shape = replace(demand, name="", node="")
        kind = next((kind for kind in kinds if kind.demand == shape), None)
        if kind is None:
            kinds.append(_AlikePods(demand=shape, pods=[index]))
        else:
            kind.pods.append(index)
    return kinds


def _search(demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode]) -> tuple[str, ...] | None:
    kinds = _kinds(demands)
    terms = GroupTerms(kinds=[kind.demand for kind in kinds])
    for kind in kinds:
        kind.free_nodes = [free_node for free_node in free_nodes if not obstacle(kind.demand, free_node.node)]
        if not _is_enough(kind, kind.free_nodes):
            return None
        kind.free_nodes.sort(key=lambda free_node, kind=kind: _preference(kind.demand, free_node))  # type: ignore[misc]  # bound at once
    choices = [_values(series, kinds) for series in terms.series]
    tries = max(MOST_TRIES // max(prod(map(len, choices)), 1), _FEWEST_TRIES)
    for chosen in islice(combinations(choices), _MOST_CHOICES):
        found = _search_within(demands, free_nodes, kinds, terms, chosen, tries)
        if found is not None:
            return found
    return None


def _is_enough(kind: _AlikePods, free_nodes: Sequence[FreeNode]) -> bool:
    return sum(free_node.holds(kind.demand.requests) for free_node in free_nodes) >= len(kind.pods)


def _within(series: PodSeries, values: Values, free_nodes: Sequence[FreeNode]) -> list[FreeNode]:
    return [free_node for free_node in free_nodes if series.values(free_node.node.labels) == values]


def _values(series: PodSeries, kinds: Sequence[_AlikePods]) -> list[Values]:
    """Returns the places with free capacity for each kind of a series by itself, the preferred ones first."""
    members = [kinds[index] for index in sorted(series.kinds)]
    found = dict.fromkeys(series.values(free_node.node.labels) for free_node in members[0].free_nodes)
    return [
        values
        for values in found
        if values is not None
        and all(_is_enough(kind, _within(series, values, kind.free_nodes)) for kind in members)
    ]


def _search_within(
    demands: Sequence[PodDemand],
    free_nodes: Sequence[FreeNode],
    kinds: Sequence[_AlikePods],
    terms: GroupTerms,
    chosen: Sequence[Values],
    tries: int,
) -> tuple[str, ...] | None:
    """Returns where all pods fit, each series where it was chosen to be; None if that is not found."""
    copies = {each: FreeNode(node=each.node, free=dict(each.free)) for each in free_nodes}
    limited = []
    for index, kind in enumerate(kinds):
        where: Sequence[FreeNode] = kind.free_nodes
        for series, values in zip(terms.series, chosen, strict=True):
            where = _within(series, values, where) if index in series.kinds else where
        limited.append(replace(kind, free_nodes=[copies[free_node] for free_node in where]))
    kind_of = {pod: index for index, kind in enumerate(kinds) for pod in kind.pods}
    limited.sort(key=_hardness, reverse=True)
    return _Search(demands=demands, kinds=limited, terms=terms, kind_of=kind_of, tries_left=tries).run()


def _preference(demand: PodDemand, free_node: FreeNode) -> tuple[float, ...]:
    """Returns what orders nodes for a pod: large GPUs, then full nodes first; without GPUs those without."""
    devices = [name for name in demand.requests if "/" in name]
    if devices:
        memory = sum(device_memory_mib(free_node.node, name) or 0 for name in devices)
        return (-memory, sum(free_node.left(name) for name in devices), free_node.left("memory"))
    spare = sum(left for name, left in free_node.free.items() if "/" in name)
    return (float(spare > 0), free_node.left("memory"))


def device_memory_mib(node: NodeView, resource: str) -> int | None:
    """Returns the memory of one device in MiB, as GPU feature discovery labels it, or None.

    The label is `<resource>.memory`: `nvidia.com/gpu.memory`, `nvidia.com/mig-1g.10gb.memory`
    (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery).
    """
    text = node.labels.get(f"{resource}.memory", "")
    return int(text) if text.isdigit() else None


def _hardness(kind: _AlikePods) -> tuple[float, ...]:
    """Returns how hard it is to place a kind: devices first, then the share of the largest node."""
    requests = kind.demand.requests
    largest = {
        name: max((free_node.free.get(name, 0.0) for free_node in kind.free_nodes), default=0.0)
        for name in requests
    }
    shares = [asked / largest[name] for name, asked in requests.items() if largest[name] > 0]
    return (float(any("/" in name for name in requests)), max(shares, default=0.0))


@dataclass(slots=True, kw_only=True)
class _Search:
    """Depth first, hardest kind first; alike pods keep the order of nodes, alike nodes are tried once."""

    demands: Sequence[PodDemand]
    kinds: list[_AlikePods]
    terms: GroupTerms
    kind_of: Mapping[int, int]
    tries_left: int
    chosen: dict[int, FreeNode] = field(default_factory=dict)
    open_to: dict[FreeNode, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Notes for each node which kinds may be there: nodes of the same kinds and amounts are alike."""
        kinds_of: dict[FreeNode, list[int]] = {}
        for index, kind in enumerate(self.kinds):
            for free_node in kind.free_nodes:
                kinds_of.setdefault(free_node, []).append(index)
        self.open_to = {free_node: frozenset(kinds) for free_node, kinds in kinds_of.items()}

    def run(self) -> tuple[str, ...] | None:
        order = [(kind, pod) for kind in self.kinds for pod in kind.pods]
        # An explicit stack: a group may have a thousand pods, and Python's own is not that deep.
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
            if self._put(order[len(chosen_nodes)][1], free_node):
                chosen_nodes.append(index)
        return tuple(self.chosen[pod].node.name for pod in range(len(self.demands)))

    def _candidates(self, kind: _AlikePods, first: int) -> Iterator[tuple[int, FreeNode]]:
        seen: list[tuple[dict[str, float], frozenset[int]]] = []
        paired = any(demand.near or demand.away for demand in self.demands)
        for index in range(first, len(kind.free_nodes)):
            free_node = kind.free_nodes[index]
            if not free_node.has(kind.demand.requests):
                continue
            state = (dict(free_node.free), self.open_to[free_node])
            if not paired and state in seen:
                continue
            seen.append(state)
            yield index, free_node

    def _put(self, pod: int, free_node: FreeNode) -> bool:
        self.chosen[pod] = free_node
        if not self._agrees(pod, free_node):
            del self.chosen[pod]
            return False
        free_node.take(self.demands[pod].requests)
        return True

    def _undo(self, pod: int) -> None:
        self.chosen.pop(pod).take(self.demands[pod].requests, times=-1)

    def _agrees(self, pod: int, free_node: FreeNode) -> bool:
        """Returns whether affinity terms between the placed pods hold, as far as these are placed."""
        for other, its_node in self.chosen.items():
            keys = self.terms.away[self.kind_of[pod]][self.kind_of[other]]
            if other != pod and any(_same(free_node, its_node, key) for key in keys):
                return False
        if self.terms.says_nothing:
            return True
        if not all(self._may_be_near(other) for other in self.chosen):
            return False
        return len(self.chosen) < len(self.demands) or self.terms.is_placed_in_any_order(
            [self.kind_of[each] for each in self.chosen],
            [its_node.node.labels for its_node in self.chosen.values()],
        )

    def _may_be_near(self, pod: int) -> bool:
        """Returns whether a placed pod is near a pod that it must be near to, or such pods are to come."""
        kind = self.kind_of[pod]
        peers, keys = self.terms.peers[kind], [term["topologyKey"] for term in self.demands[pod].near]
        others = [other for other, its_kind in self.kind_of.items() if other != pod and its_kind in peers]
        if any(other not in self.chosen for other in others):
            return True
        places = [self.chosen[other] for other in others]
        counted = [place for place in places if any(key in place.node.labels for key in keys)]
        if not counted:
            return not peers or kind in peers
        return all(any(_same(self.chosen[pod], place, key) for place in counted) for key in keys)


def _same(one: FreeNode, other: FreeNode, key: str) -> bool:
    value = one.node.labels.get(key)
    return value is not None and value == other.node.labels.get(key)


# What is in the way

_MOST_NODES: Final = 3
_MOST_REASONS: Final = 5


def explain(demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], topology_key: str = "") -> str:
    """Returns what is missing and where, for pods that `assign_nodes` found no nodes for."""
    if not topology_key:
        return _missing(demands, free_nodes)
    domains = _domains(free_nodes, topology_key)
    if not domains:
        return f"no node has the label {topology_key} that scheduling.topologyKey names"
    return _no_single_value(topology_key, demands, domains)


def _no_single_value(
    keys: str, demands: Sequence[PodDemand], domains: Mapping[str, Sequence[FreeNode]]
) -> str:
    reported = [f"{value}: {_missing(demands, inside)}" for value, inside in domains.items()]
    more = f"; and {len(reported) - _MOST_NODES} more values" if len(reported) > _MOST_NODES else ""
    words = "; ".join(reported[:_MOST_NODES])
    return f"no single value of {keys} has enough free capacity: {words}{more}"


def _missing_together(
    demands: Sequence[PodDemand], kinds: Sequence[_AlikePods], free_nodes: Sequence[FreeNode]
) -> str:
    """Returns why pods that must be in one place by their podAffinity have none, or ""."""
    for kind in kinds:
        kind.free_nodes = [free_node for free_node in free_nodes if not obstacle(kind.demand, free_node.node)]
    for series in GroupTerms(kinds=[kind.demand for kind in kinds]).series:
        if _values(series, kinds):
            continue
        members = [demands[pod] for index in sorted(series.kinds) for pod in kinds[index].pods]
        domains: dict[str, list[FreeNode]] = {}
        for free_node in free_nodes:
            if (values := series.values(free_node.node.labels)) is not None:
                domains.setdefault(", ".join(values), []).append(free_node)
        words = _no_single_value(", ".join(series.keys), members, dict(sorted(domains.items())))
        return f"{words}; podAffinity of these pods requires one value for all of them"
    return ""


def _missing(demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode]) -> str:
    for kind in _kinds(demands):
        count, requests = len(kind.pods), kind.demand.requests
        where = [free_node for free_node in free_nodes if not obstacle(kind.demand, free_node.node)]
        held = sum(free_node.holds(requests) for free_node in where)
        if held < count:
            need = f"needs {_pods(count, demands[kind.pods[0]])} with {_amounts(requests)}"
            held_words = f", and there is capacity for {held}" if held else ""
            return f"{need}{held_words}; {_obstacles(kind.demand, free_nodes)}"
    if together := _missing_together(demands, _kinds(demands), free_nodes):
        return together
    needs = ", ".join(
        f"{_pods(len(kind.pods), demands[kind.pods[0]])} with {_amounts(kind.demand.requests)}"
        for kind in _kinds(demands)
    )
    terms = ", by their podAffinity and podAntiAffinity" if any(d.near or d.away for d in demands) else ""
    return f"each pod has a node by itself, but there are not nodes for all of them at once{terms}: {needs}"


def _pods(count: int, demand: PodDemand) -> str:
    return f"{count} pod{'s' if count > 1 else ''} ({demand.name})"


def _obstacles(demand: PodDemand, free_nodes: Sequence[FreeNode]) -> str:
    if not free_nodes:
        return "there are no nodes"
    by_obstacle: dict[Obstacle, list[str]] = {}
    for free_node in free_nodes:
        found = obstacle(demand, free_node.node) or _lack(demand, free_node)
        by_obstacle.setdefault(found, []).append(free_node.node.name)
    order = sorted(by_obstacle.items(), key=lambda item: (item[0].kind, len(item[1])))
    reported = [f"{_nodes(names)} {found.of(len(names))}" for found, names in order[:_MOST_REASONS]]
    rest = sum(len(names) for _, names in order[_MOST_REASONS:])
    return ", ".join(reported) + (f", {rest} more nodes don't fit either" if rest else "")


def _nodes(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]}"
    more = f" and {len(names) - _MOST_NODES} more" if len(names) > _MOST_NODES else ""
    return f"nodes {', '.join(names[:_MOST_NODES])}{more}"


def _lack(demand: PodDemand, free_node: FreeNode) -> Obstacle:
    """Returns which of a pod's requests a node lacks."""
    lacking = [name for name, asked in demand.requests.items() if not free_node.has({name: asked})]
    if not lacking:
        return _lacks(f"capacity for {free_node.holds(demand.requests)}")
    words = []
    for name in lacking:
        have, all_ = max(free_node.left(name), 0.0), free_node.node.allocatable.get(name, 0.0)
        words.append(
            f"{amount(name, have)} free of {amount(name, all_)} {_word(name)}"
            if all_
            else f"no {_word(name)}"
        )
    return _lacks(", ".join(words))


def _amounts(requests: Mapping[str, float]) -> str:
    asked = [f"{amount(name, value)} {_word(name)}" for name, value in requests.items() if name != "pods"]
    return ", ".join(asked) or "no requests"


def _word(resource: str) -> str:
    return {"cpu": "CPUs", "memory": "of memory", "pods": "slots for pods"}.get(resource, resource)


def amount(resource: str, value: float) -> str:
    """Returns an amount of a resource for people."""
    if resource in ("memory", "ephemeral-storage"):
        return format_bytes(value)
    return f"{value:.10g}" if "/" in resource or resource == "pods" else f"{value:.3g}"
