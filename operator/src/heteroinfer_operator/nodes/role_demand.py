"""Demands of a role's pods: their resources and the fields that restrict their nodes. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api import FeedForwardSpec, HeteroInferenceSpec, PodTemplate, ResourceKey, RoleSpec
from heteroinfer_operator.nodes.demand import PodDemand, pod_demand, requests_of, require_label
from heteroinfer_operator.nodes.node_platform import platform_selector
from heteroinfer_operator.quantity import format_quantity, parse_quantity

_OUTSIDE_SPEC = {"labels", "annotations", "securityContext", "volumeMounts"}
_WORKER_FIELDS = ("topologySpreadConstraints", "resourceClaims", "volumes")
"""Fields for worker pods only. Pods that fetch or read a model do not need them."""


def template_fields(template: PodTemplate | None) -> dict[str, Any]:
    """Returns the pod spec fields that a template sets, with a node selector for the images' platform."""
    asked = template.dump() if template else {}
    left_out = {*_OUTSIDE_SPEC, *_WORKER_FIELDS}
    fields = {key: value for key, value in asked.items() if key not in left_out and value}
    selector = {**platform_selector(template), **fields.get("nodeSelector", {})}
    return {**fields, "nodeSelector": selector} if selector else fields


def unshared(gpu_resource: str) -> dict[str, Any]:
    """Builds the node label requirement that excludes nodes whose GPUs are shared."""
    label = f"{gpu_resource}.sharing-strategy"
    return {"key": label, "operator": "NotIn", "values": ["time-slicing", "mps"]}


def role_fields(spec: HeteroInferenceSpec, role: RoleSpec, device: Device) -> dict[str, Any]:
    """Builds the pod spec fields that decide on which nodes a role's pods may run.

    Pods with GPUs tolerate the taint that reserves GPU nodes, `<resource>:NoSchedule` with any value, like
    the admission plugin ExtendedResourceToleration. In mode FeedForward a kernel that waits for a CPU blocks
    its GPU, so the fields exclude shared GPUs by the label of GPU feature discovery.
    """
    fields = template_fields(role.template)
    if spec.scheduling.priority_class_name:
        fields["priorityClassName"] = spec.scheduling.priority_class_name
    if device is Device.GPU:
        wanted = {"key": role.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        given = list(fields.get("tolerations", ()))
        fields["tolerations"] = given if wanted in given else [*given, wanted]
        if role.feed_forward is not None or spec.parallelism.mode is Mode.FEED_FORWARD:
            fields["affinity"] = require_label(fields.get("affinity", {}), unshared(role.gpu_resource))
    return fields


def role_resources(role: RoleSpec, device: Device) -> dict[str, Any]:
    """Builds the requests and limits of a role's worker container.

    They are the role's resources plus those of its feed-forward ranks plus one GPU per rank. A limit is
    raised only if the role sets it.
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
        # The API server copies a limit without a request into the request.
        base = requests.get(resource, limits.get(resource, "0"))
        requests[resource] = format_quantity(parse_quantity(base) + added)
        if resource in limits:
            limits[resource] = format_quantity(parse_quantity(limits[resource]) + added)
    return {**asked, "requests": requests, **({"limits": limits} if limits else {})}


def role_demand(
    spec: HeteroInferenceSpec, role: RoleSpec, device: Device, resource: ResourceKey | None = None
) -> PodDemand:
    """Builds the demand of one pod of a role.

    Args:
        resource: the pod's HeteroInference, by which affinity terms may select pods; None if there is none
        yet.
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
