"""Plans a group for the nodes of a cluster: a plan with a node for each pod, or the missing capacity. Pure.

free_nodes = build_free_nodes(nodes, reserved)
planned = plan_group(request, Capacity(free_nodes=free_nodes))     # takes capacity from free_nodes
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.network_measurement import NetworkMeasurement
from heteroinfer_contract.plan import Device, Plan, PodAssignment, RankAssignment
from heteroinfer_operator.api import HeteroInferenceSpec, ResourceKey, RoleSpec, ShortageAction
from heteroinfer_operator.errors import PlanError, PlanReason, Shortage
from heteroinfer_operator.nodes.calibrations import Calibrations, slowest
from heteroinfer_operator.nodes.cpu_features import labelled_features, measured_features
from heteroinfer_operator.nodes.demand import PodDemand, larger_label, with_required_label
from heteroinfer_operator.nodes.group_placement import Placement, assign_nodes, find_farther_placements
from heteroinfer_operator.nodes.missing_capacity import describe_missing_capacity, name_nodes
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import (
    FreeNode,
    device_memory_label,
    device_memory_mib,
    find_obstacle,
)
from heteroinfer_operator.nodes.role_demand import role_demand
from heteroinfer_operator.planning.auto_mode import plan_any_mode
from heteroinfer_operator.planning.concurrency import requests_at_once
from heteroinfer_operator.planning.gpu_floor import GpuFloor
from heteroinfer_operator.planning.gpu_sizes import fits_gpus, gpu_memory_mib, largest_gpu_bytes_by_role
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.planner import GroupRequest, Planned, make_plan
from heteroinfer_operator.planning.prediction import predict
from heteroinfer_operator.quantity import parse_duration_s

_GROUP_WAITS: Final = "the group waits: the operator creates no pod until all pods of the group fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The nodes for one group, and the rules for too little free capacity.

    Attributes:
        free_nodes: all nodes with their free capacity; None if nodes are unknown.
        pods_may_wait: whether the operator creates the pods although they do not fit, because a gang
            scheduler places all pods at the same time, or because the user wants each pod placed on its own.
        shortage_age_s: seconds for which GPUs have been missing; None if no GPUs can be added, so that
            CPUOnly takes effect immediately.
        resource: the resource's namespace and name, by which affinity terms may select its pods; None if
            unknown.
        others: groups of the resource that this group prefers to be apart from; None without such groups.
        priority: the scheduler preempts pods below this priority; None if it preempts none.
    """

    free_nodes: Sequence[FreeNode] | None = None
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen
    pods_may_wait: bool = False
    shortage_age_s: float | None = None
    resource: ResourceKey | None = None
    others: OtherGroups | None = None
    priority: int | None = None

    def assign(self, demands: Sequence[PodDemand], topology_key: str) -> Placement | None:
        """Returns nodes on which all pods fit, or None.

        Chooses nodes on which the scheduler must preempt other pods only if no other nodes fit.

        Args:
            topology_key: label of nodes whose value must be equal on all chosen nodes; "" for none.
        """
        return self._assign(demands, topology_key)[0]

    def assign_farther(
        self, demands: Sequence[PodDemand], topology_key: str, placement: Placement
    ) -> Iterator[Placement]:
        """Yields placements farther from the other groups than `placement`, possibly on smaller GPUs.

        These placements need the preemption of other pods only if `placement` needs such a preemption, too.
        """
        if self.others is None or not self.others.any_is_shared(placement.nodes):
            return
        free_nodes = self._assign(demands, topology_key)[1]
        yield from find_farther_placements(demands, free_nodes, topology_key, self.others, placement)

    def _assign(
        self, demands: Sequence[PodDemand], topology_key: str
    ) -> tuple[Placement | None, Sequence[FreeNode]]:
        """Returns the placement of `assign`, and the free nodes from which it was chosen."""
        free_nodes = self.free_nodes or ()
        placement = assign_nodes(demands, free_nodes, topology_key, self.others)
        if placement is None and self._has_preemptible_pods():
            free_nodes = self.nodes_after_preemption()
            placement = assign_nodes(demands, free_nodes, topology_key, self.others)
        return placement, free_nodes

    def copy(self) -> "Capacity":
        """Returns a copy. A plan can take capacity from the copy without changing the original."""
        if self.free_nodes is None:
            return self
        return replace(
            self, free_nodes=[replace(free_node, free=dict(free_node.free)) for free_node in self.free_nodes]
        )

    def _has_preemptible_pods(self) -> bool:
        """Reports whether the scheduler may preempt any pod for this group."""
        priority = self.priority
        return priority is not None and any(
            free_node.has_lower_priority(priority) for free_node in self.free_nodes or ()
        )

    def nodes_after_preemption(self) -> Sequence[FreeNode]:
        """Returns the nodes as they are after the scheduler has preempted all pods that it may preempt."""
        free_nodes, priority = self.free_nodes or (), self.priority
        if priority is None:
            return free_nodes
        return [
            free_node.without_lower_priority(priority)
            if free_node.has_lower_priority(priority)
            else free_node
            for free_node in free_nodes
        ]


def plan_group(request: GroupRequest, capacity: Capacity) -> Planned:
    """Returns the plan of a group, with a node for each pod if nodes are known.

    Chooses the mode if the spec has none. Takes the capacity of the pods from `capacity.free_nodes`.

    Raises:
        Shortage: too little is free now; the message names the missing capacity of each node.
        PlanError: the group has no plan, even with more free capacity.
    """
    if request.spec.parallelism.mode is not None:
        return _plan_in_mode_of_spec(request, capacity)
    # Each mode is tried with a copy of the capacity. Then the chosen mode is planned again, to take the
    # capacity from the original.
    tried = plan_any_mode(request, lambda with_mode: _plan_in_mode_of_spec(with_mode, capacity.copy()))
    return replace(_plan_in_mode_of_spec(tried.request, capacity), choice=tried.choice)


def _plan_in_mode_of_spec(request: GroupRequest, capacity: Capacity) -> Planned:
    """Returns the plan of a spec whose mode is set, and takes the capacity of the pods.

    Raises the errors of `plan_group`.
    """
    if capacity.free_nodes is None:
        return make_plan(request, _inventory_without_nodes(request.spec, capacity.calibrations))
    missing_by_role = _find_missing_gpus(request.spec, capacity)
    # Pods that may wait for a scheduler can also wait for GPUs, unless their ranks may compute on CPUs.
    waits_for_gpus = (
        capacity.pods_may_wait and request.spec.planning.on_gpu_shortage.action is ShortageAction.WAIT
    )
    if missing_by_role and not waits_for_gpus:
        return _plan_without_gpus(request, capacity, capacity.free_nodes, missing_by_role)
    return _plan_on_nodes(request, capacity, capacity.free_nodes, reasons_on_cpus={})


def _planned_device(role: RoleSpec, on_cpus: Container[str]) -> Device:
    """Returns the device of a role: CPU for a role in `on_cpus`, otherwise the role's own device."""
    return Device.CPU if role.name in on_cpus else role.device


def _plan_on_nodes(
    request: GroupRequest,
    capacity: Capacity,
    free_nodes: Sequence[FreeNode],
    reasons_on_cpus: Mapping[str, str],
) -> Planned:
    """Returns the plan with a node for each pod, and takes the capacity of the pods.

    Raises the errors of `plan_group`.

    Args:
        reasons_on_cpus: the GPU roles that compute on CPUs, with the reason.
    """
    spec = request.spec
    demands = [
        (role, role_demand(spec, role, _planned_device(role, reasons_on_cpus), capacity.resource))
        for role in spec.roles
        for _ in range(role.pods)
    ]
    topology_key = spec.scheduling.topology_key
    role_names, pod_demands = [role.name for role, _ in demands], [demand for _, demand in demands]
    placement = capacity.assign(pod_demands, topology_key)

    def plan_on(placement: Placement | None) -> Planned:
        """Returns the plan for the nodes of a placement."""
        return make_plan(request, _build_inventory(capacity, demands, placement, reasons_on_cpus))

    def plan_as_good(farther: Placement, first: Placement, on_first: Planned) -> Planned | None:
        """Returns the plan for a farther placement; None if that plan is worse than the plan for `first`."""
        try:
            on_farther = plan_on(farther)
        except PlanError:  # these nodes are too small; the next placement has larger GPUs
            return None
        plan, floor = on_farther.plan, on_farther.sizes.gpu_floor
        farther_nodes, first_nodes = (_nodes_by_pod(plan, role_names, each) for each in (farther, first))
        is_as_good = _serves_the_same(on_farther, on_first) and fits_gpus(
            spec, plan, floor, free_nodes, farther_nodes, first_nodes
        )
        return on_farther if is_as_good else None

    # The plan is made before capacity is taken. So an error that more capacity would not solve is raised
    # before a shortage.
    planned = plan_on(placement)
    if placement is not None:
        # Nodes farther from the resource's other groups are better if the plan there is as good.
        for farther in capacity.assign_farther(pod_demands, topology_key, placement):
            if (on_farther := plan_as_good(farther, placement, planned)) is not None:
                placement, planned = farther, on_farther
                break
    missing = _take_capacity(placement, pod_demands, capacity, free_nodes, topology_key)
    labelled = planned.inventory.gpu_memory_bytes
    gpu_sizes = gpu_memory_mib(spec, planned.plan, labelled, planned.sizes.gpu_floor)
    nodes = {} if placement is None else _nodes_by_pod(planned.plan, role_names, placement)
    node_assignment = _build_node_assignment(placement, nodes, gpu_sizes, capacity, topology_key)
    return replace(planned, missing=missing, node_assignment=node_assignment)


def _nodes_by_pod(plan: Plan, role_names: Sequence[str], placement: Placement) -> dict[int, str]:
    """Returns the node of each pod of the plan, by pod index.

    Args:
        role_names: the role for which each node of the placement was chosen.
    """
    nodes_by_role: dict[str, list[str]] = {}
    for role_name, node in zip(role_names, placement.nodes, strict=True):
        nodes_by_role.setdefault(role_name, []).append(node)
    return {pod.index: nodes_by_role[pod.role].pop(0) for pod in plan.pods}


def _build_node_assignment(
    placement: Placement | None,
    nodes: Mapping[int, str],
    gpu_sizes: Mapping[int, int],
    capacity: Capacity,
    topology_key: str,
) -> NodeAssignment:
    """Returns the nodes that the pods prefer. Pods that may wait prefer none: the scheduler chooses alone.

    Args:
        nodes: node of each pod in the placement, by pod index.
        gpu_sizes: minimum memory of a GPU in MiB, by pod index.
    """
    expected_nodes = frozenset(placement.nodes if placement is not None else ())
    assignment = NodeAssignment(gpu_memory_mib=gpu_sizes, expected_nodes=expected_nodes)
    if placement is None or capacity.pods_may_wait:
        return assignment
    domain = (topology_key, placement.domain) if topology_key else None
    return replace(assignment, nodes=nodes, domain=domain)


def _serves_the_same(planned: Planned, reference: Planned) -> bool:
    """Reports whether a plan serves the spec's load as well as a reference plan on larger GPUs.

    All ranks must have the same layers and weights, and compute long prompts in the same way. The KV cache
    may be smaller. But it must hold all requests of `planning.load` at the same time, or as many of these
    requests as the KV cache of the reference plan holds.
    """

    def fixed_values(plan: Plan) -> list[RankAssignment]:
        """Returns the plan's ranks without the values that may differ: KV cache, step time, ring size.

        Each ring counts as 1 byte: either both plans must have a ring, or neither.
        """
        return [
            replace(rank, kv_cache_bytes=0, predicted_step_s=0.0, ring_bytes=min(rank.ring_bytes, 1))
            for rank in plan.ranks
        ]

    load = planned.request.spec.planning.chosen_load
    tokens = min(load.prompt_tokens + load.output_tokens, planned.plan.engine.max_model_len)
    wanted_requests = min(load.requests, requests_at_once(reference, tokens))
    plan, reference_plan = planned.plan, reference.plan
    return (
        fixed_values(plan) == fixed_values(reference_plan)
        and plan.engine.max_num_batched_tokens == reference_plan.engine.max_num_batched_tokens
        and requests_at_once(planned, tokens) >= wanted_requests
    )


def assign_existing_plan(
    spec: HeteroInferenceSpec, plan: Plan, capacity: Capacity, gpu_floor: GpuFloor | None
) -> tuple[NodeAssignment, str]:
    """Assigns a node to each pod of an existing plan, and takes the pods' capacity from these nodes.

    Prefers nodes that are far from the resource's other groups, if their GPUs are large enough for the plan.

    Args:
        gpu_floor: memory that the plan's GPUs need besides weights and KV cache; None if unknown.

    Returns:
        The nodes, and "". If capacity is missing and `capacity.pods_may_wait`, no nodes and the missing
        capacity: the operator creates the pods, and they wait in the scheduler.

    Raises:
        Shortage: capacity is missing, and the operator must not create the pods yet. The message names the
            missing capacity of each node.
        PlanError: the plan has a role that the spec lacks.
    """
    roles, free_nodes = {role.name: role for role in spec.roles}, capacity.free_nodes
    _check_roles_of_plan(plan, roles)
    if free_nodes is None:
        return NodeAssignment(), ""
    labelled = largest_gpu_bytes_by_role(spec, [free_node.node for free_node in free_nodes])
    gpu_sizes = gpu_memory_mib(spec, plan, labelled, gpu_floor)

    def demand_of(pod: PodAssignment) -> PodDemand:
        """Returns the demand of a pod, with the GPU memory that the plan needs if this memory is known."""
        demand = role_demand(spec, roles[pod.role], pod.device, capacity.resource)
        if pod.index not in gpu_sizes:
            return demand
        label = device_memory_label(roles[pod.role].gpu_resource)
        # Kubernetes can only compare with "larger than", so the limit is 1 MiB less than the minimum.
        return with_required_label(demand, larger_label(label, gpu_sizes[pod.index] - 1))

    def nodes_by_pod(placement: Placement) -> dict[int, str]:
        """Returns the node of each pod, by pod index."""
        return {pod.index: node for pod, node in zip(plan.pods, placement.nodes, strict=True)}

    demands, topology_key = [demand_of(pod) for pod in plan.pods], spec.scheduling.topology_key
    placement = capacity.assign(demands, topology_key)
    if placement is not None:
        first_nodes = nodes_by_pod(placement)
        for farther in capacity.assign_farther(demands, topology_key, placement):
            if fits_gpus(spec, plan, gpu_floor, free_nodes, nodes_by_pod(farther), first_nodes):
                placement = farther
                break
    missing = _take_capacity(placement, demands, capacity, free_nodes, topology_key)
    nodes = {} if placement is None else nodes_by_pod(placement)
    return _build_node_assignment(placement, nodes, gpu_sizes, capacity, topology_key), missing


def _check_roles_of_plan(plan: Plan, roles: Container[str]) -> None:
    """Raises PlanError if the plan has a role that its spec lacks.

    Args:
        roles: names of the roles of the spec.
    """
    unknown_role = next((pod.role for pod in plan.pods if pod.role not in roles), None)
    if unknown_role is not None:
        raise PlanError(
            f"the group's stored plan has role {unknown_role}, but its stored revision of the spec has no "
            "such role (another program changed one of the two). The group gets a new plan when it can start "
            "with the current spec. If the current spec is refused, correct it",
            reason=PlanReason.PLAN_LOST,
        )


def _take_capacity(
    placement: Placement | None,
    demands: Sequence[PodDemand],
    capacity: Capacity,
    free_nodes: Sequence[FreeNode],
    topology_key: str,
) -> str:
    """Takes the pods' capacity from their nodes.

    Takes nothing if there is no placement.

    Returns:
        The capacity that the pods will wait for once they exist, or "".

    Raises:
        Shortage: the pods have no nodes, and may not wait for a scheduler.
    """
    if placement is None:
        missing = describe_missing_capacity(demands, capacity.nodes_after_preemption(), topology_key)
        if not capacity.pods_may_wait:
            raise Shortage(f"{missing}; {_GROUP_WAITS}", reason=PlanReason.INSUFFICIENT_CAPACITY)
        return missing
    by_name = {free_node.node.name: free_node for free_node in free_nodes}
    for demand, node in zip(demands, placement.nodes, strict=True):
        by_name[node].reserve(demand.requests)
    overfull_nodes = [node for node in dict.fromkeys(placement.nodes) if by_name[node].is_overfull]
    return (
        f"waiting until the scheduler preempts pods of lower priority on {name_nodes(overfull_nodes)}"
        if overfull_nodes
        else ""
    )


def _build_inventory(
    capacity: Capacity,
    demands: Sequence[tuple[RoleSpec, PodDemand]],
    placement: Placement | None,
    on_cpus: Mapping[str, str],
) -> Inventory:
    """Returns the devices and measurements of the nodes on which each role's pods run.

    Without a placement, uses every node on which the role's pods could be placed.

    Args:
        on_cpus: GPU roles that compute on CPUs, with the reason.
    """
    calibration_by_role: dict[str, Calibration] = {}
    features_by_role: dict[str, frozenset[str]] = {}
    memory_by_role: dict[str, int] = {}
    product_by_role: dict[str, str] = {}
    nodes_of_roles = list(_nodes_of_roles(capacity, demands, placement))
    for role, nodes in nodes_of_roles:
        calibrations = capacity.calibrations.of_nodes(node.labels for node in nodes)
        by_gpu = role.device is Device.GPU and role.name not in on_cpus
        calibration = slowest(calibrations, by_gpu=by_gpu)
        if calibration is not None:
            calibration_by_role[role.name] = calibration
        # GPU roles also need CPU features, because their pods may compute on CPUs.
        features = _common_cpu_features(nodes, calibrations)
        if features is not None:
            features_by_role[role.name] = features
        if role.device is Device.GPU:
            memory_bytes, product = _common_gpu(nodes, role.gpu_resource)
            if memory_bytes is not None:
                memory_by_role[role.name] = memory_bytes
            if product is not None:
                product_by_role[role.name] = product
    return Inventory(
        gpu_memory_bytes=memory_by_role,
        gpu_product=product_by_role,
        cpu_features=features_by_role,
        calibration=calibration_by_role,
        network=_networks_by_role(capacity.calibrations, nodes_of_roles),
        on_cpus=on_cpus,
    )


def _networks_by_role(
    calibrations: Calibrations, nodes_of_roles: Sequence[tuple[RoleSpec, Sequence[NodeView]]]
) -> dict[str, NetworkMeasurement]:
    """Returns the measured network between the asking role and each role of feed-forward ranks.

    Only plans of mode FeedForward use the result.
    """
    may_ask = [each for each in nodes_of_roles if each[0].device is Device.GPU or each[0].feed_forward]
    if not may_ask:
        return {}
    asking_role = may_ask[0][0]
    labels = {role.name: {node.name: node.labels for node in nodes} for role, nodes in nodes_of_roles}
    found = {
        role: calibrations.network_between(labels[asking_role.name], labels_of_nodes)
        for role, labels_of_nodes in labels.items()
        if role != asking_role.name
    }
    return {role: network for role, network in found.items() if network is not None}


def _nodes_of_roles(
    capacity: Capacity, demands: Sequence[tuple[RoleSpec, PodDemand]], placement: Placement | None
) -> Iterator[tuple[RoleSpec, list[NodeView]]]:
    """Yields each role with the nodes of its pods; without a placement, with all nodes that suit its pods."""
    all_nodes = [free_node.node for free_node in capacity.free_nodes or ()]
    demand_by_role = {role.name: (role, demand) for role, demand in demands}
    if placement is None:
        for role, demand in demand_by_role.values():
            yield role, [node for node in all_nodes if not find_obstacle(demand, node)]
        return
    names_by_role: dict[str, set[str]] = {}
    for (role, _), name in zip(demands, placement.nodes, strict=True):
        names_by_role.setdefault(role.name, set()).add(name)
    for role, _ in demand_by_role.values():
        yield role, [node for node in all_nodes if node.name in names_by_role[role.name]]


def _common_cpu_features(
    nodes: Sequence[NodeView], calibrations: Sequence[Calibration]
) -> frozenset[str] | None:
    """Returns the CPU features that all nodes have; None if they are unknown.

    The features are from the labels of the nodes. If a node has no such labels, the features of all
    nodes are from the calibrations.
    """
    known_features = [features for features in map(labelled_features, nodes) if features is not None]
    if nodes and len(known_features) == len(nodes):
        return frozenset.intersection(*known_features)
    return frozenset.intersection(*map(measured_features, calibrations)) if calibrations else None


def _common_gpu(nodes: Sequence[NodeView], resource: str) -> tuple[int | None, str | None]:
    """Returns the memory of the smallest GPU on these nodes in bytes, and the product of all GPUs.

    The memory is None if a node with GPUs lacks its memory label. The product is None if nodes have different
    products.
    """
    nodes_with_gpus = [node for node in nodes if node.allocatable.get(resource, 0) > 0]
    sizes_mib = [device_memory_mib(node, resource) for node in nodes_with_gpus]
    known_mib = [size for size in sizes_mib if size is not None]
    is_memory_known = known_mib and len(known_mib) == len(nodes_with_gpus)
    memory_bytes = min(known_mib) * 2**20 if is_memory_known else None
    products = {node.labels.get(f"{resource}.product", "") for node in nodes_with_gpus}
    product = products.pop() if len(products) == 1 else None
    return memory_bytes, product


def _inventory_without_nodes(spec: HeteroInferenceSpec, calibrations: Calibrations) -> Inventory:
    """Returns the inventory if nodes are unknown: this machine's measurements, if any, for all roles."""
    this_machine, this_network = calibrations.this_machine, calibrations.this_network
    roles = [role.name for role in spec.roles]
    networks = {} if this_network is None else dict.fromkeys(roles, this_network)
    if this_machine is None:
        return Inventory(network=networks)
    return Inventory(
        network=networks,
        cpu_features=dict.fromkeys(roles, measured_features(this_machine)),
        calibration=dict.fromkeys(roles, this_machine),
    )


def _find_missing_gpus(spec: HeteroInferenceSpec, capacity: Capacity) -> dict[str, str]:
    """Returns the GPU roles for which too few GPUs are free, with the GPUs that each node lacks.

    Places the pods role by role, in the order of the spec. Ignores all requests except GPUs, so missing
    memory or CPUs do not matter.
    """
    topology_key = spec.scheduling.topology_key
    placed: list[PodDemand] = []
    missing_by_role: dict[str, str] = {}
    for role in spec.roles:
        if role.device is not Device.GPU:
            continue
        demand = role_demand(spec, role, Device.GPU, capacity.resource)
        gpu_request = {role.gpu_resource: demand.requests[role.gpu_resource]}
        pods = [replace(demand, requests=gpu_request)] * role.pods
        if capacity.assign([*placed, *pods], topology_key) is None:
            missing_by_role[role.name] = describe_missing_capacity(
                [*placed, *pods], capacity.nodes_after_preemption(), topology_key
            )
        else:  # a role without enough GPUs takes none from later roles
            placed += pods
    return missing_by_role


def _plan_without_gpus(
    request: GroupRequest,
    capacity: Capacity,
    free_nodes: Sequence[FreeNode],
    missing_by_role: Mapping[str, str],
) -> Planned:
    """Returns the plan with GPU roles on CPUs if the spec allows that now.

    Args:
        missing_by_role: the roles without enough GPUs, with the missing GPUs.

    Raises:
        Shortage: the group must wait for GPUs.
        PlanError: the group has no plan, even with more free capacity.
    """
    shortage, age_s = request.spec.planning.on_gpu_shortage, capacity.shortage_age_s
    # The plan with GPUs comes first, so that an error that more GPUs would not solve is raised before a
    # shortage.
    gpu_demands = _role_demands(request.spec, on_cpus=())
    gpu_plan = make_plan(request, _build_inventory(capacity, gpu_demands, None, {}))
    missing = "; ".join(dict.fromkeys(missing_by_role.values()))
    comparison = _compare_with_cpus(request, capacity, missing_by_role, gpu_plan)
    if shortage.action is ShortageAction.WAIT:
        raise Shortage(
            f"{missing}; the group waits for GPUs. Add GPUs, or set "
            f"planning.onGPUShortage.action: CPUOnly{comparison}"
        )
    if age_s is not None and age_s < parse_duration_s(shortage.after):
        raise Shortage(
            f"{missing}; the group will use CPUs once GPUs have been missing for {shortage.after}{comparison}"
        )
    return _plan_on_nodes(
        request, capacity, free_nodes, {name: f"{why}{comparison}" for name, why in missing_by_role.items()}
    )


def _role_demands(spec: HeteroInferenceSpec, on_cpus: Container[str]) -> list[tuple[RoleSpec, PodDemand]]:
    """Returns each role with the demand of one of its pods.

    The demands lack the name of the resource, which only affinity terms between pods need.

    Args:
        on_cpus: names of the GPU roles that compute on CPUs.
    """
    return [(role, role_demand(spec, role, _planned_device(role, on_cpus))) for role in spec.roles]


def _compare_with_cpus(
    request: GroupRequest, capacity: Capacity, missing_by_role: Mapping[str, str], gpu_plan: Planned
) -> str:
    """Returns the predicted step times with these roles on CPUs and with all GPUs, as text in parentheses."""
    cpu_demands = _role_demands(request.spec, on_cpus=missing_by_role)
    try:
        cpu_plan = make_plan(request, _build_inventory(capacity, cpu_demands, None, missing_by_role))
    except PlanError as error:
        return f" (the group has no plan without GPUs: {error.message})"
    steps = [predict(planned.plan, planned.rates) for planned in (cpu_plan, gpu_plan)]
    return f" (expected step time on CPUs: {steps[0]} instead of {steps[1]})"
