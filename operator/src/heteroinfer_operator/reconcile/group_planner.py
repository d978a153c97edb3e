"""What there is to plan with, counted once a reconcile and used up by the groups that it starts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import (
    ConditionStatus,
    ConditionType,
    HeteroInferenceSpec,
    HeteroInferenceStatus,
    When,
)
from heteroinfer_operator.cluster import Gang, PodView, ResourceObservation
from heteroinfer_operator.errors import PlanError, Shortage
from heteroinfer_operator.manifests.gang import choose_gang
from heteroinfer_operator.node_assignment import NodeAssignment
from heteroinfer_operator.planning import (
    Capacity,
    GroupRequest,
    Inventory,
    Planned,
    build_free_nodes,
    make_plan,
    plan_group,
)
from heteroinfer_operator.planning.group_plan import INSUFFICIENT_CAPACITY, gpu_memory_mib, labelled_roles

WAITING_FOR_MODEL = "WaitingForModel"
UNSCHEDULABLE: Final = "Unschedulable"
"""Reason of CapacityAvailable where pods exist and have no node."""
CAPACITY_REASONS: Final = frozenset({Shortage.reason, INSUFFICIENT_CAPACITY, UNSCHEDULABLE})
"""Reasons of missing capacity."""


@dataclass(slots=True, kw_only=True)
class GroupPlanner:
    """Makes the plans of the groups that start in one reconcile.

    Attributes:
        spec: what the user asks for.
        request: what is to be planned, or None while the model is not known.
        waits_for: what is said while it is not.
        observation: nodes, and what of them is promised.
        shortage_age_s: how long GPUs have been missing; None where waiting is of no use.
        hints: whether pods name the node that was found for them: not where there is one machine.
    """

    spec: HeteroInferenceSpec
    request: GroupRequest | None
    waits_for: str
    observation: ResourceObservation
    shortage_age_s: float | None
    hints: bool = True
    _capacity: Capacity | None = field(init=False, default=None)

    def make(self) -> Planned:
        """Returns the plan of one more group; what it takes is not given to the next.

        Raises:
            Shortage: GPUs or other capacity is missing now.
            PlanError: there is no plan, or the model is not known yet.
        """
        request, gang = self._known_request(), choose_gang(self.spec, self.observation.gangs)
        if self._capacity is None:
            nodes = self.observation.nodes
            free_nodes = None if nodes is None else build_free_nodes(nodes, self.observation.promised)
            self._capacity = Capacity(
                free_nodes=free_nodes,
                others_wait=gang is not None or self.spec.scheduling.gang is When.NEVER,
                shortage_age_s=self.shortage_age_s,
            )
        planned = plan_group(request, self._capacity)
        hints = planned.node_assignment.nodes if self.hints else {}
        return replace(planned, node_assignment=replace(planned.node_assignment, gang=gang, nodes=hints))

    def node_assignment_again(self, plan: Plan, pods: Sequence[PodView]) -> NodeAssignment:
        """Returns where pods belong that are created for an epoch which has others already.

        Args:
            plan: of the epoch.
            pods: those others.
        """
        labelled = labelled_roles(self.spec, self.observation.nodes or ())
        return NodeAssignment(
            gang=gang_of(pods),
            gpu_memory_mib=gpu_memory_mib(self.spec, plan, labelled),
        )

    def refusal(self) -> PlanError | None:
        """Returns why there would be no plan however much were free, or None if there is one."""
        try:
            choose_gang(self.spec, self.observation.gangs)
            make_plan(self._known_request(), Inventory())
        except PlanError as refusal:
            return refusal
        return None

    def _known_request(self) -> GroupRequest:
        if self.request is None:
            raise PlanError(f"waiting for the model: {self.waits_for}", reason=WAITING_FOR_MODEL)
        return self.request


def gang_of(pods: Sequence[PodView]) -> Gang | None:
    """Returns the gang scheduler that the pods of an epoch were made for, or None."""
    return next((Gang(label) for pod in pods if (label := pod.labels.get(names.LABEL_GANG))), None)


def shortage_age_s(status: HeteroInferenceStatus, now: datetime) -> float:
    """Returns how long GPUs have been missing, in seconds; 0 if they were not, as last written."""
    capacity = status.condition(ConditionType.CAPACITY_AVAILABLE.value)
    short = (
        capacity is not None
        and capacity.status is ConditionStatus.FALSE
        and capacity.reason == Shortage.reason
    )
    return (now - capacity.last_transition_time).total_seconds() if capacity and short else 0.0
