"""Messages about the capacity that pods without nodes lack. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.node_search import EqualPods, find_topology_values, group_equal_pods
from heteroinfer_operator.nodes.placement import FreeNode, Obstacle, domains_of, find_obstacle
from heteroinfer_operator.nodes.pod_affinity import GroupTerms

_MAX_NODES: Final = 3
"""A message has at most this many names of nodes, or values of a topology key."""
_MAX_REASONS: Final = 5
"""A message has at most this many reasons why nodes cannot run a pod."""


def describe_missing_capacity(
    demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode], topology_key: str = ""
) -> str:
    """Describes the missing capacity, after `assign_nodes` has found no nodes for the pods."""
    if not topology_key:
        return _describe_missing(demands, free_nodes)
    domains = domains_of(free_nodes, topology_key)
    if not domains:
        return f"no node has the label {topology_key}, which scheduling.topologyKey names"
    return _describe_domains(topology_key, demands, domains)


def _describe_domains(
    keys: str, demands: Sequence[PodDemand], domains: Mapping[str, Sequence[FreeNode]]
) -> str:
    """Describes, for each value of a topology key, the capacity that the nodes with this value lack."""
    reported = [f"{value}: {_describe_missing(demands, inside)}" for value, inside in domains.items()]
    more = f"; and {len(reported) - _MAX_NODES} more values" if len(reported) > _MAX_NODES else ""
    listed = "; ".join(reported[:_MAX_NODES])
    return f"no single value of {keys} has enough free capacity: {listed}{more}"


def _describe_affinity_conflict(
    demands: Sequence[PodDemand], kinds: Sequence[EqualPods], free_nodes: Sequence[FreeNode]
) -> str:
    """Describes why the pods that podAffinity requires together do not fit together; "" if they fit."""
    for kind in kinds:
        kind.free_nodes = [
            free_node for free_node in free_nodes if not find_obstacle(kind.demand, free_node.node)
        ]
    for series in GroupTerms(kinds=[kind.demand for kind in kinds]).series:
        if find_topology_values(series, kinds):
            continue
        members = [demands[pod] for index in sorted(series.kinds) for pod in kinds[index].pods]
        domains: dict[str, list[FreeNode]] = {}
        for free_node in free_nodes:
            if (values := series.values(free_node.node.labels)) is not None:
                domains.setdefault(", ".join(values), []).append(free_node)
        text = _describe_domains(", ".join(series.keys), members, dict(sorted(domains.items())))
        return f"{text}; podAffinity requires one value for all pods"
    return ""


def _describe_missing(demands: Sequence[PodDemand], free_nodes: Sequence[FreeNode]) -> str:
    """Describes the capacity that these nodes lack for the pods.

    The first cause in this order is described: a kind of pods that does not fit even alone, an affinity that
    cannot be met, and the sum of all pods.
    """
    kinds = group_equal_pods(demands)
    for kind in kinds:
        count, requests = len(kind.pods), kind.demand.requests
        accepting_nodes = [
            free_node for free_node in free_nodes if not find_obstacle(kind.demand, free_node.node)
        ]
        num_placeable = sum(free_node.max_pods(requests) for free_node in accepting_nodes)
        if num_placeable < count:
            need = f"needs {_describe_pods(count, demands[kind.pods[0]])} with {_format_amounts(requests)}"
            placeable_text = f", and there is capacity for {num_placeable}" if num_placeable else ""
            return f"{need}{placeable_text}; {_describe_obstacles(kind.demand, free_nodes)}"
    if affinity_conflict := _describe_affinity_conflict(demands, kinds, free_nodes):
        return affinity_conflict
    needs = ", ".join(
        f"{_describe_pods(len(kind.pods), demands[kind.pods[0]])} with "
        f"{_format_amounts(kind.demand.requests)}"
        for kind in kinds
    )
    affinity_text = (
        " under their podAffinity and podAntiAffinity"
        if any(demand.near or demand.away for demand in demands)
        else ""
    )
    return f"each pod alone fits on a node, but not all pods together{affinity_text}: {needs}"


def _describe_pods(count: int, demand: PodDemand) -> str:
    return f"{count} pod{'s' if count > 1 else ''} ({demand.name})"


def _describe_obstacles(demand: PodDemand, free_nodes: Sequence[FreeNode]) -> str:
    """Describes why each node cannot run the pod. Lists nodes with the same reason together.

    Nodes that lack capacity or a label come before nodes that reject the pod in any case. Of both kinds, the
    reason with the fewest nodes comes first.
    """
    if not free_nodes:
        return "there are no nodes"
    by_obstacle: dict[Obstacle, list[FreeNode]] = {}
    for free_node in free_nodes:
        obstacle = find_obstacle(demand, free_node.node) or _describe_free_capacity(demand, free_node)
        by_obstacle.setdefault(obstacle, []).append(free_node)
    by_importance = sorted(by_obstacle.items(), key=lambda item: (item[0].excludes, len(item[1])))
    reported = [
        f"{name_nodes([each.node.name for each in nodes])} {obstacle.describe(len(nodes))}"
        f"{_describe_limits(demand, nodes)}"
        for obstacle, nodes in by_importance[:_MAX_REASONS]
    ]
    num_others = sum(len(nodes) for _, nodes in by_importance[_MAX_REASONS:])
    return ", ".join(reported) + (f", {num_others} more nodes don't fit either" if num_others else "")


def name_nodes(names: Sequence[str]) -> str:
    """Lists nodes by name, at most _MAX_NODES."""
    if len(names) == 1:
        return f"node {names[0]}"
    more = f" and {len(names) - _MAX_NODES} more" if len(names) > _MAX_NODES else ""
    return f"nodes {', '.join(names[:_MAX_NODES])}{more}"


def _describe_free_capacity(demand: PodDemand, free_node: FreeNode) -> Obstacle:
    """Describes which of a pod's requests exceed the free capacity of a node.

    If no request does, describes for how many such pods the node has capacity.
    """
    lacking = [name for name, requested in demand.requests.items() if not free_node.has({name: requested})]
    if not lacking:
        return Obstacle(excludes=False, rest=f"capacity for {free_node.max_pods(demand.requests)}")
    return Obstacle(excludes=False, rest=_format_free_amounts(lacking, free_node))


def _describe_limits(demand: PodDemand, nodes: Sequence[FreeNode]) -> str:
    """Lists in parentheses the free amounts that limit the number of pods on each node.

    The nodes have the same obstacle. Returns "" if the obstacle already contains the cause: the nodes reject
    the pod, or have capacity for no pod. Also returns "" if the amounts of the nodes differ.
    """
    if find_obstacle(demand, nodes[0].node) or not nodes[0].max_pods(demand.requests):
        return ""
    texts = set()
    for node in nodes:
        one_more = node.max_pods(demand.requests) + 1
        limits = [name for name, each in demand.requests.items() if not node.has({name: one_more * each})]
        texts.add(_format_free_amounts(limits, node))
    return f" ({texts.pop()})" if len(texts) == 1 and "" not in texts else ""


def _format_free_amounts(resources: Sequence[str], free_node: FreeNode) -> str:
    """Lists the free amount and the whole amount of each resource on a node."""
    texts = []
    for name in resources:
        free, whole = max(free_node.free_amount(name), 0.0), free_node.node.allocatable.get(name, 0.0)
        texts.append(
            f"{_format_amount(name, free)} free of {_format_amount(name, whole)} {_resource_name(name)}"
            if whole
            else f"no {_resource_name(name)}"
        )
    return ", ".join(texts)


def _format_amounts(requests: Mapping[str, float]) -> str:
    """Lists the requests of a pod, without the request for one pod slot."""
    amounts = [
        f"{_format_amount(name, value)} {_resource_name(name)}"
        for name, value in requests.items()
        if name != "pods"
    ]
    return ", ".join(amounts) or "no requests"


def _resource_name(resource: str) -> str:
    return {"cpu": "CPUs", "memory": "of memory", "pods": "slots for pods"}.get(resource, resource)


def _format_amount(resource: str, value: float) -> str:
    """Formats an amount of a resource for messages."""
    if resource in ("memory", "ephemeral-storage"):
        return format_bytes(value)
    is_count = "/" in resource or resource == "pods"  # a whole number, which .3g could round
    return f"{value:.10g}" if is_count else f"{value:.3g}"
