"""What a pod asks of nodes, read from its manifest as the scheduler reads it. Pure.

Must not import kopf, a client, os, time, random or logging.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from heteroinfer_operator.quantity import parse_quantity

Manifest: TypeAlias = Mapping[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
"""Of an affinity: what must hold when a pod is placed."""
PODS: Final = "pods"
"""The resource of which every pod takes one."""

_HARD: Final = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def __str__(self) -> str:
        """Returns it as kubectl writes it, `gpu=x:NoSchedule`."""
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"

    @property
    def keeps_away(self) -> bool:
        """Returns whether a pod that does not tolerate it is not placed."""
        return self.effect in _HARD


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDemand:
    """What a pod asks of the node that it is placed on.

    Attributes:
        name: for people.
        requests: by resource name: bytes for memory, cores for cpu, counts for devices.
        labels: of the pod; terms of other pods select by them.
        node_selector: labels that the node must have.
        node_terms: required node affinity: one of them must match; none: every node does.
        tolerations: as in a Pod.
        near: required pod affinity terms.
        away: required pod anti-affinity terms.
        node: a node that it will be placed on if it has free capacity, or "".
        namespace: of the pod, or "" where it is not known.
    """

    name: str
    requests: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_terms: tuple[Manifest, ...] = ()
    tolerations: tuple[Manifest, ...] = ()
    near: tuple[Manifest, ...] = ()
    away: tuple[Manifest, ...] = ()
    node: str = ""
    namespace: str = ""


def pod_demand(
    name: str, labels: Mapping[str, str], spec: Manifest, requests: Mapping[str, float] | None = None
) -> PodDemand:
    """Returns what a pod asks for.

    A hint at a node (`preferred_node`) is read back, so that what was promised to a pod that is not
    placed yet stays promised on that node.

    Args:
        name: for people.
        labels: of the pod.
        spec: of the pod: a stored one, or those fields of ours that say where it may be.
        requests: what the scheduler counts for it; None reads that from the spec's containers.
    """
    affinity = spec.get("affinity") or {}
    nodes = affinity.get("nodeAffinity") or {}
    required = nodes.get(REQUIRED) or {}
    return PodDemand(
        name=name,
        requests={**(effective_requests(spec) if requests is None else requests), PODS: 1.0},
        labels=labels,
        node_selector=spec.get("nodeSelector") or {},
        node_terms=tuple(required.get("nodeSelectorTerms") or ()),
        tolerations=tuple(spec.get("tolerations") or ()),
        near=_terms(affinity, "podAffinity"),
        away=_terms(affinity, "podAntiAffinity"),
        node=_hint(nodes.get("preferredDuringSchedulingIgnoredDuringExecution") or ()),
    )


def preferred_node(node: str) -> dict[str, Any]:
    """Returns the preferred node affinity term that hints at one node."""
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    return {"weight": 100, "preference": {"matchFields": fields}}


def require_label(affinity: Manifest, expression: Manifest) -> dict[str, Any]:
    """Returns an affinity with one more requirement of the node's labels, in each of its alternatives."""
    nodes = dict(affinity.get("nodeAffinity") or {})
    terms = (nodes.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    added = [{**term, "matchExpressions": [*term.get("matchExpressions", ()), expression]} for term in terms]
    return {**affinity, "nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": added}}}


def _hint(preferred: Iterable[Manifest]) -> str:
    for term in preferred:
        for wanted in term["preference"].get("matchFields") or ():
            if wanted["key"] == "metadata.name" and wanted["operator"] == "In" and wanted.get("values"):
                return str(wanted["values"][0])
    return ""


def _terms(affinity: Manifest, kind: str) -> tuple[Manifest, ...]:
    return tuple((affinity.get(kind) or {}).get(REQUIRED) or ())


def tolerates(tolerations: Iterable[Manifest], taint: Taint) -> bool:
    """Returns whether one of these tolerations matches a taint."""
    return any(_matches_taint(toleration, taint) for toleration in tolerations)


def _matches_taint(toleration: Manifest, taint: Taint) -> bool:
    if (toleration.get("effect") or taint.effect) != taint.effect:
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if key != taint.key and (key or operator != "Exists"):
        return False
    return operator == "Exists" or (toleration.get("value") or "") == taint.value


def selects_node(demand: PodDemand, name: str, labels: Mapping[str, str]) -> bool:
    """Returns whether node selector and required node affinity of a pod take a node."""
    if any(labels.get(key) != value for key, value in demand.node_selector.items()):
        return False
    return not demand.node_terms or any(_term_matches(term, name, labels) for term in demand.node_terms)


def _term_matches(term: Manifest, name: str, labels: Mapping[str, str]) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # an empty term selects nothing (k8s.io/component-helpers/.../nodeaffinity.go)
    return all(_requirement_holds(item, labels) for item in expressions) and all(
        _requirement_holds(item, {"metadata.name": name}) for item in fields
    )


def selects_pod(selector: Manifest | None, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector takes a pod; none takes no pod."""
    if selector is None:
        return False
    exact = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        _requirement_holds(item, labels) for item in selector.get("matchExpressions") or ()
    )


def _requirement_holds(requirement: Manifest, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement["key"])
    values = requirement.get("values") or ()
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            return _compares(operator, value, values)
    return False


def _compares(operator: str, value: str | None, values: Iterable[str]) -> bool:
    try:
        have, want = int(value or ""), int(next(iter(values), ""))
    except ValueError:
        return False  # neither matches what is no number
    return have > want if operator == "Gt" else have < want


def effective_requests(spec: Manifest) -> dict[str, float]:
    """Returns what the scheduler counts for a pod.

    The larger of what its containers ask for together and of what any init container asks for
    together with the sidecars before it, plus the overhead; a request for the whole pod wins
    (`k8s.io/component-helpers/resource.PodRequests`). A limit without a request is a request, as
    the API server makes it.
    """
    running: dict[str, float] = {}
    largest_init: dict[str, float] = {}
    for container in spec.get("initContainers") or ():
        asked = _requests(container)
        if container.get("restartPolicy") == "Always":
            running = _sum(running, asked)
            asked = running
        else:
            asked = _sum(running, asked)
        largest_init = _maximum(largest_init, asked)
    for container in spec.get("containers") or ():
        running = _sum(running, _requests(container))
    total = {**_maximum(running, largest_init), **_requests(spec)}
    overhead = {name: float(parse_quantity(value)) for name, value in (spec.get("overhead") or {}).items()}
    return _sum(total, overhead)


def _requests(holder: Manifest) -> dict[str, float]:
    return requests_of(holder.get("resources") or {})


def requests_of(resources: Manifest) -> dict[str, float]:
    """Returns what the resources of one container, or of a whole pod, ask for: a limit is a request too."""
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: float(parse_quantity(value)) for name, value in asked.items()}


def _sum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def _maximum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: max(left.get(name, 0.0), right.get(name, 0.0)) for name in {**left, **right}}


def total(requests: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns requests added up, by resource name."""
    added: dict[str, float] = {}
    for asked in requests:
        for name, amount in asked.items():
            added[name] = added.get(name, 0.0) + amount
    return added
