"""Plans the groups that start in one reconcile, from the free capacity of the nodes. Pure.

The planner counts the free capacity once. Each planned group reduces it by its share.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Plan
from heteroinfer_operator.api import (
    ChosenMode,
    GroupStatus,
    HeteroInferenceSpec,
    HeteroInferenceStatus,
    When,
    parse_stored_spec,
)
from heteroinfer_operator.cluster import PodView, ResourceObservation
from heteroinfer_operator.errors import HeteroInferError, PlanError, PlanReason, Shortage
from heteroinfer_operator.manifests.gang import choose_gang
from heteroinfer_operator.nodes.calibrations import slowest
from heteroinfer_operator.nodes.node_assignment import Gang, NodeAssignment
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.nodes.priorities import preempting_priority
from heteroinfer_operator.planning import (
    Capacity,
    EpochPlan,
    GroupRequest,
    Inventory,
    assign_existing_plan,
    build_free_nodes,
    make_plan,
    plan_group,
)
from heteroinfer_operator.planning.gpu_floor import GpuFloor
from heteroinfer_operator.planning.gpu_sizes import gpu_memory_mib, largest_gpu_bytes_by_role
from heteroinfer_operator.planning.predicted_plan import PredictedPlan, find_sizes, predict_again
from heteroinfer_operator.reconcile.reading import pods_by_group

WAITING_FOR_MODEL = "WaitingForModel"
UNSCHEDULABLE: Final = "Unschedulable"
"""Reason of CapacityAvailable if pods exist that have no node."""
_MAX_NAMED: Final = 3
"""Largest number of pods that a message lists by name."""
_MAX_ANSWERS: Final = 2000
"""Number of cached results of `_find_cached_plan_problem`, one for each spec and model, a few KB each."""
CAPACITY_REASONS: Final = frozenset({Shortage.reason, PlanReason.INSUFFICIENT_CAPACITY.value, UNSCHEDULABLE})
"""Reasons of missing capacity."""


@dataclass(slots=True, kw_only=True)
class GroupPlanner:
    """Makes the plans of the groups that start in one reconcile. Each plan reserves its share of the nodes.

    Attributes:
        request: spec and model to plan, or None while the spec is refused or the model is unknown.
        waits_for: message to report while the model is unknown.
        shortage_age_s: seconds since GPUs have been missing; None if waiting cannot help, because no node can
            be added.
        prefers_nodes: whether pods prefer the nodes that the planner found; False on a single machine.
        groups: number of wanted groups.
        chosen: mode that this planner chose for a spec without a mode, or None.
    """

    request: GroupRequest | None
    waits_for: str
    observation: ResourceObservation
    shortage_age_s: float | None
    prefers_nodes: bool = True
    groups: int = 1
    chosen: ChosenMode | None = field(init=False, default=None)
    _free_nodes: Sequence[FreeNode] | None = field(init=False, default=None)
    _problem: PlanError | None = field(init=False, default=None)
    _problem_is_known: bool = field(init=False, default=False)
    _nodes_by_group: dict[int, set[str]] | None = field(init=False, default=None)
    """Names of the nodes that run, or will run, pods of a group, by group."""

    def make(self, group: int) -> EpochPlan:
        """Returns the plan of one more group, and reserves the group's share of the nodes.

        Args:
            group: index of the group.

        Raises:
            Shortage: GPUs or other capacity are missing now.
            PlanError: no plan exists, or the model is not known yet.
        """
        request = self._known_request()
        gang = self._choose_gang(request.spec)
        try:
            planned = plan_group(request, self._capacity(request.spec, gang, group))
        except Shortage as shortage:
            raise self._with_reserving_pods(shortage) from None
        if planned.choice is not None:  # the other groups of this revision use the same mode
            self.chosen, self.request = planned.choice.chosen, planned.request
        return replace(planned, node_assignment=self._finish_assignment(planned.node_assignment, gang, group))

    def make_for_any_nodes(self) -> EpochPlan:
        """Returns the plan of a group without regard to nodes, for a dry run.

        Raises the same errors as `make`.
        """
        request = self._known_request()
        gang = self._choose_gang(request.spec)
        planned = make_plan(request, Inventory())
        return EpochPlan(plan=planned.plan, node_assignment=NodeAssignment(gang=gang), choice=planned.choice)

    def make_again(self, group: int, spec: HeteroInferenceSpec, plan: Plan) -> EpochPlan:
        """Chooses nodes for a group's next epoch, which keeps the group's plan.

        Raises the same errors as `make`.

        Args:
            group: index of the group.
            spec: spec that the group was created with.
            plan: plan of the group's last epoch.
        """
        gang = self._choose_gang(spec)
        try:
            capacity = self._capacity(spec, gang, group)
            assignment, missing = assign_existing_plan(spec, plan, capacity, self._gpu_floor(spec, plan))
        except Shortage as shortage:
            raise self._with_reserving_pods(shortage) from None
        finished_assignment = self._finish_assignment(assignment, gang, group)
        return EpochPlan(plan=plan, node_assignment=finished_assignment, missing=missing)

    def constrain_added_pods(
        self, spec: HeteroInferenceSpec, plan: Plan, pods: Sequence[PodView]
    ) -> NodeAssignment:
        """Returns the requirements on nodes for pods that are added to a running epoch.

        The pods get the gang scheduler and the GPU memory of the epoch's other pods, but no preferred nodes.

        Args:
            spec: spec that the group was created with.
            pods: existing pods of the epoch.
        """
        labelled = largest_gpu_bytes_by_role(spec, self.observation.nodes or ())
        memory = gpu_memory_mib(spec, plan, labelled, self._gpu_floor(spec, plan))
        return NodeAssignment(gang=read_gang(pods), gpu_memory_mib=memory, apart=self._places_groups_apart)

    def _gpu_floor(self, spec: HeteroInferenceSpec, plan: Plan) -> GpuFloor | None:
        """Memory that the plan's GPUs need besides weights and KV cache; None while the model is unknown."""
        if self.request is None or self.request.spec.model != spec.model:
            return None
        sizes = find_sizes(plan, spec, self.request.profile)
        return None if sizes is None else sizes[0].gpu_floor

    @property
    def profile(self) -> ModelProfile | None:
        """Sizes of the model, or None while they are unknown."""
        return None if self.request is None else self.request.profile

    def predict_again(self, plan: Plan, group: GroupStatus) -> PredictedPlan | None:
        """Predicts the step times of a group's plan from measurements of the group's nodes.

        If one node of a role is unknown, the role has no measurements, and its ranks get default rates.

        Returns:
            The predicted plan; None if the plan belongs to another spec, or the model is unknown.
        """
        if self.request is None:
            return None
        nodes = {node.name: node for node in self.observation.nodes or ()}
        measured: dict[str, Calibration] = {}
        products: dict[str, str] = {}
        labels_by_role: dict[str, dict[str, Mapping[str, str]]] = {}
        for role in self.request.spec.roles:
            labels_by_role[role.name] = _labels_of_role_nodes(role.name, group, nodes)
            labels_of_nodes = labels_by_role[role.name].values()
            has_gpus = any(rank.role == role.name and rank.device is Device.GPU for rank in plan.ranks)
            calibration = slowest(self.observation.calibrations.of_nodes(labels_of_nodes), by_gpu=has_gpus)
            if calibration is not None:
                measured[role.name] = calibration
            products[role.name] = next(
                (labels.get(f"{role.gpu_resource}.product", "") for labels in labels_of_nodes), ""
            )
        asking_labels = labels_by_role.get(plan.ranks[0].role, {})
        networks = {
            role: self.observation.calibrations.network_between(asking_labels, labels)
            for role, labels in labels_by_role.items()
        }
        inventory = Inventory(
            calibration=measured,
            gpu_product=products,
            network={role: network for role, network in networks.items() if network is not None},
        )
        return predict_again(plan, self.request.spec, self.request.profile, inventory)

    def problem(self) -> PlanError | None:
        """Returns why no plan is possible even with unlimited capacity, or None if a plan is possible.

        Later calls return the result of the first call.
        """
        if not self._problem_is_known:
            self._problem_is_known = True
            self._problem = self._find_problem()
        return self._problem

    def _find_problem(self) -> PlanError | None:
        """Returns why no plan is possible even with unlimited capacity, or None."""
        try:
            request = self._known_request()
            self._choose_gang(
                request.spec
            )  # raises PlanError if the cluster lacks the required gang scheduler
        except PlanError as problem:
            return problem
        # The answer is cached by its arguments, so the spec must be hashable: its JSON text.
        spec_text = request.spec.model_dump_json(by_alias=True, exclude_none=True)
        message_and_reason = _find_cached_plan_problem(
            spec_text, request.profile, request.served_name, request.model_path
        )
        if message_and_reason is None:
            return None
        message, reason = message_and_reason
        return PlanError(message, reason=reason)

    def _known_request(self) -> GroupRequest:
        """Returns the request; raises PlanError while the model is unknown."""
        if self.request is None:
            raise PlanError(f"waiting for the model: {self.waits_for}", reason=WAITING_FOR_MODEL)
        return self.request

    def _with_reserving_pods(self, shortage: Shortage) -> Shortage:
        """Adds the unscheduled pods that reserve some of the capacity to the message of a shortage."""
        pod_names = [name for free_node in self._free_nodes or () for name in free_node.reserved]
        reserving_pods = describe_reserving_pods(pod_names, self.observation.resource.key.namespace)
        if not reserving_pods:
            return shortage
        return Shortage(f"{shortage.message}; {reserving_pods}", reason=shortage.reason)

    def _choose_gang(self, spec: HeteroInferenceSpec) -> Gang | None:
        """Returns the gang scheduler for the pods of a group, or None."""
        return choose_gang(spec, self.observation.gangs, self.observation.unknown_gangs)

    @property
    def _places_groups_apart(self) -> bool:
        """Whether the pods of different groups must be on different nodes if possible."""
        return self.groups > 1 and self.prefers_nodes

    def _capacity(self, spec: HeteroInferenceSpec, gang: Gang | None, group: int) -> Capacity:
        """Returns the capacity that one group may use: free nodes, calibrations and priority.

        With a gang scheduler, or if the user turned gang scheduling off, the operator creates pods even
        without free capacity, and the pods wait for it (`pods_may_wait`).
        """
        if self._free_nodes is None and self.observation.nodes is not None:
            self._free_nodes = build_free_nodes(self.observation.nodes, self.observation.reserved)
        return Capacity(
            free_nodes=self._free_nodes,
            calibrations=self.observation.calibrations,
            pods_may_wait=gang is not None or spec.scheduling.gang is When.NEVER,
            shortage_age_s=self.shortage_age_s,
            resource=self.observation.resource.key,
            others=self._other_groups(group) if self._places_groups_apart else None,
            priority=preempting_priority(
                spec.scheduling.priority_class_name, self.observation.priority_classes
            ),
        )

    def _other_groups(self, group: int) -> OtherGroups:
        """Returns the nodes that run, or will run, pods of the resource's other groups."""
        if self._nodes_by_group is None:
            self._nodes_by_group = find_occupied_nodes(self.observation)
        nodes_of_others = [nodes for index, nodes in self._nodes_by_group.items() if index != group]
        return OtherGroups.on_nodes(nodes_of_others, self.observation.nodes or ())

    def _finish_assignment(self, assignment: NodeAssignment, gang: Gang | None, group: int) -> NodeAssignment:
        """Adds the gang scheduler to an assignment of nodes, and records the nodes as used by the group.

        On a single machine (`prefers_nodes` is False), the result has no nodes, so that pods prefer no node.
        """
        if self._nodes_by_group is not None:
            self._nodes_by_group.setdefault(group, set()).update(assignment.expected_nodes)
        return replace(
            assignment,
            gang=gang,
            nodes=assignment.nodes if self.prefers_nodes else {},
            apart=self._places_groups_apart,
            nodes_of_others=(
                frozenset(self._other_groups(group).nodes) if self._places_groups_apart else frozenset()
            ),
        )


def _labels_of_role_nodes(
    role: str, group: GroupStatus, nodes: Mapping[str, NodeView]
) -> dict[str, Mapping[str, str]]:
    """Returns the labels of each node with ranks of a role, by name; empty if one of the nodes is unknown.

    Args:
        nodes: known nodes by name.
    """
    node_names = [entry.node for entry in group.members if entry.role == role]
    labels = {name: nodes[name].labels for name in node_names if name is not None and name in nodes}
    are_all_known = len(labels) == len(set(node_names))
    return labels if are_all_known else {}


@lru_cache(maxsize=_MAX_ANSWERS)
def _find_cached_plan_problem(
    spec_text: str, profile: ModelProfile, served_name: str, model_path: str
) -> tuple[str, str] | None:
    """Returns message and reason of the error that prevents a plan with unlimited capacity, or None.

    The result is cached, because every resync needs it for the same spec. The cache stores texts instead of
    the error, because the traceback of a cached error would grow each time that the error is raised.
    """
    request = GroupRequest(
        spec=parse_stored_spec(json.loads(spec_text)),
        profile=profile,
        served_name=served_name,
        model_path=model_path,
    )
    try:
        make_plan(request, Inventory())
    except PlanError as problem:
        return problem.message, problem.reason
    return None


def describe_reserving_pods(pods: Sequence[str], namespace: str) -> str:
    """Describes the unscheduled pods that reserve capacity; returns "" without such pods.

    Args:
        pods: names of the pods, as `namespace/name`.
        namespace: namespace of the resource. Its users may not see names of pods in other namespaces.
    """
    prefix = f"{namespace}/"
    own_pods = [pod.removeprefix(prefix) for pod in sorted(pods) if pod.startswith(prefix)]
    descriptions = own_pods[:_MAX_NAMED]
    if len(own_pods) > _MAX_NAMED:
        descriptions.append(f"{len(own_pods) - _MAX_NAMED} more pods")
    num_others = len(pods) - len(own_pods)
    if num_others:
        descriptions.append(f"{num_others} pod{'s' if num_others > 1 else ''} of other namespaces")
    problem = "some of the capacity is reserved for pods that are not scheduled yet"
    return f"{problem}: {', '.join(descriptions)}" if descriptions else ""


def find_occupied_nodes(observation: ResourceObservation) -> dict[int, set[str]]:
    """Returns, by group, the nodes of the group's pods and the nodes that are reserved for its pods."""
    key = observation.resource.key
    nodes_by_group = defaultdict[int, set[str]](set)
    for index, pods in pods_by_group(observation.pods).items():
        nodes_by_group[index] |= {pod.node for pod in pods if pod.node and not pod.ended}
    for demand in observation.reserved:
        group = demand.labels.get(names.LABEL_GROUP, "")
        is_in_namespace = demand.name.startswith(f"{key.namespace}/")
        is_of_resource = is_in_namespace and demand.labels.get(names.LABEL_RESOURCE) == key.name
        if is_of_resource and group.isdecimal() and demand.preferred_node:
            nodes_by_group[int(group)].add(demand.preferred_node)
    return dict(nodes_by_group)


def read_gang(pods: Sequence[PodView]) -> Gang | None:
    """Reads the gang scheduler of an epoch from the labels of its pods, or None."""
    known = {gang.value: gang for gang in Gang}
    for pod in pods:
        label = pod.labels.get(names.LABEL_GANG)
        if label in known:
            return known[label]
    return None


def shortage_age_s(status: HeteroInferenceStatus, now: datetime) -> float:
    """Returns the seconds since GPUs were first missing; 0 if none are missing."""
    since = status.gpus_missing_since
    return (now - since).total_seconds() if since is not None else 0.0


def gpus_missing_since(
    status: HeteroInferenceStatus, refusals: Sequence[HeteroInferError], now: datetime
) -> datetime | None:
    """Returns the time since which GPUs have been missing, or None if none are missing.

    Args:
        refusals: errors because of which groups have no plan now.
    """
    are_missing = any(refusal.reason == Shortage.reason for refusal in refusals)
    # A clock that was set back must not prolong the wait.
    return min(status.gpus_missing_since or now, now) if are_missing else None
