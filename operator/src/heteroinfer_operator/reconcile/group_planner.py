"""What there is to plan with, counted once a reconcile and used up by the groups that it starts. Pure."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Plan
from heteroinfer_operator.api import (
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
from heteroinfer_operator.nodes.cpu_features import roles_without_amx
from heteroinfer_operator.nodes.node_assignment import Gang, NodeAssignment
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.nodes.priorities import preempting_priority
from heteroinfer_operator.planning import (
    Capacity,
    EpochPlan,
    GroupRequest,
    Inventory,
    assign_again,
    build_free_nodes,
    make_plan,
    plan_group,
)
from heteroinfer_operator.planning.gpu_floor import GpuFloor
from heteroinfer_operator.planning.group_plan import gpu_memory_mib, labelled_roles
from heteroinfer_operator.planning.predicted_plan import PredictedPlan, find_sizes, predict_again
from heteroinfer_operator.reconcile.reading import pods_by_group
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS

WAITING_FOR_MODEL = "WaitingForModel"
UNSCHEDULABLE: Final = "Unschedulable"
"""Reason of CapacityAvailable where pods exist and have no node."""
_MOST_NAMED: Final = 3
"""Pods that a message names."""
_MOST_ANSWERS: Final = 2000
"""Remembered of specs and models, a few KB each."""
CAPACITY_REASONS: Final = frozenset({Shortage.reason, PlanReason.INSUFFICIENT_CAPACITY.value, UNSCHEDULABLE})
"""Reasons of missing capacity."""


@dataclass(slots=True, kw_only=True)
class GroupPlanner:
    """Makes the plans of the groups that start in one reconcile; each takes its share of what is free.

    Attributes:
        request: what is to be planned, or None while the spec is refused or the model is not known.
        waits_for: what is said while it is not.
        shortage_age_s: how long GPUs have been missing; None where waiting is of no use.
        hints: whether pods name the node that was found for them: not where there is one machine.
        groups: how many are wanted.
    """

    request: GroupRequest | None
    waits_for: str
    observation: ResourceObservation
    shortage_age_s: float | None
    hints: bool = True
    groups: int = 1
    _free_nodes: Sequence[FreeNode] | None = field(init=False, default=None)
    _problem: PlanError | None = field(init=False, default=None)
    _asked: bool = field(init=False, default=False)
    _occupied: dict[int, set[str]] | None = field(init=False, default=None)
    """By group: names of the nodes that have its pods, or will."""

    def make(self, group: int) -> EpochPlan:
        """Returns the plan of one more group; what it takes of the nodes is not given to the next.

        Args:
            group: its index.

        Raises:
            Shortage: GPUs or other capacity are missing now.
            PlanError: there is no plan, or the model is not known yet.
        """
        request = self._known_request()
        gang = self._choose_gang(request.spec)
        try:
            planned = plan_group(request, self._capacity(request.spec, gang, group))
        except Shortage as shortage:
            raise self._with_promises(shortage) from None
        return replace(planned, node_assignment=self._hinted(planned.node_assignment, gang, group))

    def make_for_any_nodes(self) -> EpochPlan:
        """Returns a plan however much is free: as sizes go, and not where its pods belong; raises as make."""
        request = self._known_request()
        gang = self._choose_gang(request.spec)
        planned = make_plan(request, Inventory(without_amx=self._without_amx(request)))
        return EpochPlan(plan=planned.plan, node_assignment=NodeAssignment(gang=gang))

    def make_again(self, group: int, spec: HeteroInferenceSpec, plan: Plan) -> EpochPlan:
        """Returns the plan that a group had, for its next epoch; raises as make.

        Args:
            group: its index.
            spec: that the group was made with.
            plan: of its last epoch.
        """
        gang = self._choose_gang(spec)
        try:
            capacity = self._capacity(spec, gang, group)
            assignment, missing = assign_again(spec, plan, capacity, self._gpu_floor(spec, plan))
        except Shortage as shortage:
            raise self._with_promises(shortage) from None
        hinted = self._hinted(assignment, gang, group)
        return EpochPlan(plan=plan, node_assignment=hinted, missing=missing)

    def node_assignment_again(
        self, spec: HeteroInferenceSpec, plan: Plan, pods: Sequence[PodView]
    ) -> NodeAssignment:
        """Returns where pods belong that are created for an epoch which has others already.

        Args:
            spec: that the group was made with.
            pods: those others.
        """
        labelled = labelled_roles(spec, self.observation.nodes or ())
        memory = gpu_memory_mib(spec, plan, labelled, self._gpu_floor(spec, plan))
        return NodeAssignment(gang=gang_of(pods), gpu_memory_mib=memory, apart=self._are_apart)

    def _gpu_floor(self, spec: HeteroInferenceSpec, plan: Plan) -> GpuFloor | None:
        """Returns the floor of a plan's GPUs; None while the sizes of its model are not known."""
        if self.request is None or self.request.spec.model != spec.model:
            return None
        found = find_sizes(plan, spec, self.request.profile)
        return None if found is None else found[0].gpu_floor

    @property
    def profile(self) -> ModelProfile | None:
        """Returns the sizes of the model, or None while they are not known."""
        return None if self.request is None else self.request.profile

    def predict_again(self, plan: Plan, group: GroupStatus) -> PredictedPlan | None:
        """Returns what the steps of a group's plan take, by what was measured of the nodes that it is on.

        None where the plan is of another spec, or the model is not known.
        """
        if self.request is None:
            return None
        nodes = {node.name: node for node in self.observation.nodes or ()}
        measured: dict[str, Calibration] = {}
        products: dict[str, str] = {}
        for role in self.request.spec.roles:
            on_nodes = [entry.node for entry in group.members if entry.role == role.name]
            known = [nodes[name].labels for name in on_nodes if name in nodes]
            labels = known if len(known) == len(on_nodes) else []
            by_gpu = any(rank.role == role.name and rank.device is Device.GPU for rank in plan.ranks)
            calibration = slowest(self.observation.calibrations.of_nodes(labels), by_gpu=by_gpu)
            if calibration is not None:
                measured[role.name] = calibration
            products[role.name] = next((each.get(f"{role.gpu_resource}.product", "") for each in labels), "")
        inventory = Inventory(calibration=measured, gpu_product=products)
        return predict_again(plan, self.request.spec, self.request.profile, inventory)

    def problem(self) -> PlanError | None:
        """Returns why there would be no plan however much were free, or None if there is one."""
        if not self._asked:
            self._asked = True
            try:
                request = self._known_request()
                self._choose_gang(request.spec)
            except PlanError as problem:
                self._problem = problem
            else:
                text = request.spec.model_dump_json(by_alias=True, exclude_none=True)
                found = _find_problem(
                    text, request.profile, request.served_name, request.model_path, self._without_amx(request)
                )
                self._problem = None if found is None else PlanError(found[0], reason=found[1])
        return self._problem

    def _without_amx(self, request: GroupRequest) -> frozenset[str]:
        """Returns the roles on CPUs without AMX, whatever is free there; only a model in 4 bits asks it."""
        if request.profile.scheme.name not in FOUR_BITS:
            return frozenset()
        return roles_without_amx(request.spec, self.observation.nodes or (), self.observation.calibrations)

    def _known_request(self) -> GroupRequest:
        if self.request is None:
            raise PlanError(f"waiting for the model: {self.waits_for}", reason=WAITING_FOR_MODEL)
        return self.request

    def _with_promises(self, shortage: Shortage) -> Shortage:
        """Returns the shortage with the pods without a node that hold some of the capacity."""
        promised = [name for free_node in self._free_nodes or () for name in free_node.promised]
        words = describe_promises(promised, self.observation.resource.key.namespace)
        return Shortage(f"{shortage.message}; {words}", reason=shortage.reason) if words else shortage

    def _choose_gang(self, spec: HeteroInferenceSpec) -> Gang | None:
        return choose_gang(spec, self.observation.gangs, self.observation.unknown_gangs)

    @property
    def _are_apart(self) -> bool:
        return self.groups > 1 and self.hints

    def _capacity(self, spec: HeteroInferenceSpec, gang: Gang | None, group: int) -> Capacity:
        if self._free_nodes is None and self.observation.nodes is not None:
            self._free_nodes = build_free_nodes(self.observation.nodes, self.observation.promised)
        return Capacity(
            free_nodes=self._free_nodes,
            calibrations=self.observation.calibrations,
            others_wait=gang is not None or spec.scheduling.gang is When.NEVER,
            shortage_age_s=self.shortage_age_s,
            resource=self.observation.resource.key,
            others=self._other_groups(group) if self._are_apart else None,
            priority=preempting_priority(
                spec.scheduling.priority_class_name, self.observation.priority_classes
            ),
        )

    def _other_groups(self, group: int) -> OtherGroups:
        """Returns where the pods of the resource's other groups are, or will be."""
        if self._occupied is None:
            self._occupied = occupied_nodes(self.observation)
        occupied = [node for index, nodes in self._occupied.items() if index != group for node in nodes]
        return OtherGroups.on(occupied, self.observation.nodes or ())

    def _hinted(self, assignment: NodeAssignment, gang: Gang | None, group: int) -> NodeAssignment:
        if self._occupied is not None:
            self._occupied.setdefault(group, set()).update(assignment.nodes.values())
        nodes = assignment.nodes if self.hints else {}
        return replace(assignment, gang=gang, nodes=nodes, apart=self._are_apart)


@lru_cache(maxsize=_MOST_ANSWERS)
def _find_problem(
    spec_text: str, profile: ModelProfile, served_name: str, model_path: str, without_amx: frozenset[str]
) -> tuple[str, str] | None:
    """Returns message and reason why there is no plan however much is free, or None if there is one.

    Each resync asks it again of the same spec. An error that is raised again and again would grow.
    """
    request = GroupRequest(
        spec=parse_stored_spec(json.loads(spec_text)),
        profile=profile,
        served_name=served_name,
        model_path=model_path,
    )
    try:
        make_plan(request, Inventory(without_amx=without_amx))
    except PlanError as problem:
        return problem.message, problem.reason
    return None


def describe_promises(pods: Sequence[str], namespace: str) -> str:
    """Returns which pods without a node hold capacity, or "" if none does.

    Args:
        pods: their names, as `namespace/name`.
        namespace: of the reader, who may not know the names of other namespaces' pods.
    """
    own = [name for each in sorted(pods) for space, _, name in [each.partition("/")] if space == namespace]
    holders = own[:_MOST_NAMED]
    if len(own) > _MOST_NAMED:
        holders.append(f"{len(own) - _MOST_NAMED} more pods")
    strangers = len(pods) - len(own)
    if strangers:
        holders.append(f"{strangers} pod{'s' if strangers > 1 else ''} of other namespaces")
    words = "some of the capacity is kept for pods that have no node yet"
    return f"{words}: {', '.join(holders)}" if holders else ""


def occupied_nodes(observation: ResourceObservation) -> dict[int, set[str]]:
    """Returns the names of the nodes that each group's pods have, or are hinted at, by group."""
    key, found = observation.resource.key, defaultdict[int, set[str]](set)
    for index, pods in pods_by_group(observation.pods).items():
        found[index] |= {pod.node for pod in pods if pod.node and not pod.ended}
    for demand in observation.promised:
        group = demand.labels.get(names.LABEL_GROUP, "")
        own = demand.name.startswith(f"{key.namespace}/")
        if own and demand.labels.get(names.LABEL_RESOURCE) == key.name and group.isdecimal() and demand.node:
            found[int(group)].add(demand.node)
    return dict(found)


def gang_of(pods: Sequence[PodView]) -> Gang | None:
    """Returns the gang scheduler that the pods of an epoch were made for, or None."""
    known = {gang.value: gang for gang in Gang}
    return next((known[label] for pod in pods if (label := pod.labels.get(names.LABEL_GANG)) in known), None)


def shortage_age_s(status: HeteroInferenceStatus, now: datetime) -> float:
    """Returns how long GPUs have been missing, in seconds; 0 if they were not, as last written."""
    since = status.gpus_missing_since
    return (now - since).total_seconds() if since is not None else 0.0


def gpus_missing_since(
    status: HeteroInferenceStatus, refusals: Sequence[HeteroInferError], now: datetime
) -> datetime | None:
    """Returns since when GPUs have been missing, or None while they are not.

    Args:
        refusals: why groups have no plan now.
    """
    missing = any(refusal.reason == Shortage.reason for refusal in refusals)
    # A clock that was set back prolongs no wait.
    return min(status.gpus_missing_since or now, now) if missing else None
