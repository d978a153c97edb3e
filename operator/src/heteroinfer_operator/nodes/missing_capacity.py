"""Messages about the capacity that pods without nodes lack. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.placement import (
    AlikePods,
    FreeNode,
    Obstacle,
    alike_pods,
    domains_of,
    obstacle,
    places_of,
)
from heteroinfer_operator.nodes.pod_affinity import GroupTerms

_MAX_NODES: Final = 3
_MAX_REASONS: Final = 5


def explain(demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], topology_key: str = "") -> str:
    """Describes the missing capacity if `assign_nodes` found no nodes for the pods."""
    if not topology_key:
        return _missing(demands, free_nodes)
    domains = domains_of(free_nodes, topology_key)
    if not domains:
        return f"no node has the label {topology_key} that scheduling.topologyKey names"
    return _no_single_value(topology_key, demands, domains)


def _no_single_value(
    keys: str, demands: Sequence[PodDemand], domains: Mapping[str, Sequence[FreeNode]]
) -> str:
    reported = [f"{value}: {_missing(demands, inside)}" for value, inside in domains.items()]
    more = f"; and {len(reported) - _MAX_NODES} more values" if len(reported) > _MAX_NODES else ""
    words = "; ".join(reported[:_MAX_NODES])
    return f"no single value of {keys} has enough free capacity: {words}{more}"


def _missing_together(
    demands: Sequence[PodDemand], kinds: Sequence[AlikePods], free_nodes: Sequence[FreeNode]
) -> str:
    """Describes why pods that podAffinity requires together do not fit together; "" if they do."""
    for kind in kinds:
        kind.free_nodes = [free_node for free_node in free_nodes if not obstacle(kind.demand, free_node.node)]
    for series in GroupTerms(kinds=[kind.demand for kind in kinds]).series:
        if places_of(series, kinds):
            continue
        members = [demands[pod] for index in sorted(series.kinds) for pod in kinds[index].pods]
        domains: dict[str, list[FreeNode]] = {}
        for free_node in free_nodes:
            if (values := series.values(free_node.node.labels)) is not None:
                domains.setdefault(", ".join(values), []).append(free_node)
        words = _no_single_value(", ".join(series.keys), members, dict(sorted(domains.items())))
        return f"{words}; the podAffinity of these pods requires one value for all pods"
    return ""


def _missing(demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode]) -> str:
    for kind in alike_pods(demands):
        count, requests = len(kind.pods), kind.demand.requests
        where = [free_node for free_node in free_nodes if not obstacle(kind.demand, free_node.node)]
        held = sum(free_node.holds(requests) for free_node in where)
        if held < count:
            need = f"needs {_pods(count, demands[kind.pods[0]])} with {_amounts(requests)}"
            held_words = f", and there is capacity for {held}" if held else ""
            return f"{need}{held_words}; {_obstacles(kind.demand, free_nodes)}"
    if together := _missing_together(demands, alike_pods(demands), free_nodes):
        return together
    needs = ", ".join(
        f"{_pods(len(kind.pods), demands[kind.pods[0]])} with {_amounts(kind.demand.requests)}"
        for kind in alike_pods(demands)
    )
    terms = " under their podAffinity and podAntiAffinity" if any(d.near or d.away for d in demands) else ""
    return f"each pod alone fits on a node, but not all pods together{terms}: {needs}"


def _pods(count: int, demand: PodDemand) -> str:
    return f"{count} pod{'s' if count > 1 else ''} ({demand.name})"


def _obstacles(demand: PodDemand, free_nodes: Sequence[FreeNode]) -> str:
    if not free_nodes:
        return "there are no nodes"
    by_obstacle: dict[Obstacle, list[str]] = {}
    for free_node in free_nodes:
        found = obstacle(demand, free_node.node) or _lack(demand, free_node)
        by_obstacle.setdefault(found, []).append(free_node.node.name)
    order = sorted(by_obstacle.items(), key=lambda item: (item[0].excludes, len(item[1])))
    reported = [f"{name_nodes(names)} {found.of(len(names))}" for found, names in order[:_MAX_REASONS]]
    rest = sum(len(names) for _, names in order[_MAX_REASONS:])
    return ", ".join(reported) + (f", {rest} more nodes don't fit either" if rest else "")


def name_nodes(names: Sequence[str]) -> str:
    """Lists nodes by name, at most _MAX_NODES."""
    if len(names) == 1:
        return f"node {names[0]}"
    more = f" and {len(names) - _MAX_NODES} more" if len(names) > _MAX_NODES else ""
    return f"nodes {', '.join(names[:_MAX_NODES])}{more}"


def _lack(demand: PodDemand, free_node: FreeNode) -> Obstacle:
    """Returns the pod's requests that a node lacks."""
    lacking = [name for name, asked in demand.requests.items() if not free_node.has({name: asked})]
    if not lacking:
        return Obstacle(False, f"capacity for {free_node.holds(demand.requests)}")
    words = []
    for name in lacking:
        have, all_ = max(free_node.left(name), 0.0), free_node.node.allocatable.get(name, 0.0)
        words.append(
            f"{_amount(name, have)} free of {_amount(name, all_)} {_word(name)}"
            if all_
            else f"no {_word(name)}"
        )
    return Obstacle(False, ", ".join(words))


def _amounts(requests: Mapping[str, float]) -> str:
    asked = [f"{_amount(name, value)} {_word(name)}" for name, value in requests.items() if name != "pods"]
    return ", ".join(asked) or "no requests"


def _word(resource: str) -> str:
    return {"cpu": "CPUs", "memory": "of memory", "pods": "slots for pods"}.get(resource, resource)


def _amount(resource: str, value: float) -> str:
    """Formats an amount of a resource for messages."""
    if resource in ("memory", "ephemeral-storage"):
        return format_bytes(value)
    return f"{value:.10g}" if "/" in resource or resource == "pods" else f"{value:.3g}"
