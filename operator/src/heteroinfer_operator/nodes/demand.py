"""Demands of pods, read from manifests by the scheduler's rules. Pure.

Must not import kopf, a client, os, time, random or logging.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from heteroinfer_operator.stored_fields import (
    as_amounts,
    as_integer,
    as_name,
    as_object,
    as_objects,
    as_text,
    as_text_map,
    as_texts,
)

Manifest: TypeAlias = Mapping[str, Any]
"""A Kubernetes object or a part of an object, as JSON."""

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
"""Field of an affinity: terms that must hold when a pod is placed."""
PODS: Final = "pods"
"""Name of the resource that counts pods. Every pod requests 1."""

MAX_AFFINITY_BYTES: Final = 2**16
"""Largest size of an affinity that names nodes, as JSON. The API server stores objects of up to 1.5 MiB."""
_NODE_NAME: Final = "metadata.name"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
_WEIGHT_OF_OTHER_NODES: Final = 25
"""Weight of `avoided_nodes`, which must be less than the weight of `preferred_node` (100)."""
_HARD: Final = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def __str__(self) -> str:
        """Formats the taint like kubectl: `gpu=x:NoSchedule`."""
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"

    @property
    def keeps_away(self) -> bool:
        """Whether the node accepts only pods that tolerate the taint."""
        return self.effect in _HARD


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDemand:
    """Requirements of a pod on its node.

    Attributes:
        name: name for messages.
        requests: by resource name. Bytes for memory, cores for cpu, counts for devices.
        labels: the pod's labels, by which terms of other pods select it.
        node_selector: labels that the node must have.
        node_terms: required node affinity. One term must match; without terms every node matches.
        near: required terms of the pod affinity.
        away: required terms of the pod anti-affinity.
        preferred_node: name of the node that the preferred affinity names, or "".
        namespace: "" if unknown.
        priority: None if unknown.
        mounts_images: whether the pod mounts image volumes.
    """

    name: str
    requests: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_terms: tuple[Manifest, ...] = ()
    tolerations: tuple[Manifest, ...] = ()
    near: tuple[Manifest, ...] = ()
    away: tuple[Manifest, ...] = ()
    preferred_node: str = ""
    namespace: str = ""
    priority: int | None = None
    mounts_images: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the requested devices, such as `nvidia.com/gpu`."""
        return tuple(name for name in self.requests if "/" in name)


def pod_demand(
    name: str, labels: Mapping[str, str], spec: Manifest, requests: Mapping[str, float] | None = None
) -> PodDemand:
    """Returns the demand of a pod.

    The demand contains the preferred node, so that a pod without a node has its reservation on that node.

    Args:
        spec: spec of a stored pod, or the fields of `role_fields`.
        requests: requests that the scheduler counts; None to compute them from the spec's containers.

    Raises:
        UnreadableError: a field has another type than in a Pod.
    """
    affinity = as_object(spec.get("affinity"), "affinity")
    nodes = as_object(affinity.get("nodeAffinity"), "nodeAffinity")
    required = as_object(nodes.get(REQUIRED), REQUIRED)
    return PodDemand(
        name=name,
        requests={**(effective_requests(spec) if requests is None else requests), PODS: 1.0},
        labels=labels,
        node_selector=as_text_map(spec.get("nodeSelector"), "nodeSelector"),
        node_terms=tuple(_read_node_terms(required)),
        tolerations=tuple(_read_tolerations(spec)),
        near=_read_affinity_terms(affinity, "podAffinity"),
        away=_read_affinity_terms(affinity, "podAntiAffinity"),
        preferred_node=_read_preferred_node(as_objects(nodes.get(_PREFERRED), _PREFERRED)),
        priority=as_integer(spec["priority"], "priority") if "priority" in spec else None,
    )


def _read_node_terms(required: Manifest) -> Iterable[Manifest]:
    """Yields the terms of a required node affinity; raises UnreadableError for a wrong type."""
    for term in as_objects(required.get("nodeSelectorTerms"), "nodeSelectorTerms"):
        _check_requirements(term, "matchExpressions")
        _check_requirements(term, "matchFields")
        yield term


def _check_requirements(holder: Manifest, field: str) -> None:
    """Raises UnreadableError if a requirement of a selector has a field of the wrong type."""
    for requirement in as_objects(holder.get(field), field):
        as_name(requirement.get("key"), f"{field}.key")
        as_name(requirement.get("operator"), f"{field}.operator")
        as_texts(requirement.get("values"), f"{field}.values")


def _read_tolerations(spec: Manifest) -> Iterable[Manifest]:
    """Yields a pod's tolerations; raises UnreadableError for a wrong type."""
    for toleration in as_objects(spec.get("tolerations"), "tolerations"):
        for part in ("key", "operator", "value", "effect"):
            as_text(toleration.get(part), f"tolerations.{part}")
        yield toleration


def preferred_node(node: str) -> dict[str, Any]:
    """Builds a node affinity term that prefers one node."""
    fields = [{"key": _NODE_NAME, "operator": "In", "values": [node]}]
    return {"weight": 100, "preference": {"matchFields": fields}}


def avoided_nodes(nodes: Iterable[str]) -> dict[str, Any]:
    """Builds a node affinity term that slightly prefers all nodes except these."""
    fields = [{"key": _NODE_NAME, "operator": "NotIn", "values": [node]} for node in nodes]
    return {"weight": _WEIGHT_OF_OTHER_NODES, "preference": {"matchFields": fields}}


def require_label(affinity: Manifest, expression: Manifest) -> dict[str, Any]:
    """Returns an affinity whose required node affinity has a further requirement on node labels."""
    return _add_to_affinity(affinity, "matchExpressions", [expression])


def exclude_nodes(affinity: Manifest, excluded: Iterable[str], able: Sequence[str]) -> dict[str, Any]:
    """Returns an affinity that also requires that a pod does not use the excluded nodes.

    The API server accepts only one name in each requirement, so thousands of excluded nodes would make the
    pod too large for the API server. If the affinity would exceed MAX_AFFINITY_BYTES, the result instead
    requires one of the first nodes in `able`: as many nodes as fit into this size. Then the pod cannot use
    nodes that join the cluster later.

    Args:
        excluded: names of the nodes that the pod must not use.
        able: names of the nodes that the pod may use, the best first; not empty.
    """
    fields = [{"key": _NODE_NAME, "operator": "NotIn", "values": [name]} for name in excluded]
    excluding = _add_to_affinity(affinity, "matchFields", fields)
    if len(json.dumps(excluding)) <= MAX_AFFINITY_BYTES:
        return excluding
    given_terms = required_node_terms(affinity)
    terms: list[dict[str, Any]] = []
    num_bytes = 0
    for name in able:  # each node gets its own copy of the given terms
        field = {"key": _NODE_NAME, "operator": "In", "values": [name]}
        new_terms = _add_to_terms(given_terms, "matchFields", [field])
        num_bytes += len(json.dumps(new_terms))
        if terms and num_bytes > MAX_AFFINITY_BYTES:
            break
        terms += new_terms
    return replace_node_terms(affinity, terms)


def with_required_label(demand: PodDemand, expression: Manifest) -> PodDemand:
    """Returns a demand with an added requirement on node labels."""
    terms = _add_to_terms(demand.node_terms, "matchExpressions", [expression])
    return replace(demand, node_terms=tuple(terms))


def larger_label(key: str, than: int) -> dict[str, Any]:
    """Builds the requirement that the number in a node label is larger than a number."""
    return {"key": key, "operator": "Gt", "values": [str(than)]}


def _add_to_affinity(affinity: Manifest, part: str, requirements: Sequence[Manifest]) -> dict[str, Any]:
    """Returns an affinity with requirements added to each term of its required node affinity."""
    return replace_node_terms(affinity, _add_to_terms(required_node_terms(affinity), part, requirements))


def required_node_terms(affinity: Manifest) -> Sequence[Manifest]:
    """Returns the terms of an affinity's required node affinity. A node must match one term."""
    required = (affinity.get("nodeAffinity") or {}).get(REQUIRED) or {}
    return required.get("nodeSelectorTerms") or ()


def replace_node_terms(affinity: Manifest, terms: Sequence[Manifest]) -> dict[str, Any]:
    """Returns an affinity with these terms in its required node affinity, in place of its own terms."""
    nodes = affinity.get("nodeAffinity") or {}
    return {**affinity, "nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": terms}}}


def _add_to_terms(
    terms: Iterable[Manifest], part: str, requirements: Sequence[Manifest]
) -> list[dict[str, Any]]:
    """Returns the terms of a node affinity with requirements added to each. A node must match one term.

    Without terms, the result is one term with the requirements. An empty term stays empty: it selects no
    node, and with a requirement it would select nodes.

    Args:
        part: field of a term for the requirements, `matchExpressions` or `matchFields`.
    """
    longer_terms = [
        dict(term) if is_empty_term(term) else {**term, part: [*(term.get(part) or ()), *requirements]}
        for term in terms
    ]
    return longer_terms or [{part: list(requirements)}]


def _read_preferred_node(preferred: Iterable[Manifest]) -> str:
    """Returns the node that `preferred_node` named in a pod's affinity, or ""."""
    for term in preferred:
        preference = as_object(term.get("preference"), "preference")
        for wanted in as_objects(preference.get("matchFields"), "matchFields"):
            values = as_texts(wanted.get("values"), "matchFields.values")
            if wanted.get("key") == _NODE_NAME and wanted.get("operator") == "In" and values:
                return values[0]
    return ""


def _read_affinity_terms(affinity: Manifest, kind: str) -> tuple[Manifest, ...]:
    """Returns the required terms of a pod affinity or anti-affinity; raises UnreadableError."""
    terms = as_objects(as_object(affinity.get(kind), kind).get(REQUIRED), kind)
    for term in terms:
        as_name(term.get("topologyKey"), f"{kind}.topologyKey")
        for part in ("labelSelector", "namespaceSelector"):
            selector = as_object(term.get(part), f"{kind}.{part}")
            as_text_map(selector.get("matchLabels"), f"{kind}.{part}.matchLabels")
            _check_requirements(selector, "matchExpressions")
        as_texts(term.get("namespaces"), f"{kind}.namespaces")
    return tuple(terms)


def tolerates(tolerations: Iterable[Manifest], taint: Taint) -> bool:
    """Reports whether a toleration matches the taint."""
    return any(_matches_taint(toleration, taint) for toleration in tolerations)


def _matches_taint(toleration: Manifest, taint: Taint) -> bool:
    """Reports whether this toleration matches the taint."""
    if (toleration.get("effect") or taint.effect) != taint.effect:  # no effect: tolerates every effect
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    tolerates_every_key = not key and operator == "Exists"
    if key != taint.key and not tolerates_every_key:
        return False
    return operator == "Exists" or (toleration.get("value") or "") == taint.value


def selects_node(demand: PodDemand, name: str, labels: Mapping[str, str]) -> bool:
    """Reports whether a pod's node selector and required node affinity match a node."""
    if any(labels.get(key) != value for key, value in demand.node_selector.items()):
        return False
    return not demand.node_terms or any(_term_matches(term, name, labels) for term in demand.node_terms)


def _term_matches(term: Manifest, name: str, labels: Mapping[str, str]) -> bool:
    """Reports whether a node satisfies all requirements of a node affinity term."""
    if is_empty_term(term):
        return False
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    return all(is_requirement_met(item, labels) for item in expressions) and all(
        is_requirement_met(item, {_NODE_NAME: name}) for item in fields
    )


def is_empty_term(term: Manifest) -> bool:
    """Reports whether a node affinity term has no requirements. Such a term selects no node.

    Source: k8s.io/component-helpers/scheduling/corev1/nodeaffinity/nodeaffinity.go.
    """
    return not term.get("matchExpressions") and not term.get("matchFields")


def selects_pod(selector: Manifest | None, labels: Mapping[str, str]) -> bool:
    """Reports whether a label selector matches a pod's labels. A missing selector matches no pod."""
    if selector is None:
        return False
    exact = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        is_requirement_met(item, labels) for item in selector.get("matchExpressions") or ()
    )


def is_requirement_met(requirement: Manifest, labels: Mapping[str, str]) -> bool:
    """Reports whether labels satisfy one requirement of a selector."""
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
            return _compare_numbers(operator, value, values)
    return False


def _compare_numbers(operator: str, value: str | None, values: Iterable[str]) -> bool:
    """Reports whether a label's number is greater (Gt) or less (Lt) than the number in `values`."""
    try:
        number, bound = int(value or ""), int(next(iter(values), ""))
    except ValueError:
        return False  # Gt and Lt match numbers only
    return number > bound if operator == "Gt" else number < bound


def effective_requests(spec: Manifest) -> dict[str, float]:
    """Returns the requests that the scheduler counts for a pod.

    For each resource, the scheduler takes the larger of two sums: the requests of all containers and
    sidecars, and the requests of an init container with the sidecars before it. A request for the whole pod
    replaces this amount. The scheduler then adds the pod's overhead
    (`k8s.io/component-helpers/resource.PodRequests`).
    A limit without a request counts as a request, because the API server copies the limit into the request.

    Raises:
        UnreadableError: a field has another type than in a Pod.
    """
    running: dict[str, float] = {}
    largest_init: dict[str, float] = {}
    for container in as_objects(spec.get("initContainers"), "initContainers"):
        amounts = _requests_of_holder(container)
        while_it_starts = sum_requests((running, amounts))
        if container.get("restartPolicy") == "Always":  # a sidecar, which runs until the pod ends
            running = while_it_starts
        largest_init = _larger_amounts(largest_init, while_it_starts)
    for container in as_objects(spec.get("containers"), "containers"):
        running = sum_requests((running, _requests_of_holder(container)))
    # The spec itself has only requests for the whole pod.
    without_overhead = {**_larger_amounts(running, largest_init), **_requests_of_holder(spec)}
    return sum_requests((without_overhead, as_amounts(spec.get("overhead"), "overhead")))


def _requests_of_holder(holder: Manifest) -> dict[str, float]:
    """Returns the requests of a container, or of a whole pod."""
    return requests_of(as_object(holder.get("resources"), "resources"))


def requests_of(resources: Manifest) -> dict[str, float]:
    """Returns the requests of a container's or pod's resources. Without a request, the limit counts."""
    return {
        **as_amounts(resources.get("limits"), "limits"),
        **as_amounts(resources.get("requests"), "requests"),
    }


def _larger_amounts(amounts: Mapping[str, float], other_amounts: Mapping[str, float]) -> dict[str, float]:
    """Returns the larger of two amounts for each resource."""
    return {
        name: max(amounts.get(name, 0.0), other_amounts.get(name, 0.0))
        for name in {**amounts, **other_amounts}
    }


def sum_requests(requests: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sum of requests for each resource."""
    totals: dict[str, float] = {}
    for amounts in requests:
        for name, amount in amounts.items():
            totals[name] = totals.get(name, 0.0) + amount
    return totals
