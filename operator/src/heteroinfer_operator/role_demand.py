"""What the pods of a role ask of nodes: their resources, and the fields that say where they may be. Pure."""

from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate, RoleSpec
from heteroinfer_operator.demand import PodDemand, pod_demand, requests_of

_NOT_OF_SPEC = {"labels", "annotations"}


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
    labels = {
        **((role.template.labels if role.template else None) or {}),
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_ROLE: role.name,
        names.LABEL_DEVICE: device.value,
    }
    return pod_demand(
        f"role {role.name}",
        labels,
        role_fields(spec, role, device),
        requests_of(role_resources(role, device)),
    )
