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
    """Adds the images of pods and the memory of GPUs to the plans in the status.

    Args:
        spec: current spec, or None if it cannot be read.
        revision: name of the current spec's revision. Plans of other revisions keep the memory that the
            status has.
    """
    groups_by_plan: dict[str, list[GroupStatus]] = {}
    for group in groups:
        groups_by_plan.setdefault(group.plan_hash or "", []).append(group)
    nodes = {node.name: node for node in observation.nodes or ()}
    images_by_pod = {pod.name: pod.images for pod in observation.pods if pod.images}
    completed_plans = []
    for plan in plans:
        groups_of_plan = groups_by_plan.get(plan.hash, [])
        pods = (entry.pod for group in groups_of_plan for entry in group.members)
        images = dict.fromkeys(images_by_pod[pod] for pod in pods if pod in images_by_pod)
        completed = plan.changed(images=", ".join(images)[:MAX_TEXT]) if images else plan
        current_groups = [group for group in groups_of_plan if group.revision == revision]
        if spec is not None and current_groups:
            completed = completed.changed(roles=tuple(_build_gpu_roles(spec, current_groups, nodes)))
        completed_plans.append(completed)
    return tuple(completed_plans)


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
    """Returns the smallest GPU memory that labels of the groups' nodes report, or None without a label."""
    node_names = {
        entry.node for group in groups for entry in group.members if entry.role == role.name and entry.node
    }
    sizes = (device_memory_mib(nodes[name], role.gpu_resource) for name in node_names if name in nodes)
    known_sizes = [size for size in sizes if size is not None]
    return f"{min(known_sizes)}Mi" if known_sizes else None
