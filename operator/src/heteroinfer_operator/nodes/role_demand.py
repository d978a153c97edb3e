"""Demands of a role's pods: their resources and the fields that restrict their nodes. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api import FeedForwardSpec, HeteroInferenceSpec, PodTemplate, ResourceKey, RoleSpec
from heteroinfer_operator.nodes.demand import PodDemand, pod_demand, requests_of, require_label
from heteroinfer_operator.nodes.image_volumes import mounts_images
from heteroinfer_operator.nodes.node_platform import select_platform
from heteroinfer_operator.quantity import format_quantity, parse_quantity

_OUTSIDE_SPEC = {"labels", "annotations", "securityContext", "volumeMounts"}
"""Fields of a template that belong to the metadata or the containers of a pod."""
_WORKER_FIELDS = ("topologySpreadConstraints", "resourceClaims", "volumes")
"""Fields that only worker pods get, not pods that fetch or read a model."""


def template_fields(template: PodTemplate | None) -> dict[str, Any]:
    """Returns the fields of a pod spec that a template sets, and a selection of the images' platform."""
    dumped = template.dump() if template else {}
    excluded = {*_OUTSIDE_SPEC, *_WORKER_FIELDS}
    fields = {key: value for key, value in dumped.items() if key not in excluded and value}
    return select_platform(fields)


def unshared_gpu_requirement(gpu_resource: str) -> dict[str, Any]:
    """Builds the node affinity expression that excludes nodes with shared GPUs."""
    label = f"{gpu_resource}.sharing-strategy"
    return {"key": label, "operator": "NotIn", "values": ["time-slicing", "mps"]}


def role_fields(spec: HeteroInferenceSpec, role: RoleSpec, device: Device) -> dict[str, Any]:
    """Builds the pod spec fields that decide on which nodes a role's pods may run.

    Pods with GPUs tolerate the taint that reserves GPU nodes: `<resource>:NoSchedule` with any value. The
    admission plugin ExtendedResourceToleration does the same. In mode FeedForward, a kernel that waits for a
    CPU blocks its GPU. So the fields exclude nodes with shared GPUs, which GPU feature discovery labels.
    """
    fields = template_fields(role.template)
    if spec.scheduling.priority_class_name:
        fields["priorityClassName"] = spec.scheduling.priority_class_name
    if device is Device.GPU:
        toleration = {"key": role.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        tolerations = list(fields.get("tolerations", ()))
        fields["tolerations"] = tolerations if toleration in tolerations else [*tolerations, toleration]
        if role.feed_forward is not None or spec.parallelism.mode is Mode.FEED_FORWARD:
            fields["affinity"] = require_label(
                fields.get("affinity", {}), unshared_gpu_requirement(role.gpu_resource)
            )
    return fields


def role_resources(role: RoleSpec, device: Device) -> dict[str, Any]:
    """Builds the requests and limits of a role's worker container.

    These are the role's own resources, plus the resources of its feed-forward ranks, plus one GPU for each
    rank. Feed-forward ranks raise a limit only if the role sets this limit.
    """
    resources = role.resources.dump() if role.resources else {}
    if role.feed_forward is not None:
        resources = _with_feed_forward(resources, role.feed_forward)
    if device is Device.GPU:
        gpus = {role.gpu_resource: str(role.ranks_per_pod)}
        resources["limits"] = {**resources.get("limits", {}), **gpus}
        resources["requests"] = {**resources.get("requests", {}), **gpus}
    return resources


def _with_feed_forward(resources: Mapping[str, Any], feed_forward: FeedForwardSpec) -> dict[str, Any]:
    """Returns resources with the CPUs and the memory of feed-forward ranks added."""
    limits, requests = dict(resources.get("limits") or {}), dict(resources.get("requests") or {})
    for resource, amount_per_rank in (("cpu", feed_forward.cpu), ("memory", feed_forward.memory)):
        added = parse_quantity(amount_per_rank) * feed_forward.ranks
        # The API server copies a limit without a request into the request.
        base = requests.get(resource, limits.get(resource, "0"))
        requests[resource] = format_quantity(parse_quantity(base) + added)
        if resource in limits:  # a role without a limit stays without one
            limits[resource] = format_quantity(parse_quantity(limits[resource]) + added)
    return {**resources, "requests": requests, **({"limits": limits} if limits else {})}


def role_demand(
    spec: HeteroInferenceSpec, role: RoleSpec, device: Device, resource: ResourceKey | None = None
) -> PodDemand:
    """Builds the demand of one pod of a role.

    Args:
        resource: the pod's HeteroInference, by which affinity terms may select pods; None if there is none.
    """
    labels = {
        **((role.template.labels if role.template else None) or {}),
        **({names.LABEL_RESOURCE: resource.name} if resource is not None else {}),
        names.LABEL_MANAGED_BY: names.MANAGER,
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_ROLE: role.name,
        names.LABEL_DEVICE: device.value,
    }
    demand = pod_demand(
        f"role {role.name}",
        labels,
        role_fields(spec, role, device),
        requests_of(role_resources(role, device)),
    )
    demand = replace(demand, mounts_images=mounts_images(spec, role.template))
    return demand if resource is None else replace(demand, namespace=resource.namespace)
