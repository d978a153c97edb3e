"""What the pods of a role ask of nodes: their resources, and the fields that say where they may be. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import FeedForwardSpec, HeteroInferenceSpec, PodTemplate, ResourceKey, RoleSpec
from heteroinfer_operator.nodes.demand import PodDemand, pod_demand, requests_of, require_label
from heteroinfer_operator.nodes.node_platform import platform_selector
from heteroinfer_operator.quantity import format_quantity, parse_quantity

_NOT_OF_SPEC = {"labels", "annotations", "securityContext", "volumeMounts"}
_OF_WORKERS = ("topologySpreadConstraints", "resourceClaims", "volumes")
"""What pods that fetch or read a model have no use for."""


def template_fields(template: PodTemplate | None) -> dict[str, Any]:
    """Returns what a template sets in a pod's spec, and which nodes run its images."""
    asked = template.dump() if template else {}
    left_out = {*_NOT_OF_SPEC, *_OF_WORKERS}
    fields = {key: value for key, value in asked.items() if key not in left_out and value}
    selector = {**platform_selector(template), **fields.get("nodeSelector", {})}
    return {**fields, "nodeSelector": selector} if selector else fields


def unshared(gpu_resource: str) -> dict[str, Any]:
    """Returns what a node's labels must say so that nobody else is on its GPUs."""
    label = f"{gpu_resource}.sharing-strategy"
    return {"key": label, "operator": "NotIn", "values": ["time-slicing", "mps"]}


def role_fields(spec: HeteroInferenceSpec, role: RoleSpec, device: Device) -> dict[str, Any]:
    """Returns the fields of a pod's spec that say where pods of a role may be.

    Pods with GPUs tolerate the taint by which GPU nodes are kept for them, `<resource>:NoSchedule`
    with any value, as the admission plugin ExtendedResourceToleration has it. In mode FeedForward a kernel
    that waits for a CPU holds its GPU, so that GPUs which others share are left out, by the label of
    GPU feature discovery.
    """
    fields = template_fields(role.template)
    if spec.scheduling.priority_class_name:
        fields["priorityClassName"] = spec.scheduling.priority_class_name
    if device is Device.GPU:
        wanted = {"key": role.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        given = list(fields.get("tolerations", ()))
        fields["tolerations"] = given if wanted in given else [*given, wanted]
        if role.feed_forward is not None:
            fields["affinity"] = require_label(fields.get("affinity", {}), unshared(role.gpu_resource))
    return fields


def role_resources(role: RoleSpec, device: Device) -> dict[str, Any]:
    """Returns requests and limits of a role's worker container.

    The role's own, what its feed-forward ranks take on top, and a GPU a rank. Limits are raised where the
    role has them: one that it leaves out stays out.
    """
    asked = role.resources.dump() if role.resources else {}
    if role.feed_forward is not None:
        asked = _with_feed_forward(asked, role.feed_forward)
    if device is Device.GPU:
        gpus = {role.gpu_resource: str(role.ranks_per_pod)}
        asked["limits"] = {**asked.get("limits", {}), **gpus}
        asked["requests"] = {**asked.get("requests", {}), **gpus}
    return asked


def _with_feed_forward(asked: Mapping[str, Any], own: FeedForwardSpec) -> dict[str, Any]:
    limits, requests = dict(asked.get("limits") or {}), dict(asked.get("requests") or {})
    for resource, each in (("cpu", own.cpu), ("memory", own.memory)):
        added = parse_quantity(each) * own.ranks
        # A limit alone is a request too, as the API server makes it.
        base = requests.get(resource, limits.get(resource, "0"))
        requests[resource] = format_quantity(parse_quantity(base) + added)
        if resource in limits:
            limits[resource] = format_quantity(parse_quantity(limits[resource]) + added)
    return {**asked, "requests": requests, **({"limits": limits} if limits else {})}


def role_demand(
    spec: HeteroInferenceSpec, role: RoleSpec, device: Device, resource: ResourceKey | None = None
) -> PodDemand:
    """Returns what one pod of a role asks of its node.

    Args:
        resource: name of the resource, by which affinity terms may select its pods; None if it has none.
    """
    labels = {
        **((role.template.labels if role.template else None) or {}),
        **({names.LABEL_RESOURCE: resource.name} if resource is not None else {}),
        names.LABEL_MANAGED_BY: names.MANAGER,
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_ROLE: role.name,
        names.LABEL_DEVICE: device.value,
    }
    asked = pod_demand(
        f"role {role.name}",
        labels,
        role_fields(spec, role, device),
        requests_of(role_resources(role, device)),
    )
    return asked if resource is None else replace(asked, namespace=resource.namespace)
