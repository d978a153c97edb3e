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
    found = []
    for plan in plans:
        own = by_plan.get(plan.hash, [])
        pods = (entry.pod for group in own for entry in group.members)
        named = dict.fromkeys(images[pod] for pod in pods if pod in images)
        changed = plan.changed(images=", ".join(named)[:MAX_TEXT]) if named else plan
        current = [group for group in own if group.revision == revision]
        if spec is not None and current:
            changed = changed.changed(roles=tuple(_gpu_roles(spec, current, nodes)))
        found.append(changed)
    return tuple(found)


def _gpu_roles(
    spec: HeteroInferenceSpec, groups: list[GroupStatus], nodes: Mapping[str, NodeView]
) -> Iterable[PlanRole]:
    for role in spec.roles:
        if role.device is Device.GPU:
            yield PlanRole(
                name=role.name, device_memory=role.device_memory or _least_memory(role, groups, nodes)
            )


def _least_memory(role: RoleSpec, groups: list[GroupStatus], nodes: Mapping[str, NodeView]) -> str | None:
    """Returns the least memory of a GPU that labels of the groups' nodes report, or None."""
    used = {
        entry.node for group in groups for entry in group.members if entry.role == role.name and entry.node
    }
    known = (device_memory_mib(nodes[name], role.gpu_resource) for name in used if name in nodes)
    sizes = [size for size in known if size is not None]
    return f"{min(sizes)}Mi" if sizes else None
