"""Values in the status that the operator chose because the spec leaves them open. Pure."""

from collections.abc import Iterable, Mapping

from heteroinfer_operator.api import Device, GroupStatus, HeteroInferenceSpec, PlanRole, PlanStatus, RoleSpec
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.cluster import ResourceObservation
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import device_memory_mib


def add_effective_values(
    plans: Iterable[PlanStatus],
    groups: Iterable[GroupStatus],
    spec: HeteroInferenceSpec | None,
    observation: ResourceObservation,
    *,
    revision: str | None,
) -> tuple[PlanStatus, ...]:
    """Returns the plans with the images of their pods and the memory of their GPUs.

    Args:
        revision: name of the spec's revision. Plans of other revisions keep their values.
    """
    by_plan: dict[str, list[GroupStatus]] = {}
    for group in groups:
        by_plan.setdefault(group.plan_hash or "", []).append(group)
    nodes = {node.name: node for node in observation.nodes or ()}
    images = {pod.name: pod.images for pod in observation.pods if pod.images}
    new_plans = []
    for plan in plans:
        groups_of_plan = by_plan.get(plan.hash, [])
        pods = (entry.pod for group in groups_of_plan for entry in group.members)
        pod_images = dict.fromkeys(images[pod] for pod in pods if pod in images)
        changed = plan.changed(images=", ".join(pod_images)[:MAX_TEXT]) if pod_images else plan
        current_groups = [group for group in groups_of_plan if group.revision == revision]
        if spec is not None and current_groups:
            changed = changed.changed(roles=tuple(_build_gpu_roles(spec, current_groups, nodes)))
        new_plans.append(changed)
    return tuple(new_plans)


def _build_gpu_roles(
    spec: HeteroInferenceSpec, groups: list[GroupStatus], nodes: Mapping[str, NodeView]
) -> Iterable[PlanRole]:
    """Yields an entry for each GPU role, with the memory of its GPUs."""
    for role in spec.roles:
        if role.device is Device.GPU:
            yield PlanRole(
                name=role.name, device_memory=role.device_memory or _smallest_gpu_memory(role, groups, nodes)
            )


def _smallest_gpu_memory(
    role: RoleSpec, groups: list[GroupStatus], nodes: Mapping[str, NodeView]
) -> str | None:
    """Returns the smallest GPU memory that labels of the groups' nodes report, or None."""
    used = {
        entry.node for group in groups for entry in group.members if entry.role == role.name and entry.node
    }
    known = (device_memory_mib(nodes[name], role.gpu_resource) for name in used if name in nodes)
    sizes = [size for size in known if size is not None]
    return f"{min(sizes)}Mi" if sizes else None
