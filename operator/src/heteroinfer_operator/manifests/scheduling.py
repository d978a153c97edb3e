"""Fields of pods that decide on which nodes they run. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import PodAssignment
from heteroinfer_operator.api import HeteroInferenceSpec, RoleSpec
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import EpochRef
from heteroinfer_operator.nodes.demand import (
    REQUIRED,
    avoided_nodes,
    larger_label,
    preferred_node,
    require_label,
)
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.nodes.other_groups import apart_terms
from heteroinfer_operator.nodes.placement import device_memory_label
from heteroinfer_operator.nodes.role_demand import role_fields

_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_MAX_AVOIDED_NODES = 100
"""At most this many nodes of other groups are in a pod's affinity. Each takes up to 300 bytes."""


def assigned_fields(
    spec: HeteroInferenceSpec,
    group: EpochRef,
    role: RoleSpec,
    pod: PodAssignment,
    node_assignment: NodeAssignment,
) -> dict[str, Any]:
    """Returns `role_fields`, completed by the operator's decisions about the node of this pod.

    With scheduling.topologyKey, each pod has an affinity to the other pods of its epoch, so that all run in
    one domain. If the operator chose the domain, the pod also has a node selector for this domain. Otherwise
    the first pod could start in a domain without enough free capacity for the others.

    A pod with a planned node has no anti-affinity to other groups, because the plan has counted these groups.
    With an anti-affinity, the pod would have two preferences that kube-scheduler weighs equally, and the pods
    of one group could be placed on several nodes.
    """
    fields = role_fields(spec, role, pod.device)
    affinity = {kind: dict(terms) for kind, terms in fields.get("affinity", {}).items()}
    if spec.scheduling.topology_key:
        labels = {**identity.group_labels(group), names.LABEL_EPOCH: str(group.epoch)}
        term = {"topologyKey": spec.scheduling.topology_key, "labelSelector": {"matchLabels": labels}}
        _append_terms(affinity, "podAffinity", REQUIRED, [term])
    if node_assignment.domain is not None:
        key, value = node_assignment.domain
        fields["nodeSelector"] = {**fields.get("nodeSelector", {}), key: value}
    planned_node = node_assignment.nodes.get(pod.index)
    if node_assignment.apart and planned_node is None:
        terms = apart_terms(group.owner.key.name, group.index)
        _append_terms(affinity, "podAntiAffinity", _PREFERRED, terms)
    if pod.index in node_assignment.gpu_memory_mib:
        label = device_memory_label(role.gpu_resource)
        # The requirement compares by Gt (greater than), which excludes the number itself.
        more_than_mib = node_assignment.gpu_memory_mib[pod.index] - 1
        affinity = require_label(affinity, larger_label(label, more_than_mib))
    if planned_node is not None:
        avoided = sorted(node_assignment.nodes_of_others)[:_MAX_AVOIDED_NODES]
        terms = [preferred_node(planned_node), *([avoided_nodes(avoided)] if avoided else ())]
        _append_terms(affinity, "nodeAffinity", _PREFERRED, terms)
    return {**fields, "affinity": affinity} if affinity else fields


def _append_terms(
    affinity: dict[str, dict[str, Any]], kind: str, strength: str, terms: Sequence[Mapping[str, Any]]
) -> None:
    """Appends terms to an affinity.

    Args:
        kind: kind of affinity, such as `podAffinity`.
        strength: REQUIRED or _PREFERRED.
    """
    terms_by_strength = affinity.setdefault(kind, {})
    terms_by_strength[strength] = [*terms_by_strength.get(strength, ()), *terms]
