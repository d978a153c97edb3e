"""Plans a group for the nodes of a cluster: a plan with a node for each pod, or the missing capacity. Pure.

free_nodes = build_free_nodes(nodes, promised)
planned = plan_group(request, Capacity(free_nodes=free_nodes))     # takes its share of them
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_operator.api import HeteroInferenceSpec, ResourceKey, RoleSpec, ShortageAction
from heteroinfer_operator.errors import PlanError, PlanReason, Shortage
from heteroinfer_operator.nodes.calibrations import Calibrations, slowest
from heteroinfer_operator.nodes.cpu_features import labelled_features, measured_features
from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.group_placement import Placement, assign_nodes
from heteroinfer_operator.nodes.missing_capacity import describe_missing_capacity, name_nodes
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode, device_memory_mib, find_obstacle
from heteroinfer_operator.nodes.role_demand import role_demand
from heteroinfer_operator.planning.auto_mode import plan_any_mode
from heteroinfer_operator.planning.gpu_floor import GPU_USABLE, GpuFloor
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.planner import GroupRequest, Planned, make_plan
from heteroinfer_operator.planning.prediction import predict
from heteroinfer_operator.quantity import parse_duration_s

_WAITS: Final = "the group waits, and no pod is created until all its pods fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The nodes for one group, and what happens if too little is free.

    Attributes:
        free_nodes: all nodes with their free capacity; None if nodes are unknown.
        others_wait: whether the pods are created although they do not fit, because a gang scheduler places
            them all at once, or because the user wants them placed one by one.
        shortage_age_s: seconds since GPUs have been missing; None if waiting is useless, so that CPUOnly
            takes effect at once.
        resource: name of the resource, by which affinity terms may select its pods; None without a name.
        others: groups of the resource that this group prefers to be apart from; None without such groups.
        priority: priority below which the scheduler preempts pods; None if it preempts none.
    """

    free_nodes: Sequence[FreeNode] | None = None
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen
    others_wait: bool = False
    shortage_age_s: float | None = None
    resource: ResourceKey | None = None
    others: OtherGroups | None = None
    priority: int | None = None

    def assign(self, demands: Sequence[PodDemand], key: str) -> Placement | None:
        """Returns nodes on which all pods fit; pods of lower priority are preempted only if necessary."""
        found = assign_nodes(demands, self.free_nodes or (), key, self.others)
        if found is None and self._can_preempt():
            found = assign_nodes(demands, self.preempted(), key, self.others)
        return found

    def copy(self) -> "Capacity":
        """Returns the same capacity, for a plan that is only tried."""
        if self.free_nodes is None:
            return self
        return replace(self, free_nodes=[replace(each, free=dict(each.free)) for each in self.free_nodes])

    def _can_preempt(self) -> bool:
        priority = self.priority
        return priority is not None and any(
            each.has_lower_priority(priority) for each in self.free_nodes or ()
        )

    def preempted(self) -> Sequence[FreeNode]:
        """Returns the nodes as they are after the scheduler has preempted all pods that it can."""
        free_nodes, priority = self.free_nodes or (), self.priority
        if priority is None:
            return free_nodes
        return [
            each.without_lower_priority(priority) if each.has_lower_priority(priority) else each
            for each in free_nodes
        ]


def plan_group(request: GroupRequest, capacity: Capacity) -> Planned:
    """Returns the plan of a group, with a node for each pod if nodes are known.

    Chooses the mode if the spec has none. Takes the capacity of the pods from `capacity.free_nodes`.

    Raises:
        Shortage: too little is free now; the message names the missing capacity of each node.
        PlanError: the group has no plan, even with more free capacity.
    """
    if request.spec.parallelism.mode is not None:
        return _plan_mode(request, capacity)
    tried = plan_any_mode(request, lambda with_mode: _plan_mode(with_mode, capacity.copy()))
    return replace(_plan_mode(tried.request, capacity), choice=tried.choice)


def _plan_mode(request: GroupRequest, capacity: Capacity) -> Planned:
    """Returns the plan of a spec with a mode; takes capacity and raises errors like plan_group."""
    if capacity.free_nodes is None:
        return make_plan(request, _anywhere(request.spec, capacity.calibrations))
    short = _short_roles(request.spec, capacity)
    gpus_are_awaited = request.spec.planning.on_gpu_shortage.action is ShortageAction.WAIT
    if short and not (capacity.others_wait and gpus_are_awaited):
        return _without_gpus(request, capacity, capacity.free_nodes, short)
    return _placed(request, capacity, capacity.free_nodes, {})


def _device(role: RoleSpec, on_cpus: Container[str]) -> Device:
    return Device.CPU if role.name in on_cpus else role.device


def _placed(
    request: GroupRequest, capacity: Capacity, free_nodes: Sequence[FreeNode], on_cpus: Mapping[str, str]
) -> Planned:
    """Returns the plan with these roles on CPUs and a node for each pod; raises the errors of plan_group."""
    spec = request.spec
    demands = [
        (role, role_demand(spec, role, _device(role, on_cpus), capacity.resource))
        for role in spec.roles
        for _ in range(role.pods)
    ]
    key = spec.scheduling.topology_key
    asked = [demand for _, demand in demands]
    found = capacity.assign(asked, key)
    inventory = _inventory(spec, capacity, demands, found, on_cpus)
    planned = make_plan(request, inventory)  # first, because a permanent error is reported before a shortage
    missing = _take(found, asked, capacity, free_nodes, key)
    node_assignment = NodeAssignment(
        gpu_memory_mib=gpu_memory_mib(spec, planned.plan, inventory.gpu_memory_bytes, planned.sizes.gpu_floor)
    )
    planned = replace(planned, missing=missing)
    if found is None or capacity.others_wait:
        return replace(planned, node_assignment=node_assignment)
    by_role: dict[str, list[str]] = {}
    for (role, _), node in zip(demands, found.nodes, strict=True):
        by_role.setdefault(role.name, []).append(node)
    nodes = {pod.index: by_role[pod.role].pop(0) for pod in planned.plan.pods}
    domain = (key, found.domain) if key else None
    return replace(planned, node_assignment=replace(node_assignment, nodes=nodes, domain=domain))


def assign_again(
    spec: HeteroInferenceSpec, plan: Plan, capacity: Capacity, floor: GpuFloor | None
) -> tuple[NodeAssignment, str]:
    """Returns a node for each pod of an existing plan, and takes the pods' capacity from the nodes.

    Args:
        floor: floor of the plan's GPUs; None if unknown.

    Returns:
        The nodes, and the missing capacity that the pods will wait for once they exist, or "".

    Raises:
        Shortage: the pods do not fit now; the message names the missing capacity of each node.
        PlanError: the plan belongs to another spec.
    """
    roles = {role.name: role for role in spec.roles}
    lost = next((pod.role for pod in plan.pods if pod.role not in roles), None)
    if lost is not None:
        raise PlanError(
            f"the plan has role {lost}, which the spec does not have. It belongs to another spec",
            reason=PlanReason.PLAN_LOST,
        )
    if capacity.free_nodes is None:
        return NodeAssignment(), ""
    asked = [role_demand(spec, roles[pod.role], pod.device, capacity.resource) for pod in plan.pods]
    key = spec.scheduling.topology_key
    found = capacity.assign(asked, key)
    missing = _take(found, asked, capacity, capacity.free_nodes, key)
    labelled = labelled_roles(spec, [free_node.node for free_node in capacity.free_nodes])
    assignment = NodeAssignment(gpu_memory_mib=gpu_memory_mib(spec, plan, labelled, floor))
    if found is None or capacity.others_wait:
        return assignment, missing
    nodes = {pod.index: node for pod, node in zip(plan.pods, found.nodes, strict=True)}
    return replace(assignment, nodes=nodes, domain=(key, found.domain) if key else None), missing


def gpu_memory_mib(
    spec: HeteroInferenceSpec, plan: Plan, labelled: Mapping[str, int], floor: GpuFloor | None
) -> dict[int, int]:
    """Returns the least memory of a pod's GPUs in MiB, by pod index, for GPUs with a memory label.

    The scheduler may choose another node than the plan. The plan's weights and KV cache must fit there too.

    Args:
        labelled: memory of a labelled GPU in bytes, by role. A plan of an earlier version may leave less
            than the floor on such a GPU; the floor is then ignored.
        floor: floor of the plan's GPUs; None if unknown.
    """
    by_labels = {role.name for role in spec.roles if role.device_memory is None and role.name in labelled}

    def least_bytes(rank: RankAssignment) -> int:
        held = rank.weight_bytes + rank.kv_cache_bytes
        least = ceil(held / GPU_USABLE)
        if floor is None:
            return least
        gpus = 1 if plan.is_mixed(rank.stage) else plan.tensor_parallel_size
        last = plan.pipeline_parallel_size - 1
        besides = floor.total(embeds=rank.stage == 0, samples=rank.stage == last, gpus=gpus)
        return max(least, held + besides) if held + besides <= labelled[rank.role] else least

    return {
        pod.index: max(-(-least_bytes(rank) // 2**20) for rank in pod.ranks if rank.device is Device.GPU)
        for pod in plan.pods
        if pod.role in by_labels and pod.device is Device.GPU
    }


def labelled_roles(spec: HeteroInferenceSpec, nodes: Sequence[NodeView]) -> dict[str, int]:
    """Returns the memory of the largest GPU in bytes, by role, if all nodes with such GPUs have the label.

    Only roles without deviceMemory are included.
    """
    found = {}
    for role in spec.roles:
        if role.device is not Device.GPU or role.device_memory is not None:
            continue
        having = [node for node in nodes if node.allocatable.get(role.gpu_resource, 0) > 0]
        sizes = [size for node in having if (size := device_memory_mib(node, role.gpu_resource)) is not None]
        if sizes and len(sizes) == len(having):
            found[role.name] = max(sizes) * 2**20
    return found


def _take(
    found: Placement | None,
    demands: Sequence[PodDemand],
    capacity: Capacity,
    free_nodes: Sequence[FreeNode],
    key: str,
) -> str:
    """Takes the capacity of a placement; returns the shortage that its pods will wait for, or "".

    Raises:
        Shortage: there is no placement, and no other component waits for one.
    """
    if found is None:
        missing = describe_missing_capacity(demands, capacity.preempted(), key)
        if not capacity.others_wait:
            raise Shortage(f"{missing}; {_WAITS}", reason=PlanReason.INSUFFICIENT_CAPACITY)
        return missing
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    for demand, node in zip(demands, found.nodes, strict=True):
        by_name[node].take(demand.requests)
    full = [node for node in dict.fromkeys(found.nodes) if by_name[node].is_overfull]
    return (
        f"waiting until the scheduler preempts pods of lower priority on {name_nodes(full)}" if full else ""
    )


def _inventory(
    spec: HeteroInferenceSpec,
    capacity: Capacity,
    demands: Sequence[tuple[RoleSpec, PodDemand]],
    found: Placement | None,
    on_cpus: Mapping[str, str],
) -> Inventory:
    """Returns the known devices of the placement's nodes, or without a placement of all open nodes."""
    free_nodes = capacity.free_nodes or ()
    measured: dict[str, Calibration] = {}
    features: dict[str, frozenset[str]] = {}
    memory: dict[str, int] = {}
    product: dict[str, str] = {}
    chosen: dict[str, set[str]] = {}
    for (role, _), node in zip(demands, found.nodes if found else (), strict=bool(found)):
        chosen.setdefault(role.name, set()).add(node)
    for role, demand in {role.name: (role, demand) for role, demand in demands}.values():
        nodes = [
            free_node.node
            for free_node in free_nodes
            if (
                free_node.node.name in chosen[role.name]
                if found
                else not find_obstacle(demand, free_node.node)
            )
        ]
        # Also for GPU roles, because their pods may compute on CPUs.
        labelled = [known for node in nodes if (known := labelled_features(node)) is not None]
        if nodes and len(labelled) == len(nodes):
            features[role.name] = frozenset.intersection(*labelled)
        calibrations = capacity.calibrations.of_nodes(node.labels for node in nodes)
        by_gpu = role.device is Device.GPU and role.name not in on_cpus
        calibration = slowest(calibrations, by_gpu=by_gpu)
        if calibration is not None:
            measured[role.name] = calibration
            # The pods may use only features that all measured machines have.
            features.setdefault(role.name, frozenset.intersection(*map(measured_features, calibrations)))
        if role.device is not Device.GPU:
            continue
        resource = role.gpu_resource
        nodes = [node for node in nodes if node.allocatable.get(resource, 0) > 0]
        sizes = [size for node in nodes if (size := device_memory_mib(node, resource)) is not None]
        if sizes and len(sizes) == len(nodes):
            memory[role.name] = min(sizes) * 2**20
        products = sorted({node.labels.get(f"{resource}.product", "") for node in nodes})
        if len(products) == 1:
            product[role.name] = products[0]
    return Inventory(
        gpu_memory_bytes=memory,
        gpu_product=product,
        cpu_features=features,
        calibration=measured,
        on_cpus=on_cpus,
    )


def _anywhere(spec: HeteroInferenceSpec, calibrations: Calibrations) -> Inventory:
    """Returns the known devices if nodes are unknown: those of this machine, if it was measured."""
    machine = calibrations.this_machine
    if machine is None:
        return Inventory()
    roles = [role.name for role in spec.roles]
    return Inventory(
        cpu_features=dict.fromkeys(roles, measured_features(machine)),
        calibration=dict.fromkeys(roles, machine),
    )


def _short_roles(spec: HeteroInferenceSpec, capacity: Capacity) -> dict[str, str]:
    """Returns the GPU roles without enough usable GPUs, with the missing GPUs of each node.

    Roles are counted in order and by GPUs alone: a role whose pods lack memory is not short of GPUs.
    """
    key = spec.scheduling.topology_key
    placed: list[PodDemand] = []
    short: dict[str, str] = {}
    for role in spec.roles:
        if role.device is not Device.GPU:
            continue
        demand = role_demand(spec, role, Device.GPU, capacity.resource)
        gpus = {role.gpu_resource: demand.requests[role.gpu_resource]}
        pods = [replace(demand, requests=gpus)] * role.pods
        if capacity.assign([*placed, *pods], key) is None:
            short[role.name] = describe_missing_capacity([*placed, *pods], capacity.preempted(), key)
        else:
            placed += pods
    return short


def _without_gpus(
    request: GroupRequest, capacity: Capacity, free_nodes: Sequence[FreeNode], short: Mapping[str, str]
) -> Planned:
    """Returns the plan with roles on CPUs if the spec allows that now; raises the errors of plan_group."""
    shortage, age_s = request.spec.planning.on_gpu_shortage, capacity.shortage_age_s
    # A permanent error is reported first, because GPUs would not help.
    demands = [(role, role_demand(request.spec, role, role.device)) for role in request.spec.roles]
    wanted = make_plan(request, _inventory(request.spec, capacity, demands, None, {}))
    missing = "; ".join(dict.fromkeys(short.values()))
    slower = _on_cpus_instead(request, capacity, short, wanted)
    if shortage.action is ShortageAction.WAIT:
        raise Shortage(
            f"{missing}; the group waits for them. Add GPUs, or set "
            f"planning.onGPUShortage.action: CPUOnly{slower}"
        )
    if age_s is not None and age_s < parse_duration_s(shortage.after):
        raise Shortage(
            f"{missing}; the group will use CPUs once GPUs have been missing for {shortage.after}{slower}"
        )
    return _placed(request, capacity, free_nodes, {name: f"{why}{slower}" for name, why in short.items()})


def _on_cpus_instead(
    request: GroupRequest, capacity: Capacity, short: Mapping[str, str], wanted: Planned
) -> str:
    """Returns a text with the predicted step on CPUs and with the missing GPUs."""
    spec = request.spec
    demands = [(role, role_demand(spec, role, _device(role, short))) for role in spec.roles]
    try:
        cpus = make_plan(request, _inventory(spec, capacity, demands, None, short))
    except PlanError as error:
        return f" (the group has no plan without GPUs: {error.message})"
    steps = [predict(planned.plan, planned.rates) for planned in (cpus, wanted)]
    return f" (expected step time on CPUs: {steps[0]} instead of {steps[1]})"
