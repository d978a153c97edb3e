"""Where the pods of a group may be placed, what they ask for, and who places them together. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, PodAssignment
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate, RoleSpec
from heteroinfer_operator.cluster import Gang
from heteroinfer_operator.demand import PodDemand, pod_demand, preferred_node
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import EpochRef

_NOT_OF_SPEC = {"labels", "annotations"}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """What was decided about the places of a group's pods.

    Attributes:
        gang: who places them together, or None.
        nodes: a node that has room for it, by pod index: a hint, since the scheduler decides.
        domain: key and value of a node label that all of them must have, or None.
        gpu_memory_mib: memory that the GPUs of a pod must have at least by their node's label, by
            pod index.
    """

    gang: Gang | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    domain: tuple[str, str] | None = None
    gpu_memory_mib: Mapping[int, int] = field(default_factory=dict)


def template_fields(template: PodTemplate | None) -> dict[str, Any]:
    """Returns what a template sets in a pod's spec."""
    asked = template.dump() if template else {}
    return {key: value for key, value in asked.items() if key not in _NOT_OF_SPEC and value}


def role_fields(spec: HeteroInferenceSpec, role: RoleSpec, device: Device) -> dict[str, Any]:
    """Returns the fields of a pod's spec that say where pods of a role may be.

    Pods with GPUs tolerate the taint by which GPU nodes are kept for them, `<resource>:NoSchedule`
    with any value, as the admission plugin ExtendedResourceToleration has it.
    """
    fields = template_fields(role.template)
    if spec.scheduling.priority_class_name:
        fields["priorityClassName"] = spec.scheduling.priority_class_name
    if device is Device.GPU:
        wanted = {"key": role.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        given = list(fields.get("tolerations", ()))
        fields["tolerations"] = given if wanted in given else [*given, wanted]
    return fields


def assigned_fields(
    spec: HeteroInferenceSpec,
    group: EpochRef,
    role: RoleSpec,
    pod: PodAssignment,
    node_assignment: NodeAssignment,
) -> dict[str, Any]:
    """Returns role_fields with what was decided about this pod's place.

    A group that keeps to one value of a label has an affinity of each pod to the others of its
    epoch; where the value was chosen, that too, since the first pod could choose one without room.
    """
    fields = role_fields(spec, role, pod.device)
    affinity = {kind: dict(terms) for kind, terms in fields.get("affinity", {}).items()}
    if spec.scheduling.topology_key:
        labels = {**identity.group_labels(group), names.LABEL_EPOCH: str(group.epoch)}
        term = {"topologyKey": spec.scheduling.topology_key, "labelSelector": {"matchLabels": labels}}
        near = affinity.setdefault("podAffinity", {})
        near[_REQUIRED] = [*near.get(_REQUIRED, ()), term]
    if node_assignment.domain is not None:
        key, value = node_assignment.domain
        fields["nodeSelector"] = {**fields.get("nodeSelector", {}), key: value}
    if pod.index in node_assignment.gpu_memory_mib:
        more_than = str(node_assignment.gpu_memory_mib[pod.index] - 1)
        label = {"key": f"{role.gpu_resource}.memory", "operator": "Gt", "values": [more_than]}
        _require(affinity.setdefault("nodeAffinity", {}), label)
    if pod.index in node_assignment.nodes:
        nodes = affinity.setdefault("nodeAffinity", {})
        nodes[_PREFERRED] = [*nodes.get(_PREFERRED, ()), preferred_node(node_assignment.nodes[pod.index])]
    return {**fields, "affinity": affinity} if affinity else fields


def _require(nodes: dict[str, Any], expression: Mapping[str, Any]) -> None:
    """Adds a requirement to each of the alternatives of a required node affinity."""
    terms = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{}]
    added = [{**term, "matchExpressions": [*term.get("matchExpressions", ()), expression]} for term in terms]
    nodes[_REQUIRED] = {"nodeSelectorTerms": added}


def role_resources(role: RoleSpec, device: Device) -> dict[str, Any]:
    """Returns requests and limits of a role's worker container: the role's own, and a GPU a rank."""
    asked = role.resources.dump() if role.resources else {}
    if device is Device.GPU:
        gpus = {role.gpu_resource: str(role.ranks_per_pod)}
        asked["limits"] = {**asked.get("limits", {}), **gpus}
        asked["requests"] = {**asked.get("requests", {}), **gpus}
    return asked


def role_demand(spec: HeteroInferenceSpec, role: RoleSpec, device: Device) -> PodDemand:
    """Returns what one pod of a role asks of its node."""
    container = {"resources": role_resources(role, device)}
    labels = {
        **((role.template.labels if role.template else None) or {}),
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_ROLE: role.name,
        names.LABEL_DEVICE: device.value,
    }
    return pod_demand(
        f"role {role.name}", labels, {**role_fields(spec, role, device), "containers": [container]}
    )
